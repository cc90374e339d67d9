"""Curves as jobs make them, and a detector that is fed with them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

from surefoot.bus.base import Outgoing
from surefoot.events import AttemptStarted, Message, StepCompleted
from surefoot_detector.detector import Detector
from surefoot_detector.findings import Cleared, Finding, Healed, Place, Raised
from surefoot_detector.rules.signals import Numbers


def falling(num_steps: int, *, seed: int = 1, noise: float = 0.06, norm_noise: float = 0.13) -> list[Numbers]:
    """A small model at its beginning: 8.3 nats to about 4.5 in 300 steps, with the noise of tiny batches."""
    chance = random.Random(seed)
    return [
        Numbers(
            (4.3 + 4.0 * math.exp(-step / 90)) * math.exp(chance.gauss(0, noise)),
            (0.8 + 1.7 * math.exp(-step / 10)) * math.exp(chance.gauss(0, norm_noise)),
            2e-3 * min(1.0, step / 20),
        )
        for step in range(1, num_steps + 1)
    ]


def flat(num_steps: int, *, seed: int = 1, noise: float = 0.01, level: float = 3.0, norm: float = 0.5) -> list[Numbers]:
    """A run that has settled."""
    chance = random.Random(seed)
    return [
        Numbers(level * math.exp(chance.gauss(0, noise)), norm * math.exp(chance.gauss(0, 0.1)), 1e-3)
        for _ in range(num_steps)
    ]


def raised(points: list[Numbers], start: int, stop: int, loss: float = 1.0, norm: float = 1.0) -> list[Numbers]:
    """Multiply loss and gradient norm of the steps `start <= step < stop` (steps count from 1)."""
    return [
        point._replace(loss=point.loss * loss, grad_norm=(point.grad_norm or 0.0) * norm)
        if start <= i < stop
        else point
        for i, point in enumerate(points, 1)
    ]


class Fed:
    """A detector with everything that it has found."""

    def __init__(self) -> None:
        self.detector = Detector()
        self.detector.start_attempt(1, 0)
        self.attempt, self.step = 1, 0
        self.findings: list[Finding] = []

    def feed(self, points: Iterable[Numbers]) -> Fed:
        for numbers in points:
            self.step += 1
            self.findings += self.detector.feed(Place(self.attempt, self.step, self.step + 1000), numbers)
        return self

    def restart(self, from_step: int) -> Fed:
        """A new attempt that starts from a step."""
        self.attempt, self.step = self.attempt + 1, from_step
        self.detector.start_attempt(self.attempt, from_step)
        return self

    def _of(self, kind: type[Finding]) -> Iterator[Finding]:
        return (finding for finding in self.findings if isinstance(finding, kind))

    @property
    def raised(self) -> list[Raised]:
        return list(self._of(Raised))

    @property
    def critical(self) -> list[Raised]:
        return [finding for finding in self.raised if finding.severity == "critical"]

    @property
    def healed(self) -> list[Healed]:
        return list(self._of(Healed))

    @property
    def cleared(self) -> list[Cleared]:
        return list(self._of(Cleared))

    @property
    def through(self) -> int:
        return self.cleared[-1].through_step if self.cleared else 0


class JobEvents:
    """What a job sends, numbered as its event file is."""

    def __init__(self, name: str = "llm", file_id: str = "1") -> None:
        self.name, self.source = name, f"job:{name}:{file_id}"
        self.attempt, self.step, self.sequence = 0, 0, 0

    def started(self, from_step: int = 0) -> list[Outgoing]:
        """A new attempt."""
        self.attempt, self.step = self.attempt + 1, from_step
        event = AttemptStarted(
            job=self.name,
            attempt=self.attempt,
            world_size=2,
            from_attempt=self.attempt - 1,
            from_step=from_step,
            source="SEED" if self.attempt == 1 else "STAGED",
            cause="a test",
        )
        return [self._numbered(event)]

    def steps(self, points: Iterable[Numbers]) -> list[Outgoing]:
        """The next steps."""
        return [self._numbered(self._step(numbers)) for numbers in points]

    def _step(self, numbers: Numbers) -> StepCompleted:
        self.step += 1
        return StepCompleted(
            job=self.name,
            attempt=self.attempt,
            step=self.step,
            position=self.step,
            updates=self.step,
            epoch=0,
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            learning_rate=numbers.learning_rate or 0.0,
            applied=numbers.applied,
            num_samples=8,
            step_seconds=(0.1, 0.1),
        )

    def _numbered(self, message: Message) -> Outgoing:
        self.sequence += 1
        return Outgoing(message, self.source, self.sequence)
