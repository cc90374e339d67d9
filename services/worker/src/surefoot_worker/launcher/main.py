"""`launch`: builds and connects everything a launcher consists of, runs it, and takes it down."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot import preflight, timeline
from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from surefoot.events import JobState, JsonlSink
from surefoot.processes import kill_job_processes
from surefoot.spec import JobSpec
from surefoot_worker.launcher.ending import Ending, JobEnded, Patience, let_go
from surefoot_worker.launcher.entrypoint import Entrypoint
from surefoot_worker.launcher.forkserver import ForkServer
from surefoot_worker.launcher.policy import progress_ignored
from surefoot_worker.launcher.records import has_progress, restart_history, until_claimed
from surefoot_worker.launcher.signals import SignalInbox
from surefoot_worker.launcher.surroundings import environment, log_file, owned_job

if TYPE_CHECKING:
    from surefoot_worker.launcher.agent import Agent
    from surefoot_worker.launcher.reporting import Reports
    from surefoot_worker.launcher.starter import StartMethod

STARTED_BY_USER = "started by the user"

log = logging.getLogger("surefoot.launcher")


def launch(
    spec: JobSpec, *, from_seed: bool = False, cause: str = STARTED_BY_USER, inbox: SignalInbox | None = None
) -> int:
    """Run a job on this node until it ends. Only from a process's main thread, one job at a time.

    Prints nothing: what happens goes to the event file, to `logs/` and to the logger `surefoot.launcher`.

    Args:
        spec: The job.
        from_seed: Start over although the job has progress.
        cause: Why it is started, for the attempt record; with RESTART_CAUSE_PREFIX it counts as a restart.
        inbox: Where signals have been collected since before the caller's slow imports; None: from now on.

    Returns:
        0 finished; 1 failed, or the last snapshot did not become durable; 2 bad input that only a rank could see, or
        a script that does not go on from where the job was;
        75 stopped on request with everything saved.

    Raises:
        UsageError: the job cannot be started here, or another launcher runs it; nothing was started or written.
    """
    timeline.reset()
    with ExitStack() as stack:
        inbox = inbox or stack.enter_context(SignalInbox())
        spec = preflight.check(spec).absolute()
        folder = stack.enter_context(owned_job(spec))
        stack.enter_context(log_file(spec.job_run_dir / "logs" / "launcher.log"))
        sink = JsonlSink(spec.events_path)
        stack.callback(sink.close)
        return _run(_Job(spec, folder, inbox, sink, cause), from_seed)


@dataclass(frozen=True)
class _Job:
    """What `launch` has at hand before anything is started."""

    spec: JobSpec
    folder: StagingFolder
    inbox: SignalInbox
    sink: JsonlSink
    cause: str

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.spec.job_run_dir / "logs"


def _run(job: _Job, from_seed: bool) -> int:
    try:
        ending, reports = _train(job, from_seed)
    except BaseException:
        let_go(job.folder, job.spec, Patience(job.inbox, 0))
        raise
    # Only then is it known how the job ended: a snapshot that cannot be saved makes a failure of it.
    if not let_go(job.folder, job.spec, Patience(job.inbox, ending.num_stop_signals)):
        ending = ending.without_last_snapshot(job.folder.path)
    failed = ending.state is JobState.FAILED
    log.log(logging.ERROR if failed else logging.INFO, "job %s: %s", ending.state, ending.reason)
    reports.job_finished(ending.state, ending.reason, ending.num_restarts)
    return ending.exit_code


def _train(job: _Job, from_seed: bool) -> tuple[Ending, Reports]:
    """Run the ranks until they have ended for good; nothing of the job but its drain is left then."""
    with ExitStack() as stack:
        stack.enter_context(environment(job.spec, job.folder.path.name))
        for pid in kill_job_processes(job.folder.path.name):
            log.warning("killed process %d, left over from an earlier run", pid)
        # First of all, so that the fork server and this process import torch at the same time.
        server = _start_server(job, stack)
        # Not at the top: the fork server must be on its way before torch is imported here.
        from surefoot_worker.launcher.reporting import Reports

        reports = Reports(job.spec.job, job.sink)
        return _outcome(job, _make_agent(job, server, reports, from_seed), from_seed), reports


def _make_agent(job: _Job, server: ForkServer | None, reports: Reports, from_seed: bool) -> Agent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from surefoot_worker.launcher.agent import UNLIMITED_RESTARTS, Agent
    from surefoot_worker.launcher.hang import HangWatch
    from surefoot_worker.launcher.pages import Pages
    from surefoot_worker.launcher.rendezvous import SingleNodeRendezvous
    from surefoot_worker.launcher.starter import RankStarter

    spec, folder = job.spec, job.folder.path
    attempts = AttemptLog(LocalStore(spec.storage / spec.job))
    history = restart_history(attempts, spec.restart.window_seconds)
    still_from_seed = until_claimed(attempts, from_seed)
    method = _start_method(job, server)
    log.info("ranks are started by %s%s", method.name, f": {method.reason}" if method.reason else "")
    return Agent(
        WorkerSpec(
            role="default",
            local_world_size=spec.nproc_per_node,
            rdzv_handler=SingleNodeRendezvous(spec.job),
            entrypoint=spec.entrypoint,
            max_restarts=UNLIMITED_RESTARTS,
            monitor_interval=1e-9,
        ),
        starter=RankStarter(spec, folder, job.logs, server if method.name == "forkserver" else None, method),
        pages=Pages(folder),
        inbox=job.inbox,
        reports=reports,
        limits=spec.restart.model_dump(),
        cause=job.cause,
        watch=HangWatch(spec.hang),
        logs=job.logs,
        history=history,
        from_seed=still_from_seed,
    )


def _outcome(job: _Job, agent: Agent, from_seed: bool) -> Ending:
    try:
        agent.run()
        state, reason, exit_code = JobState.SUCCEEDED, "every rank finished", EXIT_OK
        if agent.stopping:
            state, reason, exit_code = JobState.STOPPED, "stopped on request at a step boundary", EXIT_PREEMPTED
        elif not from_seed and (problem := _ignored(job, agent)) is not None:
            state, reason, exit_code = JobState.FAILED, problem, EXIT_USAGE
    except JobEnded as end:
        state, reason, exit_code = end.state, end.reason, end.exit_code
    except OSError as error:  # also TimeoutError: a process cannot be killed
        state, reason, exit_code = JobState.FAILED, f"the launcher cannot go on: {error}", EXIT_FAILED
    return Ending(state, reason, exit_code, agent.num_restarts, agent.num_stop_signals)


def _ignored(job: _Job, agent: Agent) -> str | None:
    store = LocalStore(job.spec.storage / job.spec.job)
    return progress_ignored(agent.last_progress(), had_progress=has_progress(store, job.folder))


def _start_server(job: _Job, stack: ExitStack) -> ForkServer | None:
    if job.spec.start_method == "spawn":
        return None
    words = job.spec.entrypoint_words
    module_path = Entrypoint.parse(words).module_path(job.spec.env.get("PYTHONPATH", ""))
    server = ForkServer(job.folder.path, job.logs / "preload.log", words, module_path)
    server.start()
    stack.callback(server.stop)
    return server


def _start_method(job: _Job, server: ForkServer | None) -> StartMethod:
    from surefoot_worker.launcher.starter import StartMethod

    if server is None:
        return StartMethod("spawn", "start_method: spawn in the spec")
    problem = server.wait_ready(give_up=job.inbox.is_stop_pending)
    timeline.mark("preloaded")
    if problem is None or job.inbox.is_stop_pending():  # in the latter case no rank will be started
        return StartMethod("forkserver")
    server.stop()
    if job.spec.start_method == "forkserver":
        raise UsageError("start_method", f"forkserver does not work here: {problem}; use auto or spawn")
    return StartMethod("spawn", problem)
