"""Every metric there is, as data: what it is called, what it counts, from which message, with which labels.

Names are `surefoot_<noun>_<unit>` in base units. Labels are bounded and never a step or an id; all values of a label
are listed here, so that every series of a job begins when the job is first seen, counters at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from surefoot.checkpoint.attempts import Source
from surefoot.events import (
    AnomalyCleared,
    AnomalyDetected,
    AnomalyKind,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointPruned,
    CheckpointQuarantined,
    CheckpointStaged,
    CheckpointVerified,
    CommandApplied,
    CommandRefused,
    IncidentChanged,
    JobFinished,
    JobState,
    JobStateChanged,
    Message,
    RankFailed,
    RankHung,
    RanksRestarted,
    RestoreFellBack,
    SaveIntervalChosen,
    Severity,
    SnapshotSkipped,
    StepCompleted,
    StepsCleared,
    StorageFailed,
    StorageRecovered,
)

OTHER = "other"
"""Stands for a value that this version does not know: labels stay bounded."""
OPEN: tuple[str, ...] = ()
"""For a label whose values are only known at run time; `rank` is the only one."""

STEP_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
RECOVERY_BUCKETS_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
STORAGE_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COPY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

_ANOMALIES = tuple(AnomalyKind)
_INCIDENTS = (*AnomalyKind, "rank_failure", "hang", OTHER)
_ACTIONS = ("rollback", "set_lr", "save", OTHER)
SERVICES = ("job", "worker", "detector", "recovery", "writer", "api", OTHER)


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: As Prometheus sees it.
        kind: Counters begin at 0.
        help: One sentence.
        source: The messages it comes from; none: the gateway's own.
        labels: Label names, each with all its values; `job_id` comes on top when there is a source.
        initial: What a gauge shows before its first message; None: nothing.
        buckets: Upper bounds of a histogram, in seconds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    source: tuple[type[Message], ...] = ()
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    initial: float | None = None
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return all its label names, `job_id` first."""
        return (*(("job_id",) if self.source else ()), *self.labels)

    @property
    def row(self) -> str:
        """Return its row of the table in the README."""
        labels = ", ".join(f"`{name}`" for name in self.label_names) or "none"
        source = ", ".join(cls.type for cls in self.source) or "the gateway itself"
        return f"| `{self.name}` | {self.kind} | {labels} | {source} | {self.help} |"


