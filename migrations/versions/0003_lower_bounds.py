"""Lower bounds: a time that no strategy of a search's space is below, so that its gap is known.

Revision: 0003, after 0002. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the bound; of searches before it none is known."""
    op.add_column("searches", sa.Column("lower_bound_s", sa.Double(), nullable=True))


def downgrade() -> None:
    """Drop the bounds."""
    # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
    op.execute("ALTER TABLE searches DROP COLUMN lower_bound_s")
