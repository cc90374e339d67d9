"""Runs in the fork server: imports what ranks need, says so through a pipe, and leaves the process fit for forking.

The fork server imports this module by name and ignores an ImportError (multiprocessing.forkserver.main), so the
launcher believes only what comes through the pipe. Nothing here starts a thread, a process group or CUDA; if an
imported module does, forked ranks could hang, and the launcher starts them the slow way.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from surefoot.processes import set_parent_death_signal
from surefoot_worker.launcher.hugepages import collapse_memory
from surefoot_worker.launcher.output import open_for_append
from surefoot_worker.launcher.signals import let_pass

REQUEST_ENVIRONMENT_KEY = "SUREFOOT_PRELOAD"
PRELOAD_HOOK = "surefoot_preload"
"""A function of this name in the package that `-m` runs is called without arguments in the fork server."""

_ALWAYS = (
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "numpy",
    "surefoot_worker.launcher.entry",
)
_IF_INSTALLED = ("surefoot.sdk",)


@dataclass(frozen=True)
class PreloadRequest:
    """What the launcher asks of the fork server, handed over in its environment as JSON.

    Args:
        launcher_pid: The parent that it must die with.
        fifo: Pipe for the answer.
        log: File for anything that imported modules print.
        words: The job's entrypoint.
        module_path: sys.path of the ranks.
    """

    launcher_pid: int
    fifo: str
    log: str
    words: list[str]
    module_path: list[str]


@dataclass(frozen=True)
class PreloadAnswer:
    """What the fork server says: its pid, what it imported, how long that took, and what is wrong, if anything."""

    pid: int
    modules: list[str]
    seconds: float
    problem: str | None


def main(request: PreloadRequest) -> None:
    """Set up this process as the fork server of one launcher and answer."""
    began = time.monotonic()
    set_parent_death_signal(request.launcher_pid)
    let_pass()  # some send it to every process of the job; ranks set the same for themselves
    os.setsid()  # Ctrl-C in the launcher's terminal is the launcher's business
    # The reader is there already, so this does not wait; without it the launcher is gone, and so is our purpose.
    answer_fd = os.open(request.fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    _redirect_output(Path(request.log))
    sys.path[:] = request.module_path
    modules: list[str] = []
    try:
        _import_all(request.words, modules)
        problem = _what_forbids_forking()
    except BaseException as error:  # noqa: BLE001  any error of any imported module, SystemExit included
        problem = f"importing the entrypoint's modules raised {type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # or the first collection in each rank would copy every page of what was imported
    collapse_memory()
    answer = PreloadAnswer(os.getpid(), modules, time.monotonic() - began, problem)
    os.set_blocking(answer_fd, True)
    with os.fdopen(answer_fd, "wb") as pipe:
        pipe.write(json.dumps(asdict(answer)).encode() + b"\n")


def _redirect_output(log: Path) -> None:
    fd = open_for_append(log)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _import_all(words: list[str], done: list[str]) -> None:
    torch = importlib.import_module("torch")
    # Two threads in the parent and in a forked child: the child hangs in the first parallel operator.
    torch.set_num_threads(1)
    done.append("torch")
    for name in (*_ALWAYS, *(name for name in _IF_INSTALLED if importlib.util.find_spec(name))):
        importlib.import_module(name)
        done.append(name)
    entrypoint = importlib.import_module("surefoot_worker.launcher.entrypoint")
    program = entrypoint.Entrypoint.parse(words)
    for statement in entrypoint.imports_of(program):
        statement.perform()
        done.append(statement.module)
    # A package run with -m may do more here, once, than importing: build a model, warm a cache.
    hook = getattr(sys.modules.get(program.target), PRELOAD_HOOK, None) if program.is_module else None
    if hook is not None:
        hook()
        done.append(f"{program.target}.{PRELOAD_HOOK}")


def _what_forbids_forking() -> str | None:
    import torch

    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"the entrypoint's modules start threads when they are imported: {names}"
    if torch.cuda.is_initialized():
        return "the entrypoint's modules initialise CUDA when they are imported"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "the entrypoint's modules make a process group when they are imported"
    return None


_request = os.environ.pop(REQUEST_ENVIRONMENT_KEY, None)
if _request is not None:
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")
    main(PreloadRequest(**json.loads(_request)))
