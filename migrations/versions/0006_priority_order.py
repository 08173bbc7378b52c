"""Simulations in order of priority, by each of its policies.

Revision: 0006, after 0005. Its definitions are frozen: they do not follow the models.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let simulations be of these orders too."""
    _replace_check("task_order IN ('program', 'fifo', 'priority', 'priority-tic', 'priority-tac')")


def downgrade() -> None:
    """Drop the simulations of these orders."""
    op.execute("DELETE FROM simulations WHERE task_order NOT IN ('program', 'fifo')")
    _replace_check("task_order IN ('program', 'fifo')")


def _replace_check(condition: str) -> None:
    name = op.f("ck_simulations_task_order")
    # SQLite changes a constraint by writing the table anew, which is what a batch does there.
    with op.batch_alter_table("simulations") as batch:
        batch.drop_constraint(name, type_="check")
        batch.create_check_constraint(name, condition)
