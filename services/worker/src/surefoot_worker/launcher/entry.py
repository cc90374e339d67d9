"""What the process of a rank does: become a proper process of its own, then run the user's program as `__main__`."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import util as multiprocessing_util
from pathlib import Path

from surefoot import timeline
from surefoot.processes import allow_tracing_by, set_parent_death_signal
from surefoot_worker.launcher.entrypoint import Entrypoint
from surefoot_worker.launcher.failure import write_report
from surefoot_worker.launcher.output import lossy_text, open_for_append
from surefoot_worker.launcher.signals import let_pass

_OUR_FILES = frozenset({__file__, "<frozen runpy>", runpy.__file__})
_EXIT_LIMIT_SECONDS = 5.0


@dataclass(frozen=True)
class RankStart:
    """All that a new rank is told. Values travel here and not in the environment of launcher or fork server.

    Args:
        rank: Global rank.
        environment: To be set before anything of the user's runs.
        entrypoint: What to run.
        module_path: sys.path to run it with.
        log_folder: Where stdout and stderr go.
        failure_path: Where to report an exception.
        num_threads: For torch's CPU operators.
        parent_pid: Who forks the rank: it dies when that process does.
        cause: Why this start, for the line in the logs.
        own_session: Leave the launcher's session, so that Ctrl-C in its terminal does not reach the rank.
        launcher_pid: Who may look into the rank's memory when it hangs.
    """

    rank: int
    environment: dict[str, str]
    entrypoint: Entrypoint
    module_path: list[str]
    log_folder: Path
    failure_path: Path
    num_threads: int
    parent_pid: int
    cause: str
    own_session: bool
    launcher_pid: int


def run_rank(start: RankStart) -> None:
    """Run one rank; the target of its process, in its main thread.

    Raises:
        SystemExit: with the program's exit code; 1 after an exception, or what the error's class says.
    """
    set_parent_death_signal(start.parent_pid)
    allow_tracing_by(start.launcher_pid)
    timeline.reset()
    timeline.mark("entry")
    if start.own_session:
        os.setsid()
    _redirect_output(start)
    _leave_stopping_to_the_launcher()
    _prepare_interpreter(start)
    timeline.mark("user_code")
    try:
        _run_program(start.entrypoint)
    except BaseException as error:  # noqa: BLE001  whatever leaves the user's program ends here
        _end(_report(start, error))
    _end(0)


def _report(start: RankStart, error: BaseException) -> int:
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return 0
    report = write_report(start.failure_path, error, _OUR_FILES)
    if not isinstance(error, SystemExit):
        sys.stderr.write(report.traceback)
    elif not isinstance(error.code, int):
        sys.stderr.write(f"{error.code}\n")
    # The other ranks are killed as soon as this one is gone, so a thread that will not end must not hold it here.
    timer = threading.Timer(_EXIT_LIMIT_SECONDS, os._exit, (report.exit_code,))
    timer.daemon = True
    timer.start()
    return report.exit_code


def _end(exit_code: int) -> None:
    """Do what Python does at its end and multiprocessing leaves out: wait for threads, run atexit functions."""
    getattr(threading, "_shutdown")()  # noqa: B009  private, and not in typeshed
    atexit._run_exitfuncs()
    raise SystemExit(exit_code)


def _redirect_output(start: RankStart) -> None:
    """Append stdout and stderr to the rank's files, each start announced by a line of its own."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    header = f"--- surefoot: rank {start.rank} starts, pid {os.getpid()}, {moment}, {start.cause} ---\n".encode()
    for fd, name in ((1, "out"), (2, "err")):
        file = open_for_append(start.log_folder / f"rank-{start.rank:05d}.{name}")
        os.dup2(file, fd)
        os.close(file)
        with suppress(OSError):
            os.write(fd, header)
    for stream in (sys.stdout, sys.stderr):  # modules that are imported already may have kept these
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout = sys.__stdout__ = lossy_text(1, "<stdout>")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = lossy_text(2, "<stderr>")  # type: ignore[misc]
    faulthandler.enable()


def _leave_stopping_to_the_launcher() -> None:
    """Let signals pass: the launcher decides, and ranks stop at a step boundary.

    For multiprocessing's forked children this is undone, and they are made to die with the rank (a DataLoader's
    workers would notice only after 5 s).
    """
    let_pass()
    multiprocessing_util.register_after_fork(_leave_stopping_to_the_launcher, _in_forked_child)


def _in_forked_child(_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The signal comes when the forking *thread* ends, so only the main thread's children may ask for it.
    if isinstance(threading.current_thread(), threading._MainThread):  # type: ignore[attr-defined]
        set_parent_death_signal()


def _prepare_interpreter(start: RankStart) -> None:
    # multiprocessing made our own method the default of its children; the user's DataLoader expects Python's default.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(start.environment)
    sys.path[:] = start.module_path
    sys.argv[:] = [start.entrypoint.target, *start.entrypoint.arguments]
    import torch

    torch.set_num_threads(start.num_threads)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()  # the fork server's state would be the same in every rank and every restart


def _run_program(entrypoint: Entrypoint) -> None:
    if entrypoint.is_module:
        runpy.run_module(entrypoint.target, run_name="__main__", alter_sys=True)
        return
    # By hand and not by runpy.run_path, which gives `__file__` and `sys.argv[0]` one value and takes the module away
    # before atexit functions run. Python: argv[0] as typed, __file__ absolute.
    path = Path(entrypoint.target).absolute()
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __cached__=None, __spec__=None, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # noqa: S102  running it is the point
