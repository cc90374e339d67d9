"""The `surefoot` command for tests; the conftest.py of a folder makes the fixture known there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from surefoot.cli import main as cli


class Result(NamedTuple):
    code: int
    out: str
    err: str


Surefoot = Callable[..., Result]


@pytest.fixture
def surefoot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Surefoot:
    """Run a command line in this process, through the same main() that the installed command calls."""

    def run(*words: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["surefoot", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Result(int(caught.value.code or 0), out, err)

    return run
