"""Files of a stack that hold something else are as none."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.embedded import status
from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import Plan, PlanUnreadable, Service, read_plan
from surefoot.embedded.stack import Ports, make_plan
from surefoot.embedded.stack_file import ServiceState, ServiceStatus, Stack, StackState, read_stack
from surefoot.embedded.status import report

GOOD = asdict(Stack(7, "/h", {"api": "http://x:1"}, None, StackState.RUNNING, {"a": ServiceStatus(ServiceState.READY)}))
WRONG = [
    "", "{", "{}", "[]", "null", "7", '"x"', '{"services":{}}', "[" * 100_000,
    *(
        json.dumps(GOOD | change)
        for change in (
            {"state": "unknown"}, {"state": None}, {"pid": "7"}, {"pid": -7}, {"pid": 0}, {"home": None}, {"urls": []},
            {"urls": {"api": 1}}, {"services": []}, {"services": {"a": None}}, {"services": {"a": {"state": "odd"}}},
            {"services": {"a": {"pid": "1"}}}, {"failed": "a"}, {"failed": [1]}, {"token_file": 1}, {"detail": []},
        )
    ),
]  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "home")
    layout.make()
    return layout


def test_what_is_written_is_read(layout: Layout) -> None:
    services = {"a": ServiceStatus(ServiceState.BACKING_OFF, 9, 2, 1.5, "ended")}
    stack = Stack(7, str(layout.home), {"api": "http://x:1"}, "/t", StackState.FAILED, services, ["a"], "a ended")
    stack.write()
    assert read_stack(layout.home) == stack
    plan = Plan(str(layout.home), (Service("a", ("b", "c"), after=("d",)),), {"api": "u"}, {"K": "v"})
    plan.write(layout.plan_file)
    assert read_plan(layout.plan_file) == plan


@pytest.mark.parametrize("content", WRONG, ids=lambda content: content[-40:])
def test_a_stack_file_of_another_shape_is_as_none(layout: Layout, content: str) -> None:
    layout.stack_file.write_text(content)
    assert read_stack(layout.home) is None


@pytest.mark.parametrize("content", ["{}", "null", '{"services":{}}'])
@pytest.mark.parametrize("command", [["status"], ["jobs"], ["down"]], ids=lambda words: words[0])
def test_commands_have_something_to_say(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, content: str, command: list[str]
) -> None:
    monkeypatch.delenv("SUREFOOT_API_URL", raising=False)
    layout.stack_file.write_text(content)
    result = CliRunner().invoke(app, [*command, "--home", str(layout.home)])
    said = result.output + str(result.exception or "")
    assert "no stack runs in" in said


@pytest.mark.parametrize("url", ["", "x", "http://127.0.0.1:x", "http://127.0.0.1:99999999", "http://[", "redis://h"])
def test_ports_that_are_none_are_chosen_anew(layout: Layout, url: str) -> None:
    Stack(7, str(layout.home), dict.fromkeys(("api", "gateway", "redis", "other"), url)).write()
    assert set(make_plan(layout, Ports()).urls) == {"api", "gateway", "redis", "database"}


def test_a_plan_that_cannot_be_read_is_said_to_be(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "running_stack", read_stack)
    Stack(os.getpid(), str(layout.home), {}, state=StackState.RUNNING).write()
    for content in ("{}", "null", '{"home": "/h", "services": [{"name": 1}], "environment": {"T": "secret"}}'):
        layout.plan_file.write_text(content)
        with pytest.raises(PlanUnreadable):
            read_plan(layout.plan_file)
        found = report(layout.home)
        assert [(row.name, row.healthy) for row in found.services] == [("plan", False)]
        assert "secret" not in found.services[0].detail
    Plan(str(layout.home), (Service("a", ("b",)),)).write(layout.plan_file)
    assert [row.state for row in report(layout.home).services] == ["waiting"], "the stack file lacks it"
