"""Going back to a committed checkpoint without a new process.

A roll-back is a restart without the restart: the same state is loaded by the same code, and the attempt that begins
is told from one of a fresh process only by its cause. What keeps it exact:

- Parameters and optimizer state are written in place, so DDP keeps its gradient buckets: those that a fresh process
  rehearses for (see `replication.rehearse`). RNG is a function of the step; batches are functions of the position.
- All ranks do it or none does. The target is compared with model and optimizer on every rank, and each of its bytes is
  verified by some rank, before anything is changed on any. It is verified again while it is loaded. What is found out
  only then, storage that fails in between or an object of the user's that refuses its state, sends all ranks back to
  the newest state that is left.
- The record is claimed after the state is loaded, and no step follows before it is. A rank that dies before the claim
  leaves the old attempt, and the restart goes on from its newest snapshot; one that dies after it leaves the new
  attempt, and the restart goes on from the target.
- What was snapshotted or is still being saved of the steps gone back over leaves the lineage with the claim: buffers
  with it are free, the drain does not write it, nothing restores it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surefoot.checkpoint.attempts import SkipWindow, Source, StartsFrom
from surefoot.checkpoint.catalog import list_committed, read_manifest
from surefoot.checkpoint.ids import CheckpointId
from surefoot.errors import CheckpointError, UsageError
from surefoot.faultpoints import reach
from surefoot.sdk.attempts import Attempts
from surefoot.sdk.data.order import position
from surefoot.sdk.host import Host
from surefoot.sdk.opening import open_committed, read_patiently, verify_share
from surefoot.sdk.restore import Restored, describe_problem, worst_of
from surefoot.sdk.state import TrainingState
from surefoot.sdk.trained import Counters


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
        HalfLoaded: an object of the user's refused its state, or storage failed since it was verified.
    """
    worst = worst_of(host.group.gather_json(_find_problem(host, state, target)))
    if worst is not None:
        _report_damage(host, target, worst)
        reason = ": ".join(filter(None, (worst["key"] or worst["file"], worst["reason"])))
        raise Refusal(f"step {target.step} of attempt {target.attempt} cannot be loaded: {reason}")
    problem: dict[str, str] | None = None
    scalars: dict[str, Any] = {}
    try:
        with open_committed(host, target) as (tensors, scalars):
            state.restore(tensors, scalars["state"])
    except (UsageError, CheckpointError, OSError) as error:
        problem = describe_problem(error)
    reach("rollback.loaded")
    worst = worst_of(host.group.gather_json(problem))
    if worst is not None:
        _report_damage(host, target, worst)
        raise HalfLoaded(": ".join(filter(None, (worst["key"] or worst["file"], worst["reason"]))))
    starts_from = StartsFrom(attempt=target.attempt, step=target.step, source=Source.COMMITTED)
    return Restored(starts_from, Counters.from_scalars(scalars))


def _find_problem(host: Host, state: TrainingState, target: CheckpointId) -> dict[str, str] | None:
    """Return why this rank cannot load the target, None: it can. Looks at every byte of its share of the shards."""
    try:
        if target not in read_patiently(lambda: list_committed(host.store)):
            raise CheckpointError("there is no such checkpoint on storage")
        with open_committed(host, target) as (tensors, scalars):
            state.check(tensors, scalars["state"])
        manifest = read_patiently(lambda: read_manifest(host.store, target, host.settings.spec.job))
        verify_share(host, manifest)
    except (UsageError, CheckpointError, OSError) as error:
        return describe_problem(error)
    return None


def _report_damage(host: Host, target: CheckpointId, problem: dict[str, str]) -> None:
    if problem["file"] and host.group.rank == 0:
        # Ranks never change storage: the drain looks for itself and moves it to quarantine.
        host.folder.write_report(target, problem["file"], problem["reason"])


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
