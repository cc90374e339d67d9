"""What retention decides by, and what keeps a checkpoint from being promoted.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns. Whether something is pinned the writer then reads from storage."""
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("checkpoints", sa.Column("loss", sa.Double(), nullable=True))
    op.add_column("checkpoints", sa.Column("nonfinite_tensor", sa.Text(), nullable=True))
