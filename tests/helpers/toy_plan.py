"""What can happen to a toy job, as data: hypothesis draws it, `toy_history` carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Start:
    """One start of the job and how it ends.

    Attributes:
        world_size: Number of ranks.
        num_steps: How many more steps it has to go.
        save_every: A save every so many steps.
        num_buffers: Of each rank.
        every_step: A snapshot in memory after each step, not only for saves; needs more than one buffer.
        rank_fault: Plan of fault points in one of the ranks, e.g. "staging.copied=kill@2".
        faulty_rank: Which.
        kill_after: SIGKILL all ranks as soon as one has said so many steps; None: never.
        drain_fault: Plan of fault points in the drain that it starts with.
        roll_back: (which step of this start, which of the committed checkpoints on the lineage) or None.
        ending: What becomes of the drain once the ranks are gone.
        from_seed: Begin again although there is something to go on from.
        keep_last: Retention of the drain; None: it removes nothing.
    """

    world_size: int = 1
    num_steps: int = 4
    save_every: int = 2
    num_buffers: int = 3
    every_step: bool = True
    rank_fault: str = ""
    faulty_rank: int = 0
    kill_after: int | None = None
    drain_fault: str = ""
    roll_back: tuple[int, int] | None = None
    ending: str = "closes down"
    from_seed: bool = False
    keep_last: int | None = None

    @property
    def is_killed(self) -> bool:
        """Its ranks may end early."""
        return bool(self.rank_fault) or self.kill_after is not None

    @property
    def is_undisturbed(self) -> bool:
        """Nothing ends its ranks early, and nothing takes the target of a roll-back from them."""
        return not self.is_killed and self.keep_last is None

    def checkpoint_spec(self) -> dict[str, Any]:
        """Return the keys of `surefoot.spec.CheckpointSpec` that it sets."""
        return {
            "save_every_steps": self.save_every,
            "snapshot_every_steps": int(self.every_step and self.num_buffers > 1),
            "num_buffers": self.num_buffers,
            "retention": {"keep_last": self.keep_last},
        }


ENDINGS = ("closes down", "is killed", "stays")


@dataclass(frozen=True)
class Damage:
    """Harm to one file of a committed checkpoint: 0 is the newest one, and so on."""

    checkpoint: int
    file: int
    how: str
    where: float = 0.5


DAMAGES = ("flip", "truncate", "empty", "delete", "append")


@dataclass(frozen=True)
class Drop:
    """Staging memory that is lost: all of it, one buffer, or the newest header slot of one buffer."""

    what: str
    buffer: int = 0


DROPS = ("folder", "buffer", "header")


@dataclass(frozen=True)
class Touch:
    """Other modification times on everything in storage: "equal", "reversed" or "random"."""

    order: str


ORDERS = ("reversed", "equal", "random")


@dataclass(frozen=True)
class Prune:
    """Retention in a process of its own, which may be killed on the way."""

    keep_last: int = 2
    faults: str = ""


Operation = Start | Damage | Drop | Touch | Prune
