"""Call a function in several processes at the same moment."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

_FORK = multiprocessing.get_context("fork")  # spawned ones would import everything first, one after the other


def call_together(num_processes: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what each of them returned; fails where one raised."""
    barrier, answers = _FORK.Barrier(num_processes), _FORK.Queue()

    def run() -> None:
        barrier.wait()
        answers.put(function(*arguments))

    processes = [_FORK.Process(target=run) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * num_processes
    return [answers.get(timeout=5) for _ in processes]
