"""Kill a process as it enters its N-th system call: every boundary between two effects on the world, one by one.

ptrace(2) by ctypes. Counted are the calls that change something outside the process: files, folders, pipes. A death
before any other call leaves the same world as a death before the next of these.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import traceback
from collections.abc import Callable
from typing import NamedTuple

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_TRACE_SYSGOOD, _TRACE_CLONE, _EXIT_KILL = 0x1, 0x8, 0x100000
_INFO = struct.Struct("<B3xIQQQ6Q")  # struct ptrace_syscall_info: op, arch, ip, sp, then of an entry nr and arguments
_ENTRY = 1
_WALL = 0x40000000

_CALLS = {
    "x86_64": {
        1: "write", 18: "pwrite64", 20: "writev", 26: "msync", 74: "fsync", 75: "fdatasync", 77: "ftruncate",
        82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink", 257: "openat", 258: "mkdirat",
        263: "unlinkat", 264: "renameat", 265: "linkat", 285: "fallocate", 316: "renameat2",
    },
    "aarch64": {
        34: "mkdirat", 35: "unlinkat", 37: "linkat", 38: "renameat", 46: "ftruncate", 47: "fallocate", 56: "openat",
        64: "write", 66: "writev", 68: "pwrite64", 82: "fsync", 83: "fdatasync", 227: "msync", 276: "renameat2",
    },
}.get(platform.machine(), {})  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Traced(NamedTuple):
    """How a traced process ended.

    Args:
        exit_code: As of `os.waitstatus_to_exitcode`.
        calls: Names of the counted system calls that it entered, the one it was killed at last.
    """

    exit_code: int
    calls: list[str]


def run_traced(function: Callable[[], int], kill_at: int | None = None) -> Traced:
    """Run a function in a forked process and SIGKILL it as it enters its `kill_at`-th counted system call.

    The caller must be a process with one thread and no other children.

    Args:
        function: What the process does; it returns the exit code.
        kill_at: From 1; None: it is only counted.

    Raises:
        OSError: this machine does not let one trace.
    """
    pid = os.fork()
    if pid == 0:
        _run_child(function)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(-os.waitstatus_to_exitcode(status), "the process could not be traced")
    _ptrace(_SETOPTIONS, pid, _TRACE_SYSGOOD | _TRACE_CLONE | _EXIT_KILL)
    return _follow(pid, kill_at)


def why_not() -> str | None:
    """Return why processes cannot be traced here; None when they can."""
    if not _CALLS:
        return f"the system calls of {platform.machine()} are not in the table"
    try:
        traced = run_traced(lambda: 7)
    except OSError as error:
        return f"ptrace is forbidden here: {error}"
    return None if traced.exit_code == 7 else f"a traced process ended with {traced.exit_code} instead of 7"


def _run_child(function: Callable[[], int]) -> None:
    code = 1
    try:
        _ptrace(_TRACEME, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        code = function()
    except BaseException:  # noqa: BLE001  it must not go on as a second test run
        traceback.print_exc()
    finally:
        os._exit(code)


def _follow(main: int, kill_at: int | None) -> Traced:
    calls: list[str] = []
    threads = {main}
    pid, deliver = main, 0
    while True:
        _ptrace(_SYSCALL, pid, deliver)
        pid, status = os.waitpid(-1, _WALL)
        while not os.WIFSTOPPED(status):
            if pid == main:
                return Traced(os.waitstatus_to_exitcode(status), calls)
            pid, status = os.waitpid(-1, _WALL)  # a thread has ended
        stopped_by, deliver = os.WSTOPSIG(status), 0
        if stopped_by == signal.SIGTRAP | 0x80:
            call = _entered_call(pid)
            if call is not None:
                calls.append(call)
                if len(calls) == kill_at:
                    os.kill(main, signal.SIGKILL)
        elif status >> 16 == 0 and pid in threads:
            deliver = stopped_by
        threads.add(pid)  # a new thread stops once, by no signal of its own


def _entered_call(pid: int) -> str | None:
    """Return the name of the call that a process is about to enter, None where it does not count."""
    info = ctypes.create_string_buffer(_INFO.size)
    if _libc.ptrace(_GET_SYSCALL_INFO, pid, _INFO.size, ctypes.cast(info, ctypes.c_void_p)) < 0:
        return None  # killed meanwhile
    operation, _, _, _, number, *arguments = _INFO.unpack(info.raw)
    name = _CALLS.get(number) if operation == _ENTRY else None
    if name == "openat" and not arguments[2] & os.O_CREAT:
        return None
    if name in ("write", "writev") and arguments[0] in (1, 2):
        return None  # the log
    return name


def _ptrace(request: int, pid: int, data: int) -> None:
    if _libc.ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        if number != 3:  # ESRCH: it was killed, and waitpid says so next
            raise OSError(number, os.strerror(number))
