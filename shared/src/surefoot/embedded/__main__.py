"""The supervisor as a process of its own: `python -m surefoot.embedded PLAN`; started by `surefoot up`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from surefoot.embedded.layout import Layout
from surefoot.embedded.log_files import LogFile
from surefoot.embedded.plan import read_plan
from surefoot.embedded.supervisor import Supervisor
from surefoot.errors import SurefootError
from surefoot.telemetry import logging as logs


class _LogStream(io.TextIOBase):
    """stderr of the supervisor, bounded like the logs of its services."""

    def __init__(self, log: LogFile) -> None:
        self._log = log

    def write(self, text: str) -> int:
        self._log.feed(text.encode())
        return len(text)


def main(plan_path: Path) -> int:
    """Supervise the services of a plan, whose file is removed, until SIGTERM; return the exit code."""
    plan = read_plan(plan_path)
    plan_path.unlink()
    sys.stderr = _LogStream(LogFile(Layout(Path(plan.home)).log_file("supervisor"), "supervisor"))
    logs.configure("supervisor")
    try:
        return Supervisor(plan).run()
    except SurefootError as error:
        print(f"surefoot: error: {error}", file=sys.stderr)  # noqa: T201  its log
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
