"""What the attempt records of earlier launchers mean for this one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from surefoot.checkpoint.attempts import AttemptLog
from surefoot.checkpoint.catalog import list_committed
from surefoot.checkpoint.staging_folder import StagingFolder
from surefoot.checkpoint.store import LocalStore
from surefoot_worker.launcher.policy import History


def restart_history(attempts: AttemptLog, window_seconds: float) -> History:
    """Count the restarts that earlier launchers of this job made: a new launcher does not refill the budget."""
    since = datetime.now(UTC) - timedelta(seconds=window_seconds)
    started = (r.started_at for r in attempts.read_all().values() if r.is_restart)
    return History(tuple(sorted(min(moment.timestamp(), time.time()) for moment in started if moment > since)))


def until_claimed(attempts: AttemptLog, from_seed: bool) -> Callable[[], bool]:
    """Return whether ranks are to start over: yes until they have claimed an attempt, so that a restart goes on."""
    before = attempts.newest()
    return lambda: from_seed and attempts.newest() == before


def has_progress(store: LocalStore, folder: StagingFolder) -> bool:
    """Return whether the job has something to go on from; where storage cannot be read nobody knows of anything."""
    try:
        return bool(folder.scan() or list_committed(store))
    except OSError:
        return False
