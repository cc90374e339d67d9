"""`python -m surefoot_worker.launcher SPEC.yaml [--from-seed]`: run a job without a terminal."""

from __future__ import annotations

# ruff: noqa: E402  a signal that comes during the imports below must wait, and not end this process
from surefoot_worker.launcher.signals import STOP_SIGNALS, SignalInbox

_inbox = SignalInbox().__enter__() if __name__ == "__main__" else None

import argparse
import logging
import signal
import sys
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.processes import set_parent_death_signal
from surefoot.spec import load_spec
from surefoot_worker.launcher.main import STARTED_BY_USER, launch


def main() -> int:
    """Run the job; return the exit code of `launch`, or that of the error that kept it from starting."""
    parser = argparse.ArgumentParser(prog="python -m surefoot_worker.launcher", description=__doc__)
    parser.add_argument("spec", type=Path, help="a YAML or JSON spec")
    parser.add_argument("--from-seed", action="store_true", help="start over although the job has progress")
    parser.add_argument("--cause", default=STARTED_BY_USER, help="why, for the attempt record")
    parser.add_argument("--die-with", type=int, metavar="PID", help="the parent process, whose end ends this one")
    arguments = parser.parse_args()
    if arguments.die_with is not None:
        set_parent_death_signal(arguments.die_with)
    logging.basicConfig(stream=sys.stderr, format="surefoot: %(message)s")
    try:
        spec = load_spec(arguments.spec)
        return launch(spec, from_seed=arguments.from_seed, cause=arguments.cause, inbox=_inbox)
    except SurefootError as error:
        sys.stderr.write(f"surefoot: error: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    exit_code = main()
    for number in STOP_SIGNALS:  # it is over; one more signal would only spoil the exit code
        signal.signal(number, signal.SIG_IGN)
    sys.exit(exit_code)
