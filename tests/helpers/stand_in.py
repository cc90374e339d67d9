"""A tiny service for tests of the supervisor: real process, real health file, real signals.

    python stand_in.py NAME MODE

`well`, or `slow-to-stop`: takes a moment. Each appends `NAME start` and `NAME stop` to <home>/story.txt.
"""

from __future__ import annotations

import sys
import time

from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import CommonSettings

NAME, MODE = sys.argv[1:3]
SETTINGS = CommonSettings()


def tell(what: str) -> None:
    with (SETTINGS.home / "story.txt").open("a") as story:
        story.write(f"{NAME} {what}\n")


def build(runtime: Runtime) -> Turn:
    return lambda: (runtime.stopping.wait(0.2), None)[1]


if __name__ == "__main__":
    tell("start")
    print(f"{NAME} says hello on stdout")
    code = run_service(NAME, SETTINGS, build)
    if MODE == "slow-to-stop":
        time.sleep(0.3)
    tell("stop")
    sys.exit(code)
