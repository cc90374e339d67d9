"""The gateway as a process, on a real server."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.gateway import Gateway, attempt_started, counters, golden, parse_metrics, step
from helpers.server import RealServer, free_port
from helpers.waiting import wait_until
from surefoot.bus.base import Outgoing
from surefoot.bus.redis_bus import RedisBus
from surefoot.bus.streams import EVENTS
from surefoot.events import CheckpointCommitted, IncidentChanged, Message, RankFailed
from surefoot.telemetry.health import HealthState, read_health
from surefoot_gateway.table import METRICS

STEPS = ("surefoot_steps_total", (("job_id", "demo"), ("outcome", "applied")))


@pytest.fixture
def make_gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    made: list[Gateway] = []

    def make(url: str, **environment: str) -> Gateway:
        made.append(Gateway(url, tmp_path / f"home-{len(made)}", **environment))
        return made[-1]

    yield make
    for gateway in made:
        gateway.close()


class Sender:
    """One sender; counts its messages up."""

    def __init__(self, bus: RedisBus, source: str = "job:demo:1") -> None:
        self.bus, self.source, self.sent = bus, source, []

    def send(self, *messages: Message) -> None:
        items = [Outgoing(message, self.source, len(self.sent) + n) for n, message in enumerate(messages, 1)]
        self.bus.publish(EVENTS, items)
        self.sent.extend(items)

    def repeat(self) -> None:
        """Send everything again, as a forwarder does that died before it had noted where it was."""
        self.bus.publish(EVENTS, self.sent)


def metrics(gateway: Gateway) -> str:
    status, _, body = gateway.get("/metrics")
    assert status == 200
    return body


def wait_for_steps(gateway: Gateway, number: float) -> None:
    wait_until(lambda: parse_metrics(metrics(gateway)).get(STEPS) == number, 20, f"{number} steps are counted")


def test_m2_metrics_answer_200_begin_at_0_and_never_fall(
    bus_url: str, bus: RedisBus, make_gateway: Callable[..., Gateway]
) -> None:
    sender, recovery = Sender(bus), Sender(bus, "recovery:1")
    sender.send(attempt_started(1))
    gateway = make_gateway(bus_url)
    gateway.wait_until_ready()
    status, headers, body = gateway.get("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=")
    series = parse_metrics(body)
    assert series[STEPS] == 0
    names = {name for name, _ in series}
    for metric in METRICS:
        if metric.kind != "gauge" or metric.initial is not None:
            assert {metric.name, f"{metric.name}_count"} & names, metric.name

    before: dict = {}
    for scrape in range(20):
        attempt, first = 1 + scrape // 5, 1 + 3 * scrape
        if scrape % 5 == 0 and scrape:
            failed = golden(RankFailed, job="demo", event_id=f"failed-{scrape}")
            sender.send(failed, attempt_started(attempt, from_attempt=attempt - 1, from_step=first - 3))
            recovery.send(golden(IncidentChanged, job="demo", incident_id=scrape, event_id=f"incident-{scrape}"))
        sender.send(*(step(n, attempt=attempt) for n in range(first, first + 3)))
        sender.repeat()
        now = counters(metrics(gateway))
        assert before.keys() <= now.keys()
        assert {key: value for key, value in now.items() if value < before.get(key, 0)} == {}
        before = now
    wait_for_steps(gateway, 60)
    end = parse_metrics(metrics(gateway))
    assert end["surefoot_attempts_total", (("job_id", "demo"), ("kind", "staged"))] == 3
    assert end["surefoot_messages_lost_total", (("service", "job"),)] == 0


def test_counters_are_the_same_after_a_kill(
    bus_url: str, bus: RedisBus, make_gateway: Callable[..., Gateway]
) -> None:
    sender = Sender(bus)
    sender.send(attempt_started(1), *(step(n) for n in range(1, 701)), golden(CheckpointCommitted, job="demo"))
    first = make_gateway(bus_url)
    first.wait_until_ready()
    wait_for_steps(first, 700)
    before = {key: value for key, value in counters(metrics(first)).items() if "job_id" in dict(key[1])}
    first.process.kill()
    second = make_gateway(bus_url)
    second.wait_until_ready()
    after = {key: value for key, value in counters(metrics(second)).items() if "job_id" in dict(key[1])}
    assert after == before
    job = json.loads(second.get("/live/jobs/demo.json")[2])
    assert (job["step"], len(job["curve"]["step"])) == (700, 700)


def test_the_server_away_at_start_then_there_then_killed_then_back(
    make_server: Callable[[], RealServer], make_gateway: Callable[..., Gateway]
) -> None:
    server = make_server()
    server.stop()
    gateway = make_gateway(server.url)
    status, _, body = wait_until(
        lambda: answer if (answer := gateway.get("/readyz"))[2].find(str(server.port)) > 0 else None, 20, "it says so"
    )
    assert status == 503
    assert json.loads(body)["status"] == "waiting"
    assert gateway.get("/healthz")[0] == 200
    assert parse_metrics(metrics(gateway))["surefoot_gateway_bus_up", ()] == 0

    server.start()
    sender = Sender(RedisBus(server.url))
    sender.send(attempt_started(1), step(1), step(2))
    wait_for_steps(gateway, 2)
    assert gateway.get("/readyz")[0] == 200

    server.stop()
    wait_until(lambda: gateway.get("/readyz")[0] == 503, 20, "it says that the server is away")
    assert parse_metrics(metrics(gateway))[STEPS] == 2
    assert gateway.get("/")[0] == 200
    server.start()
    sender.repeat()
    sender.send(step(3))
    wait_for_steps(gateway, 3)
    warnings = [line for line in gateway.lines() if line["level"] == "warning"]
    assert len(warnings) == 2, "one message per outage"
    sender.bus.close()


def test_it_stops_soon_with_clients_connected_and_says_how_it_was(
    bus_url: str, bus: RedisBus, make_gateway: Callable[..., Gateway]
) -> None:
    Sender(bus).send(step(1))
    gateway = make_gateway(bus_url)
    gateway.wait_until_ready()
    health_dir = gateway.log.parent / "run" / "health"
    wait_until(lambda: read_health(health_dir, "gateway").state is HealthState.OK, 5, "it is well")
    port = int(gateway.wait_for_url().rpartition(":")[2])
    idle, half = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    with idle, half:
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(15) == b"HTTP/1.1 200 OK"
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
        stopped = threading.Timer(10, gateway.process.kill)
        stopped.start()
        assert gateway.stop() == 0
        stopped.cancel()
    assert read_health(health_dir, "gateway").state is HealthState.ABSENT


def test_a_port_in_use_is_named_and_ends_it(bus_url: str, make_gateway: Callable[..., Gateway]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        gateway = make_gateway(bus_url, SUREFOOT_GATEWAY_PORT=str(port))
        assert gateway.process.wait(30) == 1
    (line,) = gateway.lines()
    assert f"127.0.0.1:{port}" in line["error"]
    assert "in use" in line["error"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
def test_the_page_draws_the_curve_in_a_browser(
    bus_url: str, bus: RedisBus, make_gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    evil = "<img src=x onerror=document.title=1>"
    sender = Sender(bus)
    sender.send(attempt_started(1), *(step(n, loss=8 - n / 10) for n in range(1, 31)))
    sender.send(attempt_started(2, from_attempt=1, from_step=20, cause=evil), step(21, attempt=2))
    sender.send(golden(IncidentChanged, job="demo", incident_id=4, state="HEALED", reason=evil, onset_step=25))
    gateway = make_gateway(bus_url, SUREFOOT_GATEWAY_PORT=str(free_port()))
    gateway.wait_until_ready()
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-quic", "--disable-sync"),
        *("--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom"),
    ]
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'browser'}", gateway.wait_for_url()],
        capture_output=True, text=True, timeout=40, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "<title>demo · Surefoot</title>" in done.stdout
    assert done.stdout.count('<path class="lost"') >= 1
    assert 'class="incident good"' in done.stdout
    assert "&lt;img src=x" in done.stdout
    assert "<img" not in done.stdout
