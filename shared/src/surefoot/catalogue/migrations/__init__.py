"""Alembic revisions of the catalogue. `surefoot.catalogue.migrate` runs them."""
