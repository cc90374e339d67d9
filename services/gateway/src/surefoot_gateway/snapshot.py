"""The board as JSON for the live page. Pure; the caller holds the board's lock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from surefoot.events import StepCompleted
from surefoot_gateway.board import Board
from surefoot_gateway.curve import Curve
from surefoot_gateway.view import JobView


def jobs_json(board: Board, now: float) -> dict[str, Any]:
    """Return one line per job, the one heard of last first.

    Args:
        board: All jobs.
        now: Unix time, for ages that do not depend on the browser's clock.
    """
    return {
        "now": now,
        "caught_up": board.caught_up,
        "bus_problem": board.bus_problem,
        "jobs": [_line(job.view) for job in reversed(board.jobs.values())],
    }


def job_json(view: JobView) -> dict[str, Any]:
    """Return all that the page shows of a job: at most 2,000 points, 500 attempts, 300 checkpoints, 200 incidents."""
    kept = view.kept_through()
    return _line(view) | {
        "reason": view.reason,
        "world_size": view.world_size,
        "cleared_step": view.cleared_step,
        "storage_problem": None if view.storage_problem is None else view.storage_problem._asdict(),
        "saving": None if view.saving is None else view.saving._asdict(),
        "numbers": None if view.last is None else _numbers(view.last, list(view.recent)),
        "curve": _columns(view.curve),
        "attempts": [line._asdict() | {"kept_through": kept[line.attempt]} for line in view.attempts.values()],
        "checkpoints": [line._asdict() for line in view.checkpoints.values()],
        "incidents": [line._asdict() for line in reversed(view.incidents.values())],
        "notes": [line._asdict() for line in reversed(view.notes)],
    }


def _line(view: JobView) -> dict[str, Any]:
    return {
        "job": view.name,
        "state": view.state,
        "step": view.step,
        "total_steps": view.total_steps,
        "attempt": view.attempt,
        "open_incidents": view.num_open_incidents,
        "heard_at": view.heard_at,
    }


def _numbers(last: StepCompleted, recent: list[StepCompleted]) -> dict[str, Any]:
    # A step that began an attempt is not in `recent` alone for long: rates settle within a few steps.
    seconds = sum(max(step.step_seconds, default=0.0) for step in recent)
    units = sum(step.num_samples if step.num_tokens is None else step.num_tokens for step in recent)
    return {
        "at": last.ts.timestamp(),
        "loss": _short(last.loss),
        "grad_norm": _short(last.grad_norm),
        "learning_rate": _short(last.learning_rate),
        "applied": last.applied,
        "epoch": last.epoch,
        "rank_seconds": [_short(value) for value in last.step_seconds[:64]],
        "step_seconds": _short(seconds / len(recent)) if recent else None,
        "unit": "samples" if last.num_tokens is None else "tokens",
        "per_second": _short(units / seconds) if seconds > 0 else None,
    }


def _columns(curve: Curve) -> dict[str, list[float | int | None]]:
    stretches = list(curve)
    return {
        "attempt": [stretch.attempt for stretch in stretches],
        "step": [stretch.step for stretch in stretches],
        "loss_low": _shorts(stretch.loss_low for stretch in stretches),
        "loss_high": _shorts(stretch.loss_high for stretch in stretches),
        "grad_low": _shorts(stretch.grad_low for stretch in stretches),
        "grad_high": _shorts(stretch.grad_high for stretch in stretches),
        "learning_rate": _shorts(stretch.learning_rate for stretch in stretches),
        "per_second": _shorts(s.num_units / s.seconds if s.seconds > 0 else None for s in stretches),
        "nonfinite": [stretch.num_nonfinite for stretch in stretches],
    }


def _shorts(values: Iterable[float | None]) -> list[float | int | None]:
    return [_short(value) for value in values]


def _short(value: float | None) -> float | None:
    """Return five digits: all that a page shows. JSON has no NaN and Inf; they are None."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
