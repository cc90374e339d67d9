"""The jobs that were submitted, with their specs read once per change."""

from __future__ import annotations

import threading

import structlog
from sqlalchemy import select

from surefoot.catalogue.database import Database
from surefoot.catalogue.models import Job
from surefoot.checkpoint.store import LocalStore
from surefoot.errors import UsageError
from surefoot.spec import JobSpec, parse_spec

log = structlog.get_logger(__name__)


def store_of(spec: JobSpec) -> LocalStore:
    """Return the storage of a job."""
    return LocalStore(spec.storage / spec.job)


class KnownJobs:
    """Specs by job name, as of the last `refresh`. Any thread.

    Args:
        database: Where the jobs are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._versions: dict[str, object] = {}
        self._specs: dict[str, JobSpec] = {}

    def specs(self) -> dict[str, JobSpec]:
        """Return the specs as last read; also while the database is away."""
        with self._lock:
            return dict(self._specs)

    def refresh(self) -> dict[str, JobSpec]:
        """Read what changed and return all specs.

        Raises:
            CatalogueUnavailable: the database does not answer; what was known stays known.
        """
        with self._database.read() as session:
            versions = {name: (generation, at) for name, generation, at in session.execute(_VERSIONS)}
            changed = [name for name, version in versions.items() if self._versions.get(name) != version]
            rows = session.execute(select(Job.name, Job.spec).where(Job.name.in_(changed)))
            specs = {name: spec for name, spec in rows}  # noqa: C416  dict() of rows has no type
        with self._lock:
            for name in self._versions.keys() - versions.keys():
                self._specs.pop(name, None)
            for name in changed:
                self._take(name, specs.get(name))
            self._versions = dict(versions)
            return dict(self._specs)

    def _take(self, name: str, data: dict[str, object] | None) -> None:
        try:
            self._specs[name] = parse_spec(data or {})
        except UsageError as error:
            # Of another version of Surefoot, say: one job must not stop the others.
            log.error("a job's spec cannot be understood and the job is left alone", job_id=name, error=str(error))
            self._specs.pop(name, None)


_VERSIONS = select(Job.name, Job.generation, Job.updated_at)
