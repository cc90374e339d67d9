"""The routes: which function answers what. Every one is under /api/v1, but for the two health checks.

`VERBS` says what each verb takes and what recovery is asked for.
"""

from __future__ import annotations

from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from starlette.responses import JSONResponse, StreamingResponse

from surefoot import __version__
from surefoot.bus.streams import EVENTS, logs_stream
from surefoot.events import Request as JobRequest
from surefoot.events import RollBackRequested, SaveRequested, SetLearningRateRequested
from surefoot_api import reading, specs, verbs
from surefoot_api.following import Follower, Subscription, start_after
from surefoot_api.operations import STOP, SUBMIT
from surefoot_api.pages import Paging
from surefoot_api.parts import Actor, UsesParts
from surefoot_api.problems import problem
from surefoot_api.schemas import (
    AttemptPage,
    CheckpointPage,
    IncidentDetail,
    IncidentPage,
    JobDetail,
    JobPage,
    NoArguments,
    OperationPage,
    OperationView,
    RollBackArguments,
    SetLearningRateArguments,
    Submission,
)

API = "/api/v1"


VERBS: dict[str, type[JobRequest] | None] = {
    STOP: None,
    "checkpoint": SaveRequested,
    "rollback": RollBackRequested,
    "set-lr": SetLearningRateRequested,
}
"""None: recovery is not asked; it is desired state, which the worker reads off the job's row."""

JobName = Annotated[str, Path(max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]*$")]
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255, pattern=r"^[!-~ ]+$")]
After = Annotated[str, Query(description="Stream id to go on after; 0: from the beginning; $: only what comes.")]
Follow = Annotated[bool, Query(description="false: end with what is there.")]
LastEventId = Annotated[str | None, Header()]



