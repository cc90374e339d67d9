"""Turns a worker group of torch's agent into running processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from surefoot.processes import JOB_KEY_ENVIRONMENT_KEY
from surefoot.spec import CAUSE_ENVIRONMENT_KEY, FROM_SEED_ENVIRONMENT_KEY, JobSpec
from surefoot_worker.launcher.entry import RankStart
from surefoot_worker.launcher.entrypoint import Entrypoint
from surefoot_worker.launcher.forkserver import ForkServer
from surefoot_worker.launcher.ranks import RankProcesses, StartFailed

log = logging.getLogger("surefoot.launcher")


@dataclass(frozen=True)
class StartMethod:
    """How ranks are started, and for `spawn` why not from the fork server."""

    name: Literal["forkserver", "spawn"]
    reason: str | None = None


class RankStarter:
    """Starts sets of ranks of one job. Launcher's main thread only.

    Args:
        spec: The job, with absolute paths.
        folder: Its staging folder.
        logs: Folder of the ranks' output.
        server: The fork server, ready; None: ranks are spawned.
        method: What to report.
    """

    def __init__(self, spec: JobSpec, folder: Path, logs: Path, server: ForkServer | None, method: StartMethod) -> None:
        self.method = method
        self.job_key = folder.name
        self._spec = spec
        self._folder = folder
        self._logs = logs
        self._server = server
        self._entrypoint = Entrypoint.parse(spec.entrypoint_words)

    def failure_path(self, rank: int) -> Path:
        """Return where a rank reports its exception."""
        return self._folder / f"rank-{rank:05d}.failure"

    def start(
        self, group: WorkerGroup, *, restart: int, cause: str, from_seed: bool, give_up: Callable[[], bool]
    ) -> RankProcesses:
        """Start the ranks of a worker group that a rendezvous has just formed.

        Args:
            group: With its workers, world size and store address.
            restart: 0 for the first start.
            cause: Why, for attempt records and logs.
            from_seed: Tell the ranks to start over.
            give_up: Asked while a fork server starts: is there no need for it any more?

        Raises:
            StartFailed: the fork server died meanwhile or does not start, or no process can be made.
            TimeoutError: a rank that was started nevertheless does not end.
        """
        for worker in group.workers:
            self.failure_path(worker.global_rank).unlink(missing_ok=True)
        self._revive_server(give_up)
        parent_pid = self._server.pid if self._server else os.getpid()
        starts = []
        for worker in group.workers:
            environment = torchrun_environment(group, worker, restart) | self._environment(group, cause)
            if from_seed:
                environment[FROM_SEED_ENVIRONMENT_KEY] = "1"
            starts.append(self._rank_start(worker.global_rank, environment, cause, parent_pid))
        ranks = RankProcesses(self.method.name)
        ranks.start(starts)
        if self._server is not None and not self._server.is_running():
            ranks.kill()  # the later ones may have another parent than they shall die with
            raise StartFailed("the fork server ended while ranks were started")
        return ranks

    def helper_pids(self) -> set[int]:
        """Return the launcher's own helpers, which outlive the ranks: fork server and resource tracker."""
        tracker: Any = getattr(resource_tracker, "_resource_tracker")  # noqa: B009  the one instance; its pid is read
        return ({self._server.pid} if self._server else set()) | ({tracker._pid} if tracker._pid else set())

    def _rank_start(self, rank: int, environment: dict[str, str], cause: str, parent_pid: int) -> RankStart:
        return RankStart(
            rank=rank,
            environment=environment,
            entrypoint=self._entrypoint,
            module_path=self._entrypoint.module_path(self._spec.env.get("PYTHONPATH", "")),
            log_folder=self._logs,
            failure_path=self.failure_path(rank),
            num_threads=threads_per_rank(self._spec),
            parent_pid=parent_pid,
            cause=cause,
            own_session=self._server is None,
            launcher_pid=os.getpid(),
        )

    def _environment(self, group: WorkerGroup, cause: str) -> dict[str, str]:
        defaults = {"OMP_NUM_THREADS": str(threads_per_rank(self._spec))}
        if group.workers[0].world_size == len(group.workers):  # one node
            # Or gloo resolves the host's name to find an interface, which fails or takes seconds where there is no DNS.
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        unset = {name: value for name, value in defaults.items() if name not in os.environ}
        own = {JOB_KEY_ENVIRONMENT_KEY: self._folder.name, CAUSE_ENVIRONMENT_KEY: cause}
        return unset | self._spec.env | self._spec.to_environment() | own

    def _revive_server(self, give_up: Callable[[], bool]) -> None:
        if self._server is None or self._server.is_running():
            return
        log.warning("the fork server is gone; starting another one")
        self._server.stop()
        try:
            self._server.start()
            problem = self._server.wait_ready(give_up)
        except OSError as error:
            problem = str(error)
        if problem is not None:
            self._server.stop()
            raise StartFailed(f"the fork server died and another one does not start: {problem}")


def threads_per_rank(spec: JobSpec) -> int:
    """Return the CPU threads of each rank: as the spec says, else this process's cores shared out, at least 1."""
    return spec.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // spec.nproc_per_node)


def torchrun_environment(group: WorkerGroup, worker: Worker, restart: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank (docs of torch.distributed.run, "Environment Variables")."""
    spec = group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
