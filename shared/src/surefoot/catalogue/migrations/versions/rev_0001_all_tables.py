"""All tables of version 0.1.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# Not the types of models.py: a revision stays as it is when those change.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
UTC_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make the tables; those that others refer to come first."""
    _create_jobs()
    _create_runs()
    _create_attempts()
    _create_checkpoints()
    _create_incidents()
    _create_actions()
    _create_operations()
    _create_audit()


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("desired_state", sa.String(length=16), nullable=False),
        sa.Column("from_seed", sa.Boolean(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.Column("updated_at", UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_jobs")),
    )


def _create_runs() -> None:
    op.create_table(
        "runs",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("worker", sa.String(length=128), nullable=True),
        sa.Column("lease_version", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("world_size", sa.Integer(), nullable=True),
        sa.Column("started_at", UTC_TIME, nullable=True),
        sa.Column("finished_at", UTC_TIME, nullable=True),
        sa.Column("updated_at", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_runs_job")),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_runs")),
    )


def _create_attempts() -> None:
    op.create_table(
        "attempts",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("from_attempt", sa.Integer(), nullable=False),
        sa.Column("from_step", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("lr_factor", sa.Double(), nullable=False),
        sa.Column("lr_hold_steps", sa.Integer(), nullable=True),
        sa.Column("lr_rewarm_steps", sa.Integer(), nullable=False),
        sa.Column("lr_from_step", sa.Integer(), nullable=False),
        sa.Column("command", sa.Integer(), nullable=False),
        sa.Column("skip_windows", sa.JSON(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("started_at", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_attempts_job")),
        sa.PrimaryKeyConstraint("job", "attempt", name=op.f("pk_attempts")),
    )


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("stable", sa.Boolean(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("committed_at", UTC_TIME, nullable=False),
        sa.Column("promoted_at", UTC_TIME, nullable=True),
        sa.Column("verified_at", UTC_TIME, nullable=True),
        sa.Column("verify_problem", sa.Text(), nullable=True),
        sa.Column("verify_tries", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_checkpoints_job")),
        sa.PrimaryKeyConstraint("job", "attempt", "step", name=op.f("pk_checkpoints")),
    )


def _create_incidents() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("event_id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("severity", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("onset_step", sa.Integer(), nullable=False),
        sa.Column("detected_step", sa.Integer(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("resumed_attempt", sa.Integer(), nullable=True),
        sa.Column("resumed_step", sa.Integer(), nullable=True),
        sa.Column("recovery_seconds", sa.Double(), nullable=True),
        sa.Column("steps_lost", sa.Integer(), nullable=True),
        sa.Column("announced_state", sa.String(length=16), nullable=True),
        sa.Column("opened_at", UTC_TIME, nullable=False),
        sa.Column("resumed_at", UTC_TIME, nullable=True),
        sa.Column("closed_at", UTC_TIME, nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_incidents_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
        sa.UniqueConstraint("job", "event_id", name=op.f("uq_incidents_job_event_id")),
    )
    op.create_index(op.f("ix_incidents_job"), "incidents", ["job"])


def _create_actions() -> None:
    op.create_table(
        "actions",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("incident_id", ROW_ID, nullable=True),
        sa.Column("operation_id", sa.String(length=32), nullable=True),
        sa.Column("rung", sa.String(length=64), nullable=True),
        sa.Column("command", sa.JSON(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.Column("decided_step", sa.Integer(), nullable=True),
        sa.Column("applied_step", sa.Integer(), nullable=True),
        sa.Column("new_attempt", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.Column("sent_at", UTC_TIME, nullable=True),
        sa.Column("closed_at", UTC_TIME, nullable=True),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], name=op.f("fk_actions_incident_id")),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_actions_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_actions")),
        sa.UniqueConstraint("operation_id", name=op.f("uq_actions_operation_id")),
    )
    op.create_index(op.f("ix_actions_incident_id"), "actions", ["incident_id"])
    op.create_index(op.f("ix_actions_job"), "actions", ["job"])


def _create_operations() -> None:
    op.create_table(
        "operations",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("arguments", sa.JSON(), nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.name"], name=op.f("fk_operations_job")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operations")),
        sa.UniqueConstraint("job", "idempotency_key", name=op.f("uq_operations_job_idempotency_key")),
    )
    op.create_index(op.f("ix_operations_job"), "operations", ["job"])


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", ROW_ID, autoincrement=True, nullable=False),
        sa.Column("at", UTC_TIME, nullable=False),
        sa.Column("actor", sa.String(length=128), nullable=False),
        sa.Column("method", sa.String(length=8), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("job", sa.String(length=63), nullable=True),
        sa.Column("operation_id", sa.String(length=32), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
