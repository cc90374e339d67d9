"""A recovery service in this process, and a job that talks to it as ranks, launcher and detector would."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

from sqlalchemy import select

from helpers.rows import checkpoint_row, job_row
from surefoot.bus.base import Bus, Outgoing
from surefoot.bus.consumer import Consumer
from surefoot.bus.publisher import Publisher
from surefoot.bus.streams import EVENTS, REQUESTS, commands_stream
from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Action, Incident, Run
from surefoot.events import (
    AnomalyCleared,
    AnomalyDetected,
    AnomalyKind,
    AttemptStarted,
    Command,
    CommandApplied,
    CommandRefused,
    IncidentChanged,
    JobFinished,
    JobState,
    Message,
    RankFailed,
    RollBack,
    Severity,
    StepCompleted,
    StepsCleared,
)
from surefoot_recovery.desk import Desk
from surefoot_recovery.handlers import event_handlers, request_handlers
from surefoot_recovery.history import learn_lineage
from surefoot_recovery.jobs import Jobs
from surefoot_recovery.main import jobs_with_open_ends
from surefoot_recovery.outbox import Outbox

POLICY: dict[str, Any] = {
    "probation_steps": 20,
    "rollback_margin_steps": 10,
    "skip_margin_steps": 5,
    "answer_within_steps": 10,
    "answer_within_seconds": 30,
    "lr": {"cut": 0.5, "floor": 0.1, "hold_steps": 20, "rewarm_steps": 20},
    "ladder": [
        {"name": "leave-out", "kinds": ["nonfinite"], "action": "none", "wait_steps": 3},
        {"name": "rollback", "action": "rollback", "max_per_window": 2, "wait_steps": 30},
        {"name": "older", "action": "older_checkpoint", "wait_steps": 30},
        {"name": "stop", "action": "stop"},
    ],
}


def prepare(database: Database, stable: Sequence[tuple[int, int]] = ((1, 100), (1, 150)), **policy: Any) -> None:
    """Put a running job `demo` with STABLE checkpoints into the catalogue."""
    spec = {"job": "demo", "entrypoint": "train.py", "policy": POLICY | policy}
    now = datetime.now(UTC)
    with database.write() as session:
        session.add(job_row(spec=spec))
        session.flush()
        session.add(Run(job="demo", generation=1, state="RUNNING", updated_at=now))
        session.add_all(checkpoint_row(attempt, step, stable=True) for attempt, step in stable)


class FakeJob:
    """Says what the processes of a job and the detector would say."""

    def __init__(self, bus: Bus, name: str = "demo") -> None:
        self.attempt = 1
        self.step = 0
        self._name, self._bus = name, bus
        self._source, self._sequence = f"job:{name}:{uuid4().hex}", 0

    def say(self, *messages: Message) -> None:
        items = [Outgoing(m, self._source, self._sequence + i) for i, m in enumerate(messages, 1)]
        self._sequence += len(items)
        self._bus.publish(EVENTS, items)

    def start(self, attempt: int = 1, from_attempt: int = 0, from_step: int = 0, **fields: Any) -> None:
        self.attempt, self.step = attempt, from_step
        source = "COMMITTED" if from_attempt else "SEED"
        given = {"world_size": 2, "from_attempt": from_attempt, "from_step": from_step, "source": source}
        self.say(AttemptStarted(job=self._name, attempt=attempt, **({"cause": "start"} | given | fields)))

    def train(self, through_step: int) -> None:
        """Complete steps up to this one."""
        steps = range(self.step + 1, through_step + 1)
        self.say(*(self._completed(step) for step in steps))
        self.step = through_step

    def _completed(self, step: int) -> StepCompleted:
        numbers = {"updates": step, "epoch": 0, "loss": 3.0, "learning_rate": 1e-3, "num_samples": 16}
        return StepCompleted(
            job=self._name, attempt=self.attempt, step=step, position=step, applied=True, step_seconds=(0.1,), **numbers
        )

    def alarm(
        self,
        onset_step: int,
        kind: AnomalyKind = AnomalyKind.SPIKE,
        severity: Severity = Severity.CRITICAL,
        **fields: Any,
    ) -> AnomalyDetected:
        given = {"attempt": self.attempt, "step": self.step, "position": self.step, "onset_position": onset_step}
        given |= {"event_id": f"{fields.get('attempt', self.attempt)}-{kind}-{severity}-{onset_step}"}
        event = AnomalyDetected(
            job=self._name, kind=kind, severity=severity, onset_step=onset_step, rule="test", loss=float("nan"),
            message=f"the loss rose at step {onset_step}", **(given | fields),
        )  # fmt: skip
        self.say(event)
        return event

    def all_clear(self, alarm: AnomalyDetected) -> None:
        assert alarm.attempt is not None
        self.say(
            AnomalyCleared(
                job=self._name, attempt=self.attempt, kind=alarm.kind, onset_attempt=alarm.attempt,
                onset_step=alarm.onset_step, step=self.step, message="back in band",
            )
        )  # fmt: skip

    def cleared_through(self, step: int) -> None:
        self.say(StepsCleared(job=self._name, attempt=self.attempt, through_step=step))

    def apply(self, command: Command) -> None:
        """Do what a command says, as the ranks do: the new attempt first, then the answer."""
        old, step = self.attempt, self.step
        new_attempt = None
        if hasattr(command, "lr_factor"):
            new_attempt = old + 1
            to = (command.to_attempt, command.to_step) if isinstance(command, RollBack) else (old, step)
            self.start(new_attempt, *to, lr_factor=command.lr_factor, cause=f"command {command.number}")
        self.say(
            CommandApplied(
                job=self._name, attempt=old, number=command.number, command=command.type, step=step,
                new_attempt=new_attempt, seconds=0.2,
            )
        )  # fmt: skip

    def refuse(self, command: Command, reason: str = "it is damaged") -> None:
        fields = {"number": command.number, "command": command.type, "step": self.step, "reason": reason}
        self.say(CommandRefused(job=self._name, attempt=self.attempt, **fields))

    def lose_rank(self, rank: int = 1, **fields: Any) -> None:
        given = {"rank": rank, "pid": 4711, "exit_code": -9, "step": self.step, "detected_seconds": time.monotonic()}
        self.say(RankFailed(job=self._name, **({"attempt": self.attempt} | given | fields)))

    def finish(self, state: JobState, reason: str = "it is over") -> None:
        self.say(JobFinished(job=self._name, attempt=self.attempt, state=state, reason=reason, restarts=0))


class Clock:
    """The time of day when it was made, and what a test adds to it: how long a test takes changes nothing."""

    def __init__(self) -> None:
        self.ahead = timedelta()
        self._began = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self._began + self.ahead


class Service:
    """The recovery service without its process; a new one is a restart."""

    def __init__(self, bus: Bus, database: Database, clock: Clock | None = None) -> None:
        self._bus, self._database = bus, database
        clock = clock or Clock()
        jobs: Jobs = jobs_with_open_ends(database)
        self.outbox = Outbox(database, Publisher(bus, "recovery"), clock)
        self.detector_position = "9999999999999-0"
        learn = partial(learn_lineage, jobs=jobs, bus=bus, database=database)
        desk = Desk(database, self.outbox, jobs, clock, lambda: self.detector_position, learn)
        self._events = Consumer(bus.group(EVENTS, "recovery", "recovery"), event_handlers(desk))
        self._requests = Consumer(bus.group(REQUESTS, "recovery", "recovery"), request_handlers(desk))

    def settle(self) -> None:
        """Handle everything that is there."""
        self.outbox.flush()
        while self._bus.lag(EVENTS, "recovery") or self._bus.lag(REQUESTS, "recovery"):
            self._events.turn(0.0)
            self._requests.turn(0.0)
        assert not self._events.num_buried
        assert not self._requests.num_buried

    def ask(self, request: Message) -> Action:
        """Pass a request on; return what became of it."""
        Publisher(self._bus, "api").publish(request, REQUESTS)
        self.settle()
        return self.actions()[-1]

    def commands(self) -> list[Command]:
        return [d.message for d in self._bus.read(commands_stream("demo"), "0", 1000, 0.0)]

    def incidents(self) -> list[Incident]:
        with self._database.read() as session:
            return list(session.scalars(select(Incident).order_by(Incident.id)))

    def actions(self) -> list[Action]:
        with self._database.read() as session:
            return list(session.scalars(select(Action).order_by(Action.id)))

    def told(self) -> list[tuple[int, str]]:
        """Return the incident changes on the bus as (incident, state)."""
        events = (delivery.message for delivery in self._bus.read(EVENTS, "0", 10_000, 0.0))
        return [(e.incident_id, str(e.state)) for e in events if isinstance(e, IncidentChanged)]
