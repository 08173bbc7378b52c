"""What other processes took of the cores while a run was measured.

Revision: 0007, after 0006. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[float] | sa.types.TypeEngine[str]], ...] = (
    ("lost_s", sa.Text()),
    ("undisturbed_s", sa.Double()),
)


def upgrade() -> None:
    """Add the columns; of runs before them nothing is known."""
    for name, kind in _COLUMNS:
        op.add_column("executions", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Drop the columns, and their values."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    for name, _ in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE executions DROP COLUMN {name}")
