"""How fast the cores were while costs and runs were measured, and how well predicted steps are scheduled.

Revision: 0008, after 0007. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("op_costs", "reference_s"),
    ("op_costs", "speed"),
    ("executions", "speed"),
    ("simulations", "scheduling_efficiency"),
    ("simulations", "speedup_potential"),
)


def upgrade() -> None:
    """Add the columns; rows from before have no values."""
    for table, name in _COLUMNS:
        op.add_column(table, sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    """Drop the columns, and their values."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    for table, name in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
