"""The one home of the message schema: facts (past tense), commands (imperative) and requests, each in its module."""

from surefoot.events.anomaly import AnomalyCleared, AnomalyDetected, AnomalyKind, Severity, StepsCleared
from surefoot.events.base import Command, Event, Message, Request
from surefoot.events.checkpoint import (
    CheckpointCommitted,
    CheckpointPromoted,
    CheckpointQuarantined,
    CheckpointStaged,
    CheckpointVerified,
    RestoreFellBack,
    SnapshotSkipped,
)
from surefoot.events.commands import (
    RollBack,
    RollBackRequested,
    SaveCheckpoint,
    SaveRequested,
    SetLearningRate,
    SetLearningRateRequested,
    StopTraining,
)
from surefoot.events.logs import LogLine
from surefoot.events.recovery import CommandApplied, CommandRefused, IncidentChanged, IncidentState
from surefoot.events.registry import EVENT_TYPES, MESSAGE_TYPES, decode_message, encode_message
from surefoot.events.sink import EventSink, JsonlSink, MemorySink, read_events
from surefoot.events.training import (
    AttemptStarted,
    DataPrepared,
    JobFinished,
    JobState,
    JobStateChanged,
    RankFailed,
    RankHung,
    RanksRestarted,
    StepCompleted,
    TimelineMark,
)

__all__ = [
    "EVENT_TYPES",
    "MESSAGE_TYPES",
    "AnomalyCleared",
    "AnomalyDetected",
    "AnomalyKind",
    "AttemptStarted",
    "CheckpointCommitted",
    "CheckpointPromoted",
    "CheckpointQuarantined",
    "CheckpointStaged",
    "CheckpointVerified",
    "Command",
    "CommandApplied",
    "CommandRefused",
    "DataPrepared",
    "Event",
    "EventSink",
    "IncidentChanged",
    "IncidentState",
    "JobFinished",
    "JobState",
    "JobStateChanged",
    "JsonlSink",
    "LogLine",
    "MemorySink",
    "Message",
    "RankFailed",
    "RankHung",
    "RanksRestarted",
    "Request",
    "RestoreFellBack",
    "RollBack",
    "RollBackRequested",
    "SaveCheckpoint",
    "SaveRequested",
    "SetLearningRate",
    "SetLearningRateRequested",
    "Severity",
    "SnapshotSkipped",
    "StepCompleted",
    "StepsCleared",
    "StopTraining",
    "TimelineMark",
    "decode_message",
    "encode_message",
    "read_events",
]
