"""The worker service: everything it consists of is made and connected here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from surefoot.bus.redis_bus import RedisBus
from surefoot.catalogue.database import Database
from surefoot.checkpoint.locks import LockedFile
from surefoot.errors import UsageError
from surefoot.runtime import Runtime, Turn, run_service
from surefoot.settings import load_settings
from surefoot_worker.service.attempt_watch import AttemptWatch
from surefoot_worker.service.job import Surroundings
from surefoot_worker.service.launcher_process import LAUNCHER_COMMAND
from surefoot_worker.service.pump import Pump
from surefoot_worker.service.supervisor import Supervisor
from surefoot_worker.settings import WorkerSettings

NAME = "worker"


def main(launcher_command: Sequence[str] = LAUNCHER_COMMAND) -> int:
    """Run the service until a signal; returns 1 when snapshots stay in memory because storage did not take them.

    Args:
        launcher_command: What starts a launcher.
    """
    settings = load_settings(WorkerSettings)
    return run_service(NAME, settings, builder(settings, launcher_command))


def builder(settings: WorkerSettings, launcher_command: Sequence[str]) -> Callable[[Runtime], Turn]:
    """Return what makes the parts, once the database answers. Redis may be away: its messages wait."""

    def build(runtime: Runtime) -> Turn:
        stack = runtime.on_exit
        database = Database(settings.database_url)
        stack.callback(database.close)
        database.check_schema()
        stack.callback(_alone(settings).close)
        bus = RedisBus(settings.redis_url)
        stack.callback(bus.close)
        pump = Pump(bus, settings.worker_log_lines_per_second)
        pump.start()
        stack.callback(pump.close)
        attempts = AttemptWatch()
        attempts.start()
        stack.callback(attempts.close)
        supervisor = Supervisor(settings, database, Surroundings(bus, pump, launcher_command), attempts)
        stack.callback(supervisor.close)
        return supervisor.turn

    return build


def _alone(settings: WorkerSettings) -> LockedFile:
    """Be the only worker of this home: a second one would take the first one's jobs for its own.

    Raises:
        UsageError: there is one; names its process.
    """
    path = settings.home / "run" / "worker.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = LockedFile.open(path, create=True)
    owner = lock.try_own()
    if owner is not None:
        raise UsageError("SUREFOOT_HOME", f"{settings.home.absolute()} already has a worker, process {owner}")
    return lock
