"""Copying tensors into staging memory: at once from host memory, beside the training from a device's.

Tensors of a device go over a stream of their own while the next forward and backward run. That is safe for what only
the optimizer's step changes, if the copy is waited for before that step; everything else is queued where the forward
will be queued, so it is read before the forward changes it (CUDA C++ Programming Guide, "Streams").
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import NamedTuple, Protocol

import structlog
import torch
from torch import Tensor

_PIECE_BYTES = 4 << 20
_BYTES_PER_THREAD = 8 << 20
"""Less is copied before another thread has woken up."""
_MAX_THREADS = 8
"""More do not make memory faster."""

log = structlog.get_logger(__name__)


class Copy(NamedTuple):
    """One tensor to copy.

    Attributes:
        target: Staging memory.
        source: The live tensor, of the same shape and dtype.
        may_wait: It stays as it is until `Copier.wait` has been called.
    """

    target: Tensor
    source: Tensor
    may_wait: bool


class Copier(Protocol):
    """How tensors get into staging memory: the seam between snapshots and the device. Main thread of the rank only."""

    def use(self, memory: Sequence[memoryview]) -> None:
        """Make these regions, and no others, ready to be copied into. Before a region is unmapped it must not be used.

        Args:
            memory: Of all buffers; none at the end.
        """

    def start(self, copies: Sequence[Copy]) -> bool:
        """Copy; what may wait need not be complete on return. Values are copied, never aliased.

        Returns:
            Whether everything is complete already.
        """

    def wait(self) -> None:
        """Return when all that was started is complete. Cheap when nothing is under way."""


@torch.no_grad()
def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into its first, with all threads; complete on return, for tensors in host memory.

    Not with torch's threads: these meet after each tensor, and where other processes want the cores too (the drain
    while it writes, a loader's workers) they wait for each other most of the time: 480 MB in 120 tensors took 2.4 s on
    two busy cores, this 0.37 s. Here a thread takes the next piece when it is done with one, and nobody waits for a
    thread that has not come to run. What is not the same bytes in the same order on both sides, in host memory, is left
    to torch.

    Args:
        pairs: Target and source, of one shape.
    """
    pieces: deque[tuple[int, int, int]] = deque()
    total_bytes = 0
    held = list(pairs)  # views that nobody else holds must last until their memory has been copied
    for target, source in held:
        if not _is_plain_copy(target, source):
            target.copy_(source)
            continue
        to, of, num_bytes = target.data_ptr(), source.data_ptr(), source.nbytes
        total_bytes += num_bytes
        for start in range(0, num_bytes, _PIECE_BYTES):
            pieces.append((to + start, of + start, min(_PIECE_BYTES, num_bytes - start)))
    num_threads = min(torch.get_num_threads(), _MAX_THREADS, 1 + total_bytes // _BYTES_PER_THREAD)
    helpers = [_helpers(os.getpid()).submit(_copy_pieces, pieces) for _ in range(num_threads - 1)]
    _copy_pieces(pieces)
    for helper in helpers:
        if not helper.cancel():
            helper.result()


def _is_plain_copy(target: Tensor, source: Tensor) -> bool:
    return (
        type(source) is Tensor  # no subclass, whose memory may be anywhere
        and source.device.type == target.device.type == "cpu"
        and source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
        and not source.is_neg()
    )


def _copy_pieces(pieces: deque[tuple[int, int, int]]) -> None:
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        ctypes.memmove(*piece)  # lets other Python threads run meanwhile


@cache
def _helpers(pid: int) -> ThreadPoolExecutor:
    """Return the threads of this process: a forked child has none of its parent's."""
    return ThreadPoolExecutor(_MAX_THREADS - 1, thread_name_prefix=f"surefoot-copy-{pid}")


class HostCopier:
    """For tensors in host memory: everything is copied at once, with all threads.

    To copy while the next step computes would cost twice as much: both need the same cores and the same memory.
    """

    def use(self, memory: Sequence[memoryview]) -> None:
        """Nothing has to be done for it."""

    def start(self, copies: Sequence[Copy]) -> bool:
        """Copy everything before returning."""
        copy_all((target, source) for target, source, _ in copies)
        return True

    def wait(self) -> None:
        """Nothing is ever under way."""


class CudaCopier:
    """For tensors of CUDA devices, beside tensors in host memory (AdamW's `step`, say), which are copied at once."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._running: list[tuple[torch.cuda.Event, Sequence[Copy]]] = []
        self._pinned: dict[int, int] = {}

    def use(self, memory: Sequence[memoryview]) -> None:
        """Pin the regions, so that the device writes into them by itself; without that copies work, but slower."""
        wanted = {torch.frombuffer(region, dtype=torch.uint8).data_ptr(): region.nbytes for region in memory}
        for address in [a for a, num_bytes in self._pinned.items() if wanted.get(a) != num_bytes]:
            del self._pinned[address]
            _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))
        for address, num_bytes in wanted.items():
            if address not in self._pinned and _check(
                "cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
            ):
                self._pinned[address] = num_bytes

    @torch.no_grad()
    def start(self, copies: Sequence[Copy]) -> bool:
        """Queue the copies of each device; those that may wait on its side stream."""
        for device in {copy.source.device for copy in copies}:
            of_device = [copy for copy in copies if copy.source.device == device]
            if device.type == "cuda":
                self._start_on(device, of_device)
            else:
                HostCopier().start(of_device)
        return not self._running

    def _start_on(self, device: torch.device, copies: Sequence[Copy]) -> None:
        current = torch.cuda.current_stream(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        for target, source, may_wait in copies:
            if not may_wait:
                target.copy_(source, non_blocking=True)
        side.wait_stream(current)  # the update has been queued there, and so has what must not wait
        with torch.cuda.stream(side):
            for target, source, may_wait in copies:
                if may_wait:
                    target.copy_(source, non_blocking=True)
        # The sources are held until then: freed memory might be given to another tensor while it is still read.
        self._running.append((side.record_event(), copies))

    def wait(self) -> None:
        """Wait for the events behind the copies."""
        for event, _ in self._running:
            event.synchronize()
        self._running.clear()


def choose_copier(model: torch.nn.Module) -> Copier:
    """Return what fits the devices that the model is on."""
    return CudaCopier() if any(p.device.type == "cuda" for p in model.parameters()) else HostCopier()


def _check(function: str, error: int) -> bool:
    if int(error) == 0:
        return True
    log.warning("%s failed; snapshots go through unpinned memory, which is slower", function, cuda_error=int(error))
    with suppress(RuntimeError):
        # The runtime keeps the error for whoever asks next, which would be a kernel of the training.
        torch.zeros(1, device="cuda")
    return False
