"""What the detector does about each message."""

from __future__ import annotations

from surefoot.bus.base import Delivery
from surefoot.bus.consumer import Handler
from surefoot.events import AttemptStarted, Message, StepCompleted
from surefoot_detector.watch import Watch


def handlers(watch: Watch) -> dict[type[Message], Handler]:
    """Return the handler of each message type that is read."""

    def attempt_started(message: AttemptStarted, delivery: Delivery) -> None:
        watch.start_attempt(message, delivery.source)
        watch.send()

    def step_completed(message: StepCompleted, delivery: Delivery) -> None:
        watch.step(message, delivery.source)
        watch.send()

    return {AttemptStarted: attempt_started, StepCompleted: step_completed}
