"""Makes a table, then fails."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Fail after the first statement."""
    op.create_table("half", sa.Column("id", sa.Integer))
    op.execute("INSERT INTO no_such_table VALUES (1)")
