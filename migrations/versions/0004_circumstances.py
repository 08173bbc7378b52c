"""Circumstances of measurements: time to issue a call, clock, throttling; how far link costs are from their line.

Revision: 0004, after 0003. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS: tuple[tuple[str, str, sa.types.TypeEngine[float] | sa.types.TypeEngine[str]], ...] = (
    ("op_costs", "launch_s", sa.Double()),
    ("op_costs", "clock_hz", sa.Double()),
    ("op_costs", "throttle", sa.Text()),
    ("link_fits", "residual", sa.Double()),
)


def upgrade() -> None:
    """Add the columns; of measurements before them nothing is known."""
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Drop what was noted."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    for table, name, _ in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
