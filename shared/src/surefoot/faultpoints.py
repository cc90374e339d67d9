"""Places where a test can kill this process or make a system call fail.

`SUREFOOT_FAULT="drain.shard_written=kill"` kills the process with SIGKILL when it gets there;
`...=kill@3` at the third time; `...=enospc` and `...=eio` raise that OSError. Several are joined by commas.
Without the variable a point costs one dictionary look-up.
"""

from __future__ import annotations

import errno
import os
import signal

_ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO}


def _parse(text: str) -> dict[str, tuple[str, int]]:
    plan: dict[str, tuple[str, int]] = {}
    for item in filter(None, text.split(",")):
        name, _, action = item.partition("=")
        action, _, nth = action.partition("@")
        plan[name] = (action, int(nth or 1))
    return plan


_plan = _parse(os.environ.get("SUREFOOT_FAULT", ""))
_reached: dict[str, int] = {}


def plan(text: str) -> None:
    """Replace this process's plan, in the form of `SUREFOOT_FAULT`, for a test that learns its rank only now."""
    _plan.clear()
    _plan.update(_parse(text))
    _reached.clear()


def reach(name: str) -> None:
    """Say that execution got to the point `name`; acts only when a test planned a fault there.

    Raises:
        OSError: when the plan says so.
    """
    planned = _plan.get(name)
    if planned is None:
        return
    _reached[name] = _reached.get(name, 0) + 1
    action, nth = planned
    if _reached[name] != nth:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(_ERRNO[action], f"{os.strerror(_ERRNO[action])} (fault point {name})")
