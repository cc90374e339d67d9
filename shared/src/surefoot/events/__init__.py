"""The one home of the event schema. Facts are past tense; nothing here is a command."""

from surefoot.events.base import Event
from surefoot.events.checkpoint import (
    CheckpointCommitted,
    CheckpointQuarantined,
    CheckpointStaged,
    RestoreFellBack,
    SnapshotSkipped,
)
from surefoot.events.registry import EVENT_TYPES, decode_event
from surefoot.events.sink import EventSink, JsonlSink, MemorySink, read_events
from surefoot.events.training import (
    AttemptStarted,
    DataPrepared,
    JobFinished,
    JobState,
    RankFailed,
    RanksRestarted,
    StepCompleted,
    TimelineMark,
)

__all__ = [
    "EVENT_TYPES",
    "AttemptStarted",
    "CheckpointCommitted",
    "CheckpointQuarantined",
    "CheckpointStaged",
    "DataPrepared",
    "Event",
    "EventSink",
    "JobFinished",
    "JobState",
    "JsonlSink",
    "MemorySink",
    "RankFailed",
    "RanksRestarted",
    "RestoreFellBack",
    "SnapshotSkipped",
    "StepCompleted",
    "TimelineMark",
    "decode_event",
    "read_events",
]