METRICS: tuple[Metric, ...] = (
    # The job
    Metric("surefoot_job_state", "gauge", "1 for the state that the job is in, 0 for all others.",
           (JobStateChanged, JobFinished, StepCompleted), {"state": tuple(JobState)}, initial=0),
    Metric("surefoot_job_step", "gauge", "Last completed optimizer step; falls with a roll-back.",
           (StepCompleted, AttemptStarted), initial=0),
    Metric("surefoot_job_planned_steps", "gauge", "Steps after which the job is done; 0: not known.",
           (AttemptStarted,), initial=0),
    Metric("surefoot_job_attempt", "gauge", "Number of the current attempt.", (AttemptStarted,), initial=0),
    Metric("surefoot_job_ranks", "gauge", "World size of the current attempt.", (AttemptStarted,), initial=0),
    Metric("surefoot_job_last_step_timestamp_seconds", "gauge", "When the last step was completed, Unix time.",
           (StepCompleted,)),
    # Its steps
    Metric("surefoot_steps_total", "counter", "Completed optimizer steps, those done again after a roll-back included; "
           "skipped: no rank updated because a gradient was not finite.",
           (StepCompleted,), {"outcome": ("applied", "skipped")}),
    Metric("surefoot_samples_total", "counter", "Samples trained on.", (StepCompleted,)),
    Metric("surefoot_tokens_total", "counter", "Tokens trained on; stays 0 when the data has none.", (StepCompleted,)),
    Metric("surefoot_step_seconds", "histogram", "Duration of a step, of the slowest rank.",
           (StepCompleted,), buckets=STEP_BUCKETS_SECONDS),
    Metric("surefoot_rank_step_seconds", "gauge", "Duration of the last step by rank; the first 64 ranks.",
           (StepCompleted,), {"rank": OPEN}),
    Metric("surefoot_training_loss", "gauge", "Mean loss of the last step; may be NaN.", (StepCompleted,)),
    Metric("surefoot_gradient_norm", "gauge", "Norm of the gradient of the last step, before clipping.",
           (StepCompleted,)),
    Metric("surefoot_learning_rate", "gauge", "Learning rate of the last step.", (StepCompleted,)),
    Metric("surefoot_events_dropped_total", "counter", "Events that rank 0 gave up because nobody took them in time.",
           (StepCompleted,)),
    # Its checkpoints
    Metric("surefoot_checkpoints_total", "counter", "Checkpoints by what became of them; damaged: read back and found "
           "wrong; quarantined: moved out of the way; promoted: became STABLE; pruned: removed by retention.",
           (CheckpointCommitted, CheckpointVerified, CheckpointPromoted, CheckpointQuarantined, CheckpointPruned),
           {"outcome": ("committed", "verified", "damaged", "promoted", "quarantined", "pruned")}),
    Metric("surefoot_checkpoint_written_bytes_total", "counter", "Bytes of committed checkpoints.",
           (CheckpointCommitted,)),
    Metric("surefoot_checkpoint_pruned_bytes_total", "counter", "Bytes of checkpoints that retention removed.",
           (CheckpointPruned,)),
    Metric("surefoot_checkpoint_copy_seconds", "histogram", "What a snapshot costs a rank: the copy into memory.",
           (CheckpointStaged,), buckets=COPY_BUCKETS_SECONDS),
    Metric("surefoot_checkpoint_write_seconds", "histogram", "Writing of a checkpoint to storage.",
           (CheckpointCommitted,), buckets=STORAGE_BUCKETS_SECONDS),
    Metric("surefoot_checkpoint_durable_seconds", "histogram", "From the end of a snapshot until it is durable.",
           (CheckpointCommitted,), buckets=STORAGE_BUCKETS_SECONDS),
    Metric("surefoot_checkpoint_committed_step", "gauge", "Step of the checkpoint that was committed last; 0: none.",
           (CheckpointCommitted,), initial=0),
    Metric("surefoot_checkpoint_stable_step", "gauge", "Step of the checkpoint that was promoted last; 0: none.",
           (CheckpointPromoted,), initial=0),
    Metric("surefoot_checkpoint_last_committed_timestamp_seconds", "gauge",
           "When a checkpoint was committed last, Unix time.", (CheckpointCommitted,)),
    Metric("surefoot_snapshots_skipped_total", "counter", "Snapshots not taken because no buffer was free.",
           (SnapshotSkipped,)),
    Metric("surefoot_restore_fallbacks_total", "counter", "Newer states that could not be used at a start.",
           (RestoreFellBack,)),
    Metric("surefoot_save_interval_seconds", "gauge", "Time between saves that `save_every_seconds: auto` chose.",
           (SaveIntervalChosen,)),
    Metric("surefoot_save_cost_seconds", "gauge", "Training time that a save costs, as `auto` measured it.",
           (SaveIntervalChosen,)),
    Metric("surefoot_storage_failures_total", "counter", "Writes that storage refused; each is tried again.",
           (StorageFailed,)),
    Metric("surefoot_storage_failing", "gauge", "1 from a refused write until one succeeds: nothing becomes durable.",
           (StorageFailed, StorageRecovered, CheckpointCommitted), initial=0),
    Metric("surefoot_storage_outage_seconds", "histogram", "From the first refused write until storage took one again.",
           (StorageRecovered,), buckets=STORAGE_BUCKETS_SECONDS),
    # What went wrong
    Metric("surefoot_attempts_total", "counter", "Attempts by where their state came from.",
           (AttemptStarted,), {"kind": tuple(source.lower() for source in Source)}),
    Metric("surefoot_rank_failures_total", "counter", "Ranks that ended before the job was done: killed by a signal, "
           "by an error of their own, or without progress for too long.",
           (RankFailed, RankHung), {"kind": ("signal", "error", "hang")}),
    Metric("surefoot_restarts_total", "counter", "Times that the launcher started all ranks again.", (RanksRestarted,)),
    Metric("surefoot_anomalies_total", "counter", "Anomalies in loss or gradient norm.",
           (AnomalyDetected,), {"kind": _ANOMALIES, "severity": tuple(Severity)}),
    Metric("surefoot_anomalies_cleared_total", "counter", "Anomalies after which the loss came back into its band.",
           (AnomalyCleared,), {"kind": _ANOMALIES}),
    Metric("surefoot_cleared_step", "gauge", "Step up to which nothing is suspected.", (StepsCleared,), initial=0),
    # What was done about it
    Metric("surefoot_incidents_total", "counter", "Incidents opened.", (IncidentChanged,), {"kind": _INCIDENTS}),
    Metric("surefoot_incidents_closed_total", "counter", "Incidents that ended, and how.",
           (IncidentChanged,), {"kind": _INCIDENTS, "outcome": ("healed", "escalated")}),
    Metric("surefoot_incidents_open", "gauge", "Incidents that are neither healed nor escalated.",
           (IncidentChanged,), initial=0),
    Metric("surefoot_recovery_seconds", "histogram", "From the detection to the next completed step of all ranks.",
           (IncidentChanged,), {"kind": _INCIDENTS}, buckets=RECOVERY_BUCKETS_SECONDS),
    Metric("surefoot_steps_lost_total", "counter", "Steps that had to be done again, or were given up, by incidents.",
           (IncidentChanged,)),
    Metric("surefoot_commands_total", "counter", "Commands that the ranks answered.",
           (CommandApplied, CommandRefused), {"action": _ACTIONS, "outcome": ("applied", "refused")}),
    Metric("surefoot_command_seconds", "histogram", "From when the ranks saw a command until it was done.",
           (CommandApplied,), {"action": _ACTIONS}, buckets=RECOVERY_BUCKETS_SECONDS),
    # The gateway itself
    Metric("surefoot_messages_total", "counter", "Messages read, by who sent them; job: ranks, drain and launcher.",
           labels={"service": SERVICES}),
    Metric("surefoot_messages_lost_total", "counter", "Messages missing between two of one sender.",
           labels={"service": SERVICES}),
    Metric("surefoot_messages_ignored_total", "counter", "Messages not counted: seen before, of an unknown type, not "
           "readable, or failed here (see the log).",
           labels={"outcome": ("repeated", "unknown", "invalid", "failed")}),
    Metric("surefoot_gateway_bus_up", "gauge", "1: the Redis-compatible server answers.", initial=0),
    Metric("surefoot_gateway_caught_up", "gauge", "0 until the whole stream was read once after a start; until then "
           "there are no series of jobs, so that no counter is seen half-way.", initial=0),
    Metric("surefoot_gateway_jobs", "gauge", "Jobs that are kept.", initial=0),
)  # fmt: skip
