"""Who changed what, and who was refused.

What was done is written in the transaction that does it. What was refused is written afterwards and best effort: with
the database away it is only in the log, and somebody who guesses tokens cannot fill the disk.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import anyio.to_thread
import structlog
from starlette.types import Scope

from surefoot.catalogue.database import Database
from surefoot.catalogue.models import AuditEntry
from surefoot.errors import Unavailable

UNAUTHORISED_PER_MINUTE = 60
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_NOT_ADMITTED = frozenset({401, 403, 421})
_JOB_PATH = re.compile(r"/api/v1/jobs/([^/]{1,63})")

log = structlog.get_logger(__name__)


def entry(actor: str, path: str, status: int, job: str, operation_id: str | None) -> AuditEntry:
    """Return the row for a POST that is carried out."""
    return AuditEntry(
        at=datetime.now(UTC), actor=actor, method="POST", path=path, status=status, job=job, operation_id=operation_id
    )


class Audit:
    """Writes down refused requests. Its method: the event loop only.

    Args:
        database: Where to.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._minute = 0
        self._num_not_admitted = 0

    async def answered(self, scope: Scope, status: int) -> None:
        """Take note of an answer that has been sent."""
        if status < 400 or (scope["method"] in _SAFE_METHODS and status not in _NOT_ADMITTED):
            return
        if status in _NOT_ADMITTED and not self._may_write():
            return
        match = _JOB_PATH.match(scope["path"])
        row = AuditEntry(
            at=datetime.now(UTC),
            actor="unknown" if status in _NOT_ADMITTED else scope["state"]["actor"],
            method=scope["method"][:8],
            path=scope["path"][:2000].replace("\0", ""),
            status=status,
            job=None if match is None else match.group(1).replace("\0", ""),
        )
        await anyio.to_thread.run_sync(self._write, row)

    def _may_write(self) -> bool:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._num_not_admitted = minute, 0
        self._num_not_admitted += 1
        return self._num_not_admitted <= UNAUTHORISED_PER_MINUTE

    def _write(self, row: AuditEntry) -> None:
        log.info("refused", actor=row.actor, method=row.method, path=row.path, status=row.status)
        try:
            with self._database.write() as session:
                session.add(row)
        except Unavailable as error:
            log.warning("a refusal is only in this log", error=str(error))
