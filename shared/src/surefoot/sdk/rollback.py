"""Going back to a committed checkpoint without a new process.

A roll-back is a restart without the restart: the same state is loaded by the same code, and the attempt that begins
is told from one of a fresh process only by its cause. What keeps it exact:

- Parameters are written in place, so DDP keeps its gradient buckets: those that a fresh process rehearses for (see
  `replication.rehearse`). Optimizer state is made anew, as at a start. RNG is a function of the step; batches are
  functions of the position.
- All ranks do it or none does. The target is read, verified and compared with model and optimizer on every rank
  before anything is changed on any. Only an object of the user's that refuses its state is found out later; then all
  ranks go back to the newest state that is left.
- The record is claimed after the state is loaded, and no step follows before it is. A rank that dies before the claim
  leaves the old attempt, and the restart goes on from its newest snapshot; one that dies after it leaves the new
  attempt, and the restart goes on from the target.
- What was snapshotted or is still being saved of the steps gone back over leaves the lineage with the claim: buffers
  with it are free, the drain does not write it, nothing restores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from surefoot.checkpoint.attempts import SkipWindow, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import CheckpointError, DamagedCheckpoint, UsageError
from surefoot.faultpoints import reach
from surefoot.sdk.attempts import Attempts
from surefoot.sdk.data.order import position
from surefoot.sdk.host import Host
from surefoot.sdk.restore import Restored, open_committed
from surefoot.sdk.state import TrainingState


class Refusal(Exception):
    """A command cannot be obeyed; the message says why. Nothing was changed."""


class HalfLoaded(Exception):
    """Some rank did not take the whole state: another one must be loaded before training goes on."""


def check_target(attempts: Attempts, target: CheckpointId) -> None:
    """Refuse what does not lead to the present; reads nothing.

    Raises:
        Refusal: says why.
    """
    if not attempts.is_on_lineage(target):
        newest = max(attempts.records)
        raise Refusal(f"step {target.step} of attempt {target.attempt} is not on the lineage of attempt {newest}")


def load_committed(host: Host, state: TrainingState, target: CheckpointId) -> Restored:
    """Load a committed checkpoint into the running model on all ranks. Collective; 0.1 s for 50 MB.

    Raises:
        Refusal: some rank cannot read it, or it does not fit; nothing was changed.
        HalfLoaded: an object of the user's refused its state.
    """
    tensors, scalars, problem = _read(host, state, target)
    problems = [p for p in host.group.gather_json(problem) if p is not None]
    if problems:
        damaged = next((p for p in problems if p["file"]), None)
        if damaged is not None and host.group.rank == 0:
            # Ranks never change storage: the drain looks for itself and moves it to quarantine.
            host.folder.write_report(target, damaged["file"], damaged["reason"])
        reason = (damaged or problems[0])["reason"]
        raise Refusal(f"step {target.step} of attempt {target.attempt} cannot be loaded: {reason}")
    refused = None
    try:
        state.restore(tensors, scalars["state"])
    except UsageError as error:
        refused = str(error)
    reach("rollback.loaded")
    refusals = [r for r in host.group.gather_json(refused) if r is not None]
    if refusals:
        raise HalfLoaded(refusals[0])
    starts_from = StartsFrom(attempt=target.attempt, step=target.step, source=Source.COMMITTED)
    return Restored(starts_from, scalars["step"], scalars["updates"])


def _read(
    host: Host, state: TrainingState, target: CheckpointId
) -> tuple[Mapping[str, Tensor], dict[str, Any], dict[str, str] | None]:
    """Return the target, whole and verified, in memory of our own; or what is wrong with it."""
    try:
        if target not in list_committed(host.store):
            return {}, {}, {"reason": "there is no such checkpoint on storage", "file": ""}
        with open_committed(host, target) as (tensors, scalars):
            state.check(tensors, scalars["state"])
            return tensors, scalars, None
    except DamagedCheckpoint as error:
        return {}, {}, {"reason": str(error), "file": error.path}
    except (UsageError, CheckpointError, OSError) as error:
        return {}, {}, {"reason": str(error), "file": ""}


def with_new_windows(
    windows: tuple[SkipWindow, ...], added: Iterable[SkipWindow], from_step: int
) -> tuple[SkipWindow, ...]:
    """Return all skip windows of an attempt that leaves out more than the one before. Pure.

    Windows speak of batch positions. What lies before the first batch of the attempt has been trained on: to leave it
    out after the fact would shift every later step over data that nobody asked to skip, so it is cut off.

    Args:
        windows: Those that hold already.
        added: New ones.
        from_step: The step that the attempt starts from.
    """
    first = position(from_step, windows)
    cut = [SkipWindow(start=max(w.start, first), stop=w.stop) for w in added if w.stop > first]
    return windows + tuple(window for window in cut if window not in windows)
