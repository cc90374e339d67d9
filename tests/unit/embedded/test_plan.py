"""The commands of the services."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.embedded.layout import Layout
from surefoot.embedded.plan import Plan
from surefoot.embedded.stack import Ports, make_plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(Layout(tmp_path / "home"), Ports())


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """A folder of a user with files that are named like packages of ours."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    for name in ("redis", "xxhash", "sqlalchemy", "pydantic", "celery"):
        (folder / f"{name}.py").write_text("raise SystemExit('the file of the user was imported')\n")
    return folder


def test_no_service_imports_from_the_current_folder(plan: Plan) -> None:
    commands = {service.name: service.command for service in plan.services if service.name != "server"}
    assert len(commands) == 8
    assert {command[:3] for command in commands.values()} == {(sys.executable, "-P", "-m")}


@pytest.mark.parametrize("name", ["writer-tasks", "api", "database"])
def test_files_of_the_user_in_the_current_folder_are_not_imported(plan: Plan, cwd: Path, name: str) -> None:
    command = next(list(service.command) for service in plan.services if service.name == name)
    if name == "writer-tasks":  # the same command line up to what Celery is to do
        command[command.index("worker") :] = ["report"]
    elif name == "api":
        command[-1] = "nobody"
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert "the file of the user" not in done.stderr
    assert done.returncode == (2 if name == "api" else 0), done.stderr
