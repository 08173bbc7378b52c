"""Owners: which process a running search or execution belongs to, so that a killed one is told from one that lives.

Revision: 0002, after 0001. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OWNED = ("searches", "executions")


def upgrade() -> None:
    """Add the owners; executions may be interrupted, and traces hold the starts of chains.

    Whatever is running has no owner, so nobody could tell later whether it lives: it is interrupted. One that
    does live says how it ended when it ends.
    """
    for table in OWNED:
        op.add_column(table, sa.Column("owner", sa.Text(), nullable=True))
        op.add_column(table, sa.Column("alive_at", sa.DateTime(), nullable=True))
    _replace_check("executions", "status", "status IN ('running', 'finished', 'interrupted', 'failed')")
    _replace_check("traces", "kind", "kind IN ('proposals', 'configurations', 'starts')")
    for table in OWNED:
        op.execute(f"UPDATE {table} SET status = 'interrupted' WHERE status = 'running'")


def downgrade() -> None:
    """Drop the owners; interrupted executions become failed ones, and starts are no longer registered."""
    op.execute(
        "UPDATE executions SET status = 'failed', failure = coalesce(failure, 'interrupted')"
        " WHERE status = 'interrupted'"
    )
    op.execute("DELETE FROM traces WHERE kind = 'starts'")
    _replace_check("executions", "status", "status IN ('running', 'finished', 'failed')")
    _replace_check("traces", "kind", "kind IN ('proposals', 'configurations')")
    for table in OWNED:
        # In SQL: Alembic would write a SQLite table anew, and lose its other constraints by that.
        op.execute(f"ALTER TABLE {table} DROP COLUMN alive_at")
        op.execute(f"ALTER TABLE {table} DROP COLUMN owner")


def _replace_check(table: str, name: str, condition: str) -> None:
    full_name = op.f(f"ck_{table}_{name}")
    # SQLite changes a constraint by writing the table anew, which is what a batch does there.
    with op.batch_alter_table(table) as batch:
        batch.drop_constraint(full_name, type_="check")
        batch.create_check_constraint(full_name, condition)
