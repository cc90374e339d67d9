"""What Alembic runs for a migration. The connection, in a transaction, comes from `surefoot.catalogue.migrate`."""

from __future__ import annotations

from alembic import context

from surefoot.catalogue.models import Base

# SQLite's DDL is transactional where BEGIN is explicit, as on our connections; batch: its ALTER TABLE can do little.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