class Caller:
    """Whoever sends a POST, before what is asked for is known. A dependency of the routes that change something."""

    def __init__(
        self, *, parts: UsesParts, actor: Actor, request: Request, response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> None:  # fmt: skip
        self._parts, self._actor, self._key = parts, actor, idempotency_key
        self._path, self._response = request.url.path, response

    def submit(self, body: Submission) -> JobDetail:
        """Submit a job."""
        spec = specs.parse(body.spec, self._parts.settings.home.absolute())
        call = self._call(spec.job, SUBMIT, {"spec": specs.to_row(spec), "from_seed": body.from_seed})
        verbs.submit(self._parts, call, spec, from_seed=body.from_seed)
        self._response.headers["Location"] = f"{API}/jobs/{spec.job}"
        with self._parts.database.read() as session:
            return reading.job_detail(session, spec.job)

    def ask(self, job: str, kind: str, arguments: dict[str, Any]) -> OperationView:
        """Carry out a verb, and say where to look how it fares."""
        view = verbs.carry_out(self._parts, self._call(job, kind, arguments), VERBS[kind])
        self._response.headers["Location"] = f"{API}/operations/{view.id}"
        return view

    def with_attempt(self, job: str, arguments: RollBackArguments) -> RollBackArguments:
        """Return the arguments with the attempt of the step that is named."""
        if arguments.to_step is None or arguments.to_attempt is not None:
            return arguments
        with self._parts.database.read() as session:
            target = reading.checkpoint_of_step(session, job, arguments.to_step)
        return arguments.model_copy(update={"to_attempt": target.attempt})

    def _call(self, job: str, kind: str, arguments: dict[str, Any]) -> verbs.Call:
        return verbs.Call(job, kind, arguments, self._actor, self._path, self._key)


class Following:
    """A GET that follows a stream. A dependency of the routes that do."""

    def __init__(
        self, *, parts: UsesParts, request: Request, after: After = "0", follow: Follow = True,
        last_event_id: LastEventId = None,
    ) -> None:  # fmt: skip
        self._parts, self._follow = parts, follow
        self._after = start_after(after, last_event_id)
        self._follower: Follower = request.app.state.follower

    async def serve(self, job: str, stream: str) -> StreamingResponse:
        """Return what is on the stream of a job that exists."""
        await anyio.to_thread.run_sync(self._require_job, job)
        return await self._follower.serve(Subscription(stream, self._after, job, self._follow))

    def _require_job(self, job: str) -> None:
        with self._parts.database.read() as session:
            reading.require_job(session, job)


UsesFollowing = Annotated[Following, Depends()]
UsesCaller = Annotated[Caller, Depends()]

router = APIRouter(prefix=API)
health = APIRouter()


@router.post("/jobs", status_code=201)
def submit(caller: UsesCaller, body: Submission) -> JobDetail:
    """Submit a job; one that has ended goes on from what it saved."""
    return caller.submit(body)


@router.get("/jobs")
def list_jobs(parts: UsesParts, paging: Paging) -> JobPage:
    """List jobs, by when they were first submitted, newest first."""
    with parts.database.read() as session:
        return reading.jobs(session, paging)


@router.get("/jobs/{job}")
def get_job(parts: UsesParts, job: JobName) -> JobDetail:
    """Show one job with its spec."""
    with parts.database.read() as session:
        return reading.job_detail(session, job)


@router.get("/jobs/{job}/attempts")
def list_attempts(parts: UsesParts, job: JobName, paging: Paging) -> AttemptPage:
    """List a job's attempts, newest first."""
    with parts.database.read() as session:
        return reading.attempts(session, job, paging)


@router.get("/jobs/{job}/checkpoints")
def list_checkpoints(parts: UsesParts, job: JobName, paging: Paging) -> CheckpointPage:
    """List a job's checkpoints, newest first."""
    with parts.database.read() as session:
        return reading.checkpoints(session, job, paging)


@router.get("/jobs/{job}/incidents")
def list_incidents(parts: UsesParts, job: JobName, paging: Paging) -> IncidentPage:
    """List a job's incidents, newest first."""
    with parts.database.read() as session:
        return reading.incidents(session, job, paging)


@router.get("/incidents/{incident_id}")
def get_incident(parts: UsesParts, incident_id: Annotated[int, Path(ge=1, lt=2**63)]) -> IncidentDetail:
    """Show one incident with what was done about it."""
    with parts.database.read() as session:
        return reading.incident(session, incident_id)


@router.get("/jobs/{job}/operations")
def list_operations(parts: UsesParts, job: JobName, paging: Paging) -> OperationPage:
    """List what was asked of a job, newest first."""
    with parts.database.read() as session:
        return reading.operations_of(session, job, paging)


@router.get("/operations/{operation_id}")
def get_operation(
    parts: UsesParts, operation_id: Annotated[str, Path(max_length=32, pattern="^[0-9a-f]+$")]
) -> OperationView:
    """Show how something that was asked for fares."""
    with parts.database.read() as session:
        return reading.operation(session, operation_id)


@router.get("/jobs/{job}/events", response_class=StreamingResponse)
async def follow_events(following: UsesFollowing, job: JobName) -> StreamingResponse:
    """Follow a job's events as Server-Sent Events; `event` is the type, `data` the message."""
    return await following.serve(job, EVENTS)


@router.get("/jobs/{job}/logs", response_class=StreamingResponse)
async def follow_logs(following: UsesFollowing, job: JobName) -> StreamingResponse:
    """Follow what a job's ranks write, as Server-Sent Events of type LogLine."""
    return await following.serve(job, logs_stream(job))


@router.post("/jobs/{job}/stop", status_code=202)
def stop(caller: UsesCaller, job: JobName, body: NoArguments | None = None) -> OperationView:
    """Save, and stop."""
    del body
    return caller.ask(job, STOP, {})


@router.post("/jobs/{job}/checkpoint", status_code=202)
def checkpoint(caller: UsesCaller, job: JobName, body: NoArguments | None = None) -> OperationView:
    """Make the next snapshot durable."""
    del body
    return caller.ask(job, "checkpoint", {})


@router.post("/jobs/{job}/rollback", status_code=202)
def rollback(caller: UsesCaller, job: JobName, body: RollBackArguments | None = None) -> OperationView:
    """Go back to a checkpoint, in process and as a new attempt."""
    return caller.ask(job, "rollback", caller.with_attempt(job, body or RollBackArguments()).model_dump())


@router.post("/jobs/{job}/set-lr", status_code=202)
def set_lr(caller: UsesCaller, job: JobName, body: SetLearningRateArguments) -> OperationView:
    """Go on with another factor on the schedule's learning rate, as a new attempt."""
    return caller.ask(job, "set-lr", body.model_dump())


@health.get("/healthz")
async def healthz() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok", "version": __version__}


@health.get("/readyz")
async def readyz(parts: UsesParts) -> JSONResponse:
    """Say whether what the api needs answers; 503 names what does not."""
    away = sorted(parts.readiness.away())
    if not away:
        return JSONResponse({"status": "ready"})
    return problem(503, "not_ready", f"does not answer: {', '.join(away)}", {"Retry-After": "2"}, away=away)
