"""By how much longer a run's predicted step is at the speed that its cores had.

Revision: 0009, after 0008. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; rows from before have no value."""
    op.add_column("executions", sa.Column("slowdown", sa.Double(), nullable=True))


def downgrade() -> None:
    """Drop the column, and its values."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    op.execute("ALTER TABLE executions DROP COLUMN slowdown")
