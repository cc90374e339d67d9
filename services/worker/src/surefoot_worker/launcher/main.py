"""`launch`: builds and connects everything a launcher consists of, runs it, and takes it down."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot import preflight, timeline
from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.locks import LockedFile
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, UsageError
from surefoot.events import JobState, JsonlSink
from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY, kill_job_processes
from surefoot.spec import JobSpec
from surefoot_worker.launcher.ending import let_go
from surefoot_worker.launcher.entrypoint import Entrypoint
from surefoot_worker.launcher.forkserver import ForkServer
from surefoot_worker.launcher.policy import RESTART_CAUSE_PREFIX, History
from surefoot_worker.launcher.signals import SignalInbox

if TYPE_CHECKING:
    from surefoot_worker.launcher.agent import Agent, JobEnded
    from surefoot_worker.launcher.starter import StartMethod

log = logging.getLogger("surefoot.launcher")


def launch(spec: JobSpec, *, from_seed: bool = False) -> int:
    """Run a job on this node until it ends. Only from a process's main thread, one job at a time.

    Prints nothing: what happens goes to the event file, to `logs/` and to the logger `surefoot.launcher`.

    Args:
        spec: The job.
        from_seed: Start over although the job has progress.

    Returns:
        0 finished; 1 failed; 2 bad input that only a rank could see; 75 stopped on request with everything saved.

    Raises:
        UsageError: the job cannot be started here, or another launcher runs it; nothing was started or written.
    """
    timeline.reset()
    spec = preflight.check(spec).absolute()
    with ExitStack() as stack:
        folder = StagingFolder.create(spec.checkpoint.staging_dir, spec.job, spec.storage)
        _own_the_job(folder, spec, stack)
        logs = spec.job_run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(_log_file(logs / "launcher.log"))
        stack.enter_context(_environment(spec, folder.path.name))
        inbox = stack.enter_context(SignalInbox())
        for pid in kill_job_processes(folder.path.name):
            log.warning("killed process %d, left over from an earlier run", pid)
        # First of all, so that the fork server and this process import torch at the same time.
        server = _start_server(spec, folder.path, logs, stack)
        return _run(_Job(spec, folder.path, logs, server, inbox), from_seed)


@dataclass(frozen=True)
class _Job:
    """What `launch` has set up so far."""

    spec: JobSpec
    folder: Path
    logs: Path
    server: ForkServer | None
    inbox: SignalInbox


def _run(job: _Job, from_seed: bool) -> int:
    # Not at the top: the fork server must be on its way before torch is imported here.
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from surefoot_worker.launcher.agent import UNLIMITED_RESTARTS, Agent, JobEnded
    from surefoot_worker.launcher.pages import Pages
    from surefoot_worker.launcher.rendezvous import SingleNodeRendezvous
    from surefoot_worker.launcher.reporting import Reports
    from surefoot_worker.launcher.starter import RankStarter

    spec = job.spec
    attempts = AttemptLog(LocalStore(spec.storage / spec.job))
    history = _history(attempts, spec.restart.window_seconds)
    still_from_seed = _until_claimed(attempts, from_seed)
    method = _start_method(job)
    log.info("ranks are started by %s%s", method.name, f": {method.reason}" if method.reason else "")
    sink = JsonlSink(spec.events_path)
    reports = Reports(spec.job, sink)
    agent = Agent(
        WorkerSpec(
            role="default",
            local_world_size=spec.nproc_per_node,
            rdzv_handler=SingleNodeRendezvous(spec.job),
            entrypoint=spec.entrypoint,
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=1e-9,
        ),
        starter=RankStarter(spec, job.folder, job.logs, job.server if method.name == "forkserver" else None, method),
        pages=Pages(job.folder),
        inbox=job.inbox,
        reports=reports,
        limits=spec.restart.model_dump(),
        history=history,
        from_seed=still_from_seed,
    )
    end = _outcome(agent, JobEnded)
    log.log(logging.ERROR if end.state is JobState.FAILED else logging.INFO, "job %s: %s", end.state, end.reason)
    reports.job_finished(end.state, end.reason, agent.num_restarts)
    sink.close()
    return end.exit_code


def _outcome(agent: Agent, ended: type[JobEnded]) -> JobEnded:
    try:
        agent.run()
    except ended as end:
        return end
    except OSError as error:  # also TimeoutError: no process can be made, or one cannot be killed
        return ended(JobState.FAILED, f"the launcher cannot go on: {error}", EXIT_FAILED)
    if agent.stopping:
        return ended(JobState.STOPPED, "stopped on request at a step boundary", EXIT_PREEMPTED)
    return ended(JobState.SUCCEEDED, "every rank finished", EXIT_OK)


def _own_the_job(folder: StagingFolder, spec: JobSpec, stack: ExitStack) -> None:
    """Keep the folder alive, and keep other launchers out. Both locks end with this process at the latest."""
    folder.hold_session()
    stack.callback(let_go, folder, spec)
    lock = LockedFile.open(folder.path / "launcher.lock", create=True)
    stack.callback(lock.close)
    if not lock.try_exclusive():
        holder = os.pread(lock.fd, 32, 0).decode("ascii", "replace").strip()
        raise UsageError("job", f"is already being run by process {holder or 'unknown'} (holds {lock.path})")
    os.ftruncate(lock.fd, 0)
    os.pwrite(lock.fd, f"{os.getpid()}\n".encode(), 0)


def _start_server(spec: JobSpec, folder: Path, logs: Path, stack: ExitStack) -> ForkServer | None:
    if spec.start_method == "spawn":
        return None
    words = spec.entrypoint_words
    module_path = Entrypoint.parse(words).module_path(spec.env.get("PYTHONPATH", ""))
    server = ForkServer(folder, logs / "preload.log", words, module_path)
    server.start()
    stack.callback(server.stop)
    return server


def _start_method(job: _Job) -> StartMethod:
    from surefoot_worker.launcher.starter import StartMethod

    if job.server is None:
        return StartMethod("spawn", "start_method: spawn in the spec")
    problem = job.server.wait_ready(give_up=job.inbox.pending)
    timeline.mark("preloaded")
    if problem is None or job.inbox.pending():  # in the latter case no rank will be started
        return StartMethod("forkserver")
    job.server.stop()
    if job.spec.start_method == "forkserver":
        raise UsageError("start_method", f"forkserver does not work here: {problem}; use auto or spawn")
    return StartMethod("spawn", problem)


def _history(attempts: AttemptLog, window_seconds: float) -> History:
    """Count the restarts that earlier launchers of this job made: a new launcher does not refill the budget."""
    since = datetime.now(UTC) - timedelta(seconds=window_seconds)
    started = (r.started_at for r in attempts.read_all().values() if r.cause.startswith(RESTART_CAUSE_PREFIX))
    return History(tuple(sorted(min(moment.timestamp(), time.time()) for moment in started if moment > since)))


def _until_claimed(attempts: AttemptLog, from_seed: bool) -> Callable[[], bool]:
    """Return whether ranks are to start over: yes until they have claimed an attempt, so that a restart goes on."""
    before = attempts.newest()
    return lambda: from_seed and attempts.newest() == before


@contextmanager
def _environment(spec: JobSpec, job_key: str) -> Iterator[None]:
    """Set what the fork server and spawned ranks must be executed with, as long as the job runs."""
    ours = {
        JOB_KEY_ENVIRONMENT_KEY: job_key,
        # Torch then computes the ranks instead of exchanging them through the store.
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    before = dict(os.environ)
    os.environ.update(spec.env | spec.to_environment() | ours)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
