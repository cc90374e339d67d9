"""The tables. Each has one writing service, named in its docstring; everybody may read.

A job is known by its name. Times are UTC. What a table repeats of the files on storage (attempts, checkpoints) is an
index of them: the files are the truth.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """A time zone aware datetime, UTC in the database (SQLite keeps no zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC on the way in."""
        del dialect
        if value is not None and value.tzinfo is None:
            raise ValueError("a datetime without time zone")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Put the zone back on the way out."""
        del dialect
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of all tables."""

    # Constraints have names of their own, or migrations could not change them on SQLite.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {
        datetime: UtcDateTime,
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JSON(none_as_null=True),
    }


# SQLite counts rows up only for INTEGER keys.
RowId = BigInteger().with_variant(Integer, "sqlite")


class Job(Base):
    """What was submitted, and what its owner wants of it now. Written by: api."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    spec: Mapped[dict[str, Any]]
    """The validated JobSpec, JSON form, paths absolute."""
    desired_state: Mapped[str] = mapped_column(String(16))
    """RUNNING, PAUSED or STOPPED."""
    from_seed: Mapped[bool] = mapped_column(default=False)
    generation: Mapped[int] = mapped_column(default=1)
    """Grows when the job is submitted again after it had ended."""
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class Run(Base):
    """How a job fares, and which worker has it (its lease). Written by: worker."""

    __tablename__ = "runs"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    generation: Mapped[int]
    """Of the job that this run answers."""
    state: Mapped[str] = mapped_column(String(16))
    """A surefoot.events.JobState."""
    reason: Mapped[str] = mapped_column(Text, default="")
    exit_code: Mapped[int | None]
    worker: Mapped[str | None] = mapped_column(String(128))
    """Identity of the worker that holds the lease, None when nobody does."""
    lease_version: Mapped[int] = mapped_column(default=0)
    """Grows with each renewal."""
    attempt: Mapped[int | None]
    step: Mapped[int | None]
    total_steps: Mapped[int | None]
    world_size: Mapped[int | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    updated_at: Mapped[datetime]


class Attempt(Base):
    """Index of the attempt records (`queries.attempt_row` makes one). Written by: worker."""

    __tablename__ = "attempts"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    from_attempt: Mapped[int]
    from_step: Mapped[int]
    source: Mapped[str] = mapped_column(String(16))
    cause: Mapped[str] = mapped_column(Text)
    lr_factor: Mapped[float]
    lr_hold_steps: Mapped[int | None]
    lr_rewarm_steps: Mapped[int] = mapped_column(default=0)
    lr_from_step: Mapped[int] = mapped_column(default=0)
    command: Mapped[int] = mapped_column(default=0)
    skip_windows: Mapped[list[Any]]
    """[[start, stop], ...] in batch positions."""
    world_size: Mapped[int]
    host: Mapped[str] = mapped_column(String(255))
    started_at: Mapped[datetime]


class CheckpointState(StrEnum):
    """Column `checkpoints.state`. Only what is COMMITTED may be restored, promoted or named by a command.

    COMMITTED -> QUARANTINED, and back when it is written again.
    COMMITTED -> DELETING -> no row; back to COMMITTED when it is wanted after all.
    """

    COMMITTED = "COMMITTED"
    QUARANTINED = "QUARANTINED"
    """Found damaged and moved to quarantine/."""
    DELETING = "DELETING"
    """Retention keeps it no longer; its files go soon."""


class ActionState(StrEnum):
    """Column `actions.state`: PENDING -> SENT -> one of the others."""

    PENDING = "PENDING"
    """Decided."""
    SENT = "SENT"
    APPLIED = "APPLIED"
    REFUSED = "REFUSED"
    EXPIRED = "EXPIRED"


class Checkpoint(Base):
    """Index of the committed checkpoints. Written by: writer (its service and its Celery worker)."""

    __tablename__ = "checkpoints"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    """A CheckpointState."""
    stable: Mapped[bool] = mapped_column(default=False)
    pinned: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Somebody wants to keep it: `pinned.json` says who and why."""
    loss: Mapped[float | None]
    """Mean training loss of the last steps before it."""
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    world_size: Mapped[int]
    path: Mapped[str] = mapped_column(Text)
    committed_at: Mapped[datetime]
    promoted_at: Mapped[datetime | None]
    verified_at: Mapped[datetime | None]
    verify_problem: Mapped[str | None] = mapped_column(Text)
    """None with verified_at set: every byte is good."""
    verify_tries: Mapped[int] = mapped_column(default=0)
    nonfinite_tensor: Mapped[str | None] = mapped_column(Text)
    """Name of a tensor with NaN or Inf in it: it is never promoted."""


class Incident(Base):
    """One trouble, from seen to healed. Written by: recovery."""

    __tablename__ = "incidents"
    __table_args__ = (UniqueConstraint("job", "event_id"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), index=True)
    event_id: Mapped[str] = mapped_column(String(64))
    """Of the event that opened it: delivered twice, it opens one incident."""
    attempt: Mapped[int]
    """In which it was seen."""
    kind: Mapped[str] = mapped_column(String(32))
    """An AnomalyKind, `rank_failure` or `hang`."""
    severity: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    """A surefoot.events.IncidentState."""
    onset_step: Mapped[int]
    detected_step: Mapped[int | None]
    cause: Mapped[str] = mapped_column(Text)
    """What was seen, one sentence with the numbers."""
    evidence: Mapped[dict[str, Any]]
    """The numbers."""
    outcome: Mapped[str] = mapped_column(Text, default="")
    """What was done and why, and how it ended; one sentence each."""
    resumed_attempt: Mapped[int | None]
    resumed_step: Mapped[int | None]
    """First step that was completed after the action, or a later one up to which nothing is suspected: waiting for it
    to heal counts from here."""
    recovery_seconds: Mapped[float | None]
    steps_lost: Mapped[int | None]
    announced_state: Mapped[str | None] = mapped_column(String(16))
    """The state that the last IncidentChanged told; differs from `state` until the next one is on the bus."""
    opened_at: Mapped[datetime]
    resumed_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]


class Action(Base):
    """Something recovery did or ordered; its id is the command's number. Written by: recovery."""

    __tablename__ = "actions"

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), index=True)
    attempt: Mapped[int]
    """For which it was decided."""
    kind: Mapped[str] = mapped_column(String(32))
    """rollback, set_lr, save, restart, stop, none."""
    incident_id: Mapped[int | None] = mapped_column(ForeignKey("incidents.id"), index=True)
    operation_id: Mapped[str | None] = mapped_column(String(32), unique=True)
    """Of the request that asked for it; not a foreign key, since the bus may be faster than a replica."""
    rung: Mapped[str | None] = mapped_column(String(64))
    """Name of the policy's rung."""
    command: Mapped[dict[str, Any] | None]
    """The message that is sent, JSON form."""
    reason: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    """An ActionState."""
    problem: Mapped[str] = mapped_column(Text, default="")
    decided_step: Mapped[int | None]
    """Last step that was known to be complete when it was decided: cool-downs count from here."""
    applied_step: Mapped[int | None]
    """Step at whose end the ranks applied it."""
    new_attempt: Mapped[int | None]
    seconds: Mapped[float | None]
    created_at: Mapped[datetime]
    sent_at: Mapped[datetime | None]
    closed_at: Mapped[datetime | None]


class Operation(Base):
    """A verb that somebody called. Never changed: how it fares is read off `actions` and `runs`. Written by: api."""

    __tablename__ = "operations"
    __table_args__ = (UniqueConstraint("job", "idempotency_key"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.name"), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    """stop, checkpoint, rollback, set-lr."""
    arguments: Mapped[dict[str, Any]]
    actor: Mapped[str] = mapped_column(String(128))
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    created_at: Mapped[datetime]


class AuditEntry(Base):
    """Every call that changed something, and every one that was refused. Written by: api."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(RowId, primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(128))
    method: Mapped[str] = mapped_column(String(8))
    path: Mapped[str] = mapped_column(Text)
    status: Mapped[int]
    job: Mapped[str | None] = mapped_column(String(63))
    operation_id: Mapped[str | None] = mapped_column(String(32))
