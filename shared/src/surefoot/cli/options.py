"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

PathOrJob = Annotated[
    str,
    typer.Argument(metavar="PATH|JOB", help="A checkpoint folder, a job folder, a storage root, or a job's name."),
]
StepOption = Annotated[int | None, typer.Option("--step", min=0, help="The checkpoint of this step.")]
AttemptOption = Annotated[
    int | None, typer.Option("--attempt", min=1, help="Its attempt, where several have that step.")
]
