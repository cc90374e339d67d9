"""Messages for the gateway's tests, a scrape as numbers, and the service as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from helpers.waiting import wait_until
from surefoot.events import MESSAGE_TYPES, AttemptStarted, Message, StepCompleted, decode_message

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def step(number: int, *, job: str = "demo", attempt: int = 1, loss: float = 2.0, **fields: Any) -> StepCompleted:
    defaults: dict[str, Any] = {
        "updates": number, "epoch": 0, "grad_norm": 1.0, "learning_rate": 1e-3, "applied": True, "num_samples": 16,
        "num_tokens": 2048, "step_seconds": (0.2, 0.25), "position": number,
    }  # fmt: skip
    return StepCompleted(job=job, attempt=attempt, rank=0, step=number, loss=loss, **(defaults | fields))


def attempt_started(
    attempt: int, *, job: str = "demo", from_attempt: int = 0, from_step: int = 0, **fields: Any
) -> AttemptStarted:
    source = "SEED" if from_attempt == 0 else "STAGED"
    defaults: dict[str, Any] = {"world_size": 2, "source": source, "cause": "a test", "total_steps": 100}
    return AttemptStarted(
        job=job, attempt=attempt, rank=0, from_attempt=from_attempt, from_step=from_step, **(defaults | fields)
    )


def golden(cls: type[Message], **fields: Any) -> Message:
    """The message of a golden file, with some fields changed."""
    data = json.loads((GOLDEN / f"{cls.type}.json").read_text()) | fields
    message = decode_message(json.dumps(data))
    assert message is not None
    return message


def golden_messages() -> list[Message]:
    return [golden(cls) for name, cls in MESSAGE_TYPES.items() if (GOLDEN / f"{name}.json").exists()]


def parse_metrics(text: str) -> dict[Sample, float]:
    """Series of an exposition by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def counters(text: str) -> dict[Sample, float]:
    """Those that may never fall: counters, and the counts of histograms."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


class Gateway:
    """The service as a process of its own."""

    def __init__(self, redis_url: str, home: Path, **environment: str) -> None:
        self.log = home / "gateway.log"
        home.mkdir(parents=True, exist_ok=True)
        settings = {"SUREFOOT_REDIS_URL": redis_url, "SUREFOOT_HOME": str(home), "SUREFOOT_GATEWAY_PORT": "0"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "surefoot_gateway"], stderr=log, env=os.environ | settings | environment
            )

    def wait_for_url(self) -> str:
        return wait_until(self._url, 30, "the gateway serves")

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body; never follows a redirect."""
        request = urllib.request.Request(self.wait_for_url() + path, headers=headers)
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read().decode()

    def wait_until_ready(self) -> None:
        wait_until(lambda: self.get("/readyz")[0] == 200, 30, "the gateway is ready", every_seconds=0.05)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(15)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def lines(self) -> list[dict[str, Any]]:
        complete = self.log.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]

    def _url(self) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        return next((line["url"].rstrip("/") for line in self.lines() if line["event"] == "serving"), None)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None
