"""What ranks reported as damaged is looked into, and what really is goes to quarantine/."""

from __future__ import annotations

import logging

from surefoot.checkpoint.catalog import verify
from surefoot.checkpoint.ids import CheckpointId, folder_name
from surefoot.checkpoint.manifest import MANIFEST_FILE
from surefoot.checkpoint.outbox import Outbox
from surefoot.checkpoint.staging_folder import DamageReport, StagingFolder
from surefoot.checkpoint.store import Store
from surefoot.errors import CheckpointError, DamagedCheckpoint
from surefoot.events import CheckpointQuarantined
from surefoot.faultpoints import reach

QUARANTINE_FOLDER = "quarantine"

_log = logging.getLogger("surefoot.drain")


class DamageReports:
    """The reports in a job's staging folder. The drain's one thread.

    Args:
        staging: Has the reports.
        store: The job's storage.
        outbox: Takes the events.
        job: Name of the job.
    """

    def __init__(self, staging: StagingFolder, store: Store, outbox: Outbox, job: str) -> None:
        self._staging = staging
        self._store = store
        self._outbox = outbox
        self._job = job

    def handle(self) -> list[CheckpointId]:
        """Look into every report. Return what was moved to quarantine.

        A report that cannot be looked into now stays; its error is raised once the others are dealt with.

        Raises:
            OSError: storage fails.
        """
        quarantined = []
        errors: list[OSError] = []
        for report in self._staging.reports():
            try:
                if self._look_into(report):
                    quarantined.append(report.checkpoint)
            except OSError as error:
                errors.append(error)
            else:
                report.path.unlink(missing_ok=True)
        if errors:
            raise errors[0]
        return quarantined

    def _look_into(self, report: DamageReport) -> bool:
        name = folder_name(report.checkpoint)
        if MANIFEST_FILE not in self._store.list(name):
            # A drain may have died between the move and the event; otherwise there is nothing to do.
            if name in self._store.list(QUARANTINE_FOLDER):
                self._emit(report, report.file, report.reason, f"{QUARANTINE_FOLDER}/{name}")
            return False
        try:
            verify(self._store, report.checkpoint)
        except DamagedCheckpoint as error:
            self._quarantine(report, error)
            return True
        except CheckpointError as error:  # of a newer format, say: nothing that a later try could judge
            _log.warning("%s was reported as damaged (%s) and stays: %s", name, report.reason, error)
            return False
        _log.warning("%s was reported as damaged (%s), but it is as it was written", name, report.reason)
        return False

    def _quarantine(self, report: DamageReport, error: DamagedCheckpoint) -> None:
        name = folder_name(report.checkpoint)
        target = f"{QUARANTINE_FOLDER}/{_free_name(name, self._store.list(QUARANTINE_FOLDER))}"
        self._store.move(name, target)
        reach("drain.quarantined")
        _log.error("%s is damaged and was moved to %s: %s", name, target, error)
        file = error.path.removeprefix(f"{self._store}/{name}/")
        self._emit(report, file, error.reason, target)

    def _emit(self, report: DamageReport, file: str, reason: str, moved_to: str) -> None:
        self._outbox.emit(
            CheckpointQuarantined(
                job=self._job,
                attempt=report.checkpoint.attempt,
                step=report.checkpoint.step,
                file=file,
                reason=reason,
                moved_to=moved_to,
            )
        )


def _free_name(name: str, taken: list[str]) -> str:
    candidates = (name if n == 1 else f"{name}-{n}" for n in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)
