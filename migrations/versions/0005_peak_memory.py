"""Peak memory of executions.

Revision: 0005, after 0004. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COLUMNS = ("peak_bytes", "process_bytes")


def upgrade() -> None:
    """Add the columns; the memory of executions before them is not known."""
    for name in _COLUMNS:
        op.add_column("executions", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    """Drop what was measured."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    for name in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE executions DROP COLUMN {name}")
