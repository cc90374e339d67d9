"""What recovery orders the ranks to do, done by all of them in the same step.

How a command gets there: the worker service writes a file (`surefoot.command_files`); rank 0 sees it before the ranks'
exchange of some step and puts its number into the exchange; all ranks then get its text from rank 0. So every rank
knows of it in the same step, and nobody else talks to anybody.

When it is done: at the end of a step, after update and snapshot. A roll-back at the end of that very step. What needs a
snapshot (another learning rate starts an attempt from the present state; a save is one) at the end of the first step
that has one: that step's own as a rule, a later one when buffers are not free. It waits, training does not.

Fencing: a command is for one attempt. When that is over, by a restart or by another command, it is refused and nothing
happens. Numbers rise; the one that began an attempt is in the attempt's record, so a restart does not do it again. One
that began none may be answered a second time after a restart, with a refusal. A new command for this attempt whose
number is too low, since recovery's database was lost and counts anew, is refused once, with the number to exceed.

What the ranks answer: CommandApplied or CommandRefused, of rank 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from surefoot.checkpoint.attempts import AttemptRecord, Source, StartsFrom
from surefoot.checkpoint.ids import CheckpointId
from surefoot.command_files import CommandFolder, too_low
from surefoot.errors import AttemptTaken, Superseded
from surefoot.events import (
    Command,
    CommandApplied,
    CommandRefused,
    RollBack,
    SaveCheckpoint,
    SetLearningRate,
    decode_message,
    encode_message,
)
from surefoot.faultpoints import reach
from surefoot.progress import Phase
from surefoot.sdk.attempts import Attempts
from surefoot.sdk.host import Host
from surefoot.sdk.restore import Restored, find_candidates, restore
from surefoot.sdk.rollback import HalfLoaded, Refusal, check_target, load_committed, with_new_windows
from surefoot.sdk.snapshot import Snapshots
from surefoot.sdk.state import TrainingState
from surefoot.sdk.trained import Counters


@dataclass(frozen=True)
class StepEnd:
    """What the step that ends left behind; the same on every rank.

    Attributes:
        step: Its number.
        updates: Optimizer updates taken so far.
        has_snapshot: Its state is in staging memory.
        is_saved: And is going to be durable.
        is_last: The loop ends with it.
    """

    step: int
    updates: int
    has_snapshot: bool
    is_saved: bool
    is_last: bool


@dataclass(frozen=True)
class Begun:
    """An attempt that a command began in this process; the model is already in the state that it starts from."""

    record: AttemptRecord
    counters: Counters


@dataclass(frozen=True)
class _Order:
    """A command that all ranks know of."""

    command: Command
    seen_at: float


class Commands:
    """This rank's part in obeying. Main thread of the rank only.

    Args:
        host: Where commands come from and answers go to.
        state: What a roll-back loads into.
        attempts: The records; the newest is that of the running attempt.
        snapshots: Told about each attempt that begins.
        total_steps: For the event of an attempt.
    """

    def __init__(
        self, host: Host, state: TrainingState, attempts: Attempts, snapshots: Snapshots, total_steps: int | None
    ) -> None:
        self._host = host
        self._state = state
        self._attempts = attempts
        self._snapshots = snapshots
        self._total_steps = total_steps
        self._received = self._record.command
        self._waiting: list[_Order] = []
        self._found: Command | None = None
        self._too_low: list[Command] = []
        self._folder: CommandFolder | None = None
        if host.group.rank == 0:
            self._folder = CommandFolder(host.folder.path, host.settings.spec.job)

    @property
    def _record(self) -> AttemptRecord:
        record = self._attempts.newest
        assert record is not None, "commands are obeyed in an attempt"
        return record

    def next_number(self) -> int:
        """Return the number of the next command, for the exchange; 0: none, or not rank 0. One `stat`."""
        if self._folder is None:
            return 0
        self._found = self._folder.next_after(self._received)
        self._too_low += self._folder.too_low(self._received)
        return 0 if self._found is None else self._found.number

    def receive(self, number: int) -> None:
        """Take the command that rank 0 named in the exchange. Collective where there is one."""
        if number <= self._received:
            return
        line = self._host.group.broadcast_json(None if self._found is None else encode_message(self._found))
        command = decode_message(line)
        assert isinstance(command, Command), "rank 0 read it as one"
        self._received = number
        self._waiting.append(_Order(command, time.monotonic()))

    @property
    def wants_snapshot(self) -> bool:
        """Whether a command waits for a snapshot; the same on every rank, and known before the exchange."""
        return bool(self._waiting)

    @property
    def wants_save(self) -> bool:
        """Whether a command waits for a save."""
        return any(isinstance(order.command, SaveCheckpoint) for order in self._waiting)

    def carry_out(self, end: StepEnd) -> Begun | None:
        """Do what can be done at the end of this step. Collective where a command waits, else free.

        Returns:
            The attempt that began, if one did.

        Raises:
            Superseded: somebody else has begun an attempt meanwhile.
        """
        self._refuse_too_low(end.step)
        begun = None
        for order in tuple(self._waiting):
            try:
                self._check(order.command, end)
                if isinstance(order.command, RollBack):
                    begun = self._roll_back(order, order.command, end)
                elif isinstance(order.command, SetLearningRate):
                    if not end.has_snapshot:
                        continue
                    begun = self._set_learning_rate(order, order.command, end)
                else:
                    if not end.is_saved:
                        continue
                    self._report_applied(order, end.step, None)
            except Refusal as refusal:
                self._report_refused(order, end.step, str(refusal))
            self._waiting.remove(order)
        return begun

    def _refuse_too_low(self, step: int) -> None:
        """Answer what numbers alone keep from being done. Rank 0 only: the others have never heard of it."""
        for command in self._too_low:
            if command.attempt == self._record.attempt:
                reason = too_low(command.number, self._received)
                self._report_refused(_Order(command, time.monotonic()), step, reason)
        self._too_low.clear()

    def _check(self, command: Command, end: StepEnd) -> None:
        """Refuse what no rank may do; every rank comes to the same answer by itself."""
        if command.attempt != self._record.attempt:
            raise Refusal(f"it is for attempt {command.attempt}; this is attempt {self._record.attempt}")
        if not isinstance(command, RollBack | SetLearningRate | SaveCheckpoint):
            raise Refusal("the ranks of this version do not know it")
        if end.is_last and not (isinstance(command, SaveCheckpoint) and end.is_saved):
            raise Refusal(f"training ends with step {end.step}")

    def _roll_back(self, order: _Order, command: RollBack, end: StepEnd) -> Begun:
        target = CheckpointId(command.to_attempt, command.to_step)
        check_target(self._attempts, target)
        # Reading a checkpoint is no step: the limit of a start applies to it.
        self._write_page(end.step, Phase.START)
        try:
            loaded = load_committed(self._host, self._state, target)
        except Refusal:
            self._write_page(end.step, Phase.STEP)
            raise
        except HalfLoaded as error:
            return self._recover(order, end, f"step {target.step} of attempt {target.attempt}: {error}")
        cause = f"command {command.number}: roll-back to step {target.step} of attempt {target.attempt}"
        windows = with_new_windows(self._record.skip_windows, command.skip_windows, target.step)
        rate = _rate_control(command, target.step)
        begun = self._begin(f"{cause}: {command.reason}", loaded, command=command.number, skip_windows=windows, **rate)
        self._report_applied(order, end.step, begun.record.attempt)
        return begun

    def _set_learning_rate(self, order: _Order, command: SetLearningRate, end: StepEnd) -> Begun:
        # Answered by all: the snapshot is then complete on every rank, as the record is going to say.
        self._host.group.gather_json(None)
        starts_from = StartsFrom(attempt=self._record.attempt, step=end.step, source=Source.STAGED)
        here = Restored(starts_from, Counters(end.step, end.updates))
        cause = f"command {command.number}: learning rate x {command.lr_factor:g}"
        rate = _rate_control(command, end.step)
        begun = self._begin(f"{cause}: {command.reason}", here, command=command.number, **rate)
        self._report_applied(order, end.step, begun.record.attempt)
        return begun

    def _recover(self, order: _Order, end: StepEnd, problem: str) -> Begun:
        """Load the newest state that is left, since the model is in none that can be trained on."""
        restored = restore(self._host, self._state, find_candidates(self._host, self._attempts.records))
        number = order.command.number
        begun = self._begin(f"command {number} could not be carried out: {problem}", restored, command=number)
        self._report_refused(order, end.step, problem)
        return begun

    def _begin(self, cause: str, loaded: Restored, **changes: Any) -> Begun:
        try:
            record = self._attempts.claim(loaded.starts_from, cause, **changes)
        except AttemptTaken as error:
            raise Superseded(str(error)) from error
        reach("command.claimed")
        self._host.begin_attempt(record)
        self._snapshots.go_on_from(record.starts_from.checkpoint_id)
        self._host.report_start(record, self._total_steps, ())
        return Begun(record, loaded.counters)

    def _write_page(self, step: int, phase: Phase) -> None:
        record = self._record
        self._host.page.write(
            attempt=record.attempt, step=step, start_step=record.starts_from.step, phase=phase
        )

    def _report_applied(self, order: _Order, step: int, new_attempt: int | None) -> None:
        self._host.report(
            CommandApplied(
                job=self._host.settings.spec.job,
                attempt=order.command.attempt,
                rank=0,
                number=order.command.number,
                command=order.command.type,
                step=step,
                new_attempt=new_attempt,
                seconds=time.monotonic() - order.seen_at,
            )
        )
        if new_attempt is not None:
            # Said before anything else can happen: without the answer recovery would order the same again.
            self._host.flush()

    def _report_refused(self, order: _Order, step: int, reason: str) -> None:
        self._host.report(
            CommandRefused(
                job=self._host.settings.spec.job,
                attempt=order.command.attempt,
                rank=0,
                number=order.command.number,
                command=order.command.type,
                step=step,
                reason=reason,
            )
        )


def _rate_control(command: RollBack | SetLearningRate, from_step: int) -> dict[str, Any]:
    return {
        "lr_factor": command.lr_factor,
        "lr_hold_steps": command.lr_hold_steps,
        "lr_rewarm_steps": command.lr_rewarm_steps,
        "lr_from_step": from_step,
    }
