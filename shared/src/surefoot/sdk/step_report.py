"""What rank 0 says about a step that all ranks have finished."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.events import StepCompleted
from surefoot.sdk.collectives import StepRecord
from surefoot.sdk.data.order import MicroBatch
from surefoot.sdk.host import Host
from surefoot.sdk.trained import Counters


def mean_loss(records: Sequence[StepRecord]) -> float:
    """Return the mean loss over the global batch; NaN or Inf when it is so on any rank."""
    return sum(record.loss_sum for record in records) / sum(record.num_samples for record in records)


def report_step(
    host: Host,
    *,
    attempt: int,
    counters: Counters,
    batch: MicroBatch,
    records: Sequence[StepRecord],
    grad_norm: float,
    learning_rate: float,
    tokens_per_sample: int | None,
) -> None:
    """Report the step, with the losses of all ranks put together.

    Args:
        host: Takes the event.
        attempt: Of the step.
        counters: After it.
        batch: One of its micro-batches.
        records: What the ranks exchanged in it, in rank order.
        grad_norm: Before clipping.
        learning_rate: That of the update.
        tokens_per_sample: None: not known.
    """
    num_samples = int(sum(record.num_samples for record in records))
    nonfinite = tuple(rank for rank, record in enumerate(records) if record.nonfinite)
    host.report(
        StepCompleted(
            job=host.settings.spec.job,
            attempt=attempt,
            rank=0,
            step=counters.step,
            position=batch.position,
            updates=counters.updates,
            epoch=int(batch.epochs[0]),
            loss=mean_loss(records),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            applied=not nonfinite,
            nonfinite_ranks=nonfinite,
            num_samples=num_samples,
            num_tokens=None if tokens_per_sample is None else tokens_per_sample * num_samples,
            step_seconds=tuple(record.step_seconds for record in records),
            dropped_events=host.num_dropped_events,
        )
    )
