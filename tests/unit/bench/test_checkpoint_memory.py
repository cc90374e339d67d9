"""What `bench.checkpoint` counts as memory of a contender, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench.checkpoint_memory import MemorySampler, held, resident
from helpers.waiting import wait_until

MB = 2**20
HOLD_BOTH = """
import mmap, sys
anonymous = mmap.mmap(-1, 40 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
shared = mmap.mmap(-1, 60 * 2**20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    """Start processes that hold 40 MB of their own and 60 MB of shared memory."""
    started = []

    def start(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD_BOTH, *arguments],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    yield start
    for process in started:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_shared_memory_counts_only_where_asked_for(holder):
    pid = holder()
    assert 100 * MB < held(pid, with_shared=True) < 130 * MB
    assert 40 * MB < held(pid, with_shared=False) < 70 * MB
    assert resident(pid) >= held(pid, with_shared=True)
    assert held(2**22 + 1, with_shared=True) == 0  # no process has this number


def test_the_sampler_counts_shared_memory_of_ranks_alone(holder):
    key = f"key-{os.getpid()}"
    holder("a.rank", BENCH_TEST_KEY=key)
    holder("a.drain", BENCH_TEST_KEY=key)
    holder("torch.distributed.run", BENCH_TEST_KEY=key)
    holder("a.rank", BENCH_TEST_KEY=f"another-{key}")
    with MemorySampler("BENCH_TEST_KEY", key, "a.rank") as sampler:
        wait_until(lambda: sampler.samples and sampler.samples[-1][1] > 0, 20, "a sample of the processes")
    peak = sampler.peak(0.0, time.monotonic())
    assert 140 * MB < peak < 200 * MB  # 40 + 60 of the rank, 40 of the drain, and two interpreters
    assert sampler.peak(time.monotonic() + 1, time.monotonic() + 2) == 0
