"""How a rank of the recipe gets its settings, and says what its data preparation does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from surefoot.errors import UsageError
from surefoot.events import DataPrepared, JsonlSink
from surefoot.spec import SPEC_ENVIRONMENT_KEY, JobSpec, parse_spec


def load_settings(environment: Mapping[str, str]) -> JobSpec:
    """Return the spec that the launcher, or the user of plain torchrun, put into the environment.

    Raises:
        UsageError: there is none, or it is wrong.
    """
    text = environment.get(SPEC_ENVIRONMENT_KEY)
    if text is None:
        raise UsageError(SPEC_ENVIRONMENT_KEY, "must hold the spec as JSON; `surefoot run SPEC` sets it")
    return parse_spec(json.loads(text))


def report_preparation(spec: JobSpec) -> Callable[[str, str, float], None]:
    """Return a function that reports a finished stage of data preparation as an event."""

    def report(stage: str, detail: str, seconds: float) -> None:
        sink = JsonlSink(spec.events_path)
        sink.emit(DataPrepared(job=spec.job, stage=stage, detail=detail, seconds=seconds))
        sink.close()

    return report
