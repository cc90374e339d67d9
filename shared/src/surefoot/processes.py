"""Processes of a job: they die with their parent, and those left over from an earlier run can be found and ended.

Linux only. Every process of a job carries `SUREFOOT_JOB_KEY` in the environment it was executed with; forked children
share that page of memory, so `/proc/<pid>/environ` shows it for them too (proc(5)).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

JOB_KEY_ENVIRONMENT_KEY = "SUREFOOT_JOB_KEY"

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PROC = Path("/proc")
_DRAIN_MODULE = b"surefoot.checkpoint.drain"
"""A drain outlives its job on purpose and leaves by itself."""


def set_parent_death_signal(parent_pid: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when the thread that forked it ends (prctl(2)).

    Args:
        parent_pid: Who the parent must be. If it died before the request was made, no signal would ever come, so
            this process ends itself then. None: not checked.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing_by(pid: int) -> None:
    """Let another process of this user and its children read this one's stacks (prctl(2), Linux' Yama module).

    Only matters where /proc/sys/kernel/yama/ptrace_scope is 1, as on Ubuntu; elsewhere the call has no effect.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def find_processes(variable: str, value: str) -> list[int]:
    """Return the pids on this host, this one left out, that were executed with a variable of exactly this value."""
    return [pid for pid in _all_pids() if pid != os.getpid() and _carries(pid, variable, value)]


def find_job_processes(job_key: str, *, keep: Collection[int] = ()) -> list[int]:
    """Return the pids of the job's processes on this host that we may look at, without this one and any drain.

    Args:
        job_key: Exactly this key and no other.
        keep: Pids to leave out.
    """
    return [pid for pid in _all_pids() if pid != os.getpid() and pid not in keep and _belongs_to(pid, job_key)]


def kill_job_processes(job_key: str, *, keep: Collection[int] = (), timeout_seconds: float = 10.0) -> list[int]:
    """SIGKILL what `find_job_processes` finds and wait until it is gone.

    A pid cannot come to mean another process in between: it is held by a pidfd before it is looked at again.

    Args:
        job_key: Exactly this key and no other.
        keep: Pids not to touch.
        timeout_seconds: How long to wait for the end of each.

    Returns:
        The pids killed.

    Raises:
        TimeoutError: one is still there after `timeout_seconds` (stuck in the kernel); names the pids.
    """
    held: dict[int, int] = {}
    try:
        for pid in find_job_processes(job_key, keep=keep):
            with suppress(ProcessLookupError):
                held[pid] = os.pidfd_open(pid)
        for pid, fd in held.items():
            if _belongs_to(pid, job_key):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        _wait_all_gone(held, time.monotonic() + timeout_seconds)
    finally:
        for fd in held.values():
            os.close(fd)
    return sorted(held)


def _wait_all_gone(held: dict[int, int], deadline: float) -> None:
    for pid, fd in held.items():
        poll = select.poll()  # a pidfd is readable once its process has ended
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"process {pid} of the job does not end after SIGKILL")


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208  hundreds of entries


def _belongs_to(pid: int, job_key: str) -> bool:
    return _carries(pid, JOB_KEY_ENVIRONMENT_KEY, job_key) and _DRAIN_MODULE not in command_words(pid)


def _carries(pid: int, variable: str, value: str) -> bool:
    try:
        return f"{variable}={value}".encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or not ours to look at
        return False


def command_words(pid: int) -> list[bytes]:
    """Return the command line of a process; empty once it has ended, a zombie's too."""
    try:
        line = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return line.split(b"\0")[:-1] if line else []
