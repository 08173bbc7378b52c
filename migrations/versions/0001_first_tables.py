"""First tables.

Revision: 0001, the first. Its definitions are frozen: they do not follow the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "device_kinds",
        sa.Column("id", Id, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("processor", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_device_kinds"),
        sa.UniqueConstraint("name", name="uq_device_kinds_name"),
    )
    op.create_table(
        "environments",
        sa.Column("id", Id, nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_environments"),
        sa.UniqueConstraint("fingerprint", name="uq_environments_fingerprint"),
    )
    op.create_table(
        "graphs",
        sa.Column("id", Id, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("operator_count", sa.Integer(), nullable=False),
        sa.Column("parameter_count", sa.BigInteger(), nullable=False),
        sa.Column("flops", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_graphs"),
        sa.UniqueConstraint("digest", name="uq_graphs_digest"),
    )
    op.create_index("ix_graphs_name", "graphs", ["name"], unique=False)
    op.create_table(
        "op_signatures",
        sa.Column("id", Id, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("flops", sa.BigInteger(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_op_signatures"),
        sa.UniqueConstraint("digest", name="uq_op_signatures_digest"),
    )
    op.create_table(
        "topologies",
        sa.Column("id", Id, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("device_count", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_topologies"),
        sa.UniqueConstraint("digest", name="uq_topologies_digest"),
    )
    op.create_index("ix_topologies_name", "topologies", ["name"], unique=False)
    op.create_table(
        "trainings",
        sa.Column("id", Id, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_trainings"),
        sa.UniqueConstraint("digest", name="uq_trainings_digest"),
    )
    op.create_table(
        "link_costs",
        sa.Column("id", Id, nullable=False),
        sa.Column("device_kind_id", sa.BigInteger(), nullable=False),
        sa.Column("environment_id", sa.BigInteger(), nullable=False),
        sa.Column("pattern", sa.String(length=32), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("minimum_s", sa.Double(), nullable=False),
        sa.Column("median_s", sa.Double(), nullable=False),
        sa.Column("sample_count", sa.Integer(), nullable=False),
        sa.Column("samples_s", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_kind_id"], ["device_kinds.id"], name="fk_link_costs_device_kind_id"),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name="fk_link_costs_environment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_link_costs"),
        sa.UniqueConstraint(
            "device_kind_id",
            "environment_id",
            "pattern",
            "group_size",
            "size_bytes",
            name="uq_link_costs_key",
        ),
    )
    op.create_table(
        "link_fits",
        sa.Column("id", Id, nullable=False),
        sa.Column("device_kind_id", sa.BigInteger(), nullable=False),
        sa.Column("environment_id", sa.BigInteger(), nullable=False),
        sa.Column("pattern", sa.String(length=32), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=True),
        sa.Column("bandwidth_bytes_per_s", sa.Double(), nullable=True),
        sa.Column("contention_factor", sa.Double(), nullable=True),
        sa.Column("measured_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_kind_id"], ["device_kinds.id"], name="fk_link_fits_device_kind_id"),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name="fk_link_fits_environment_id"),
        sa.PrimaryKeyConstraint("id", name="pk_link_fits"),
        sa.UniqueConstraint(
            "device_kind_id", "environment_id", "pattern", "group_size", name="uq_link_fits_key"
        ),
    )
    op.create_table(
        "op_costs",
        sa.Column("id", Id, nullable=False),
        sa.Column("signature_id", sa.BigInteger(), nullable=False),
        sa.Column("device_kind_id", sa.BigInteger(), nullable=False),
        sa.Column("environment_id", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("minimum_s", sa.Double(), nullable=True),
        sa.Column("p10_s", sa.Double(), nullable=True),
        sa.Column("median_s", sa.Double(), nullable=True),
        sa.Column("sample_count", sa.Integer(), nullable=False),
        sa.Column("samples_s", sa.Text(), nullable=False),
        sa.Column("peak_bytes", sa.BigInteger(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("measured_at", sa.DateTime(), nullable=False),
        sa.CheckConstraint("phase IN ('forward', 'backward', 'update')", name=op.f("ck_op_costs_phase")),
        sa.CheckConstraint(
            "(failure IS NULL AND minimum_s IS NOT NULL AND p10_s IS NOT NULL AND median_s IS NOT NULL)"
            " OR (failure IS NOT NULL AND minimum_s IS NULL AND p10_s IS NULL AND median_s IS NULL)",
            name=op.f("ck_op_costs_measured_or_failed"),
        ),
        sa.ForeignKeyConstraint(["device_kind_id"], ["device_kinds.id"], name="fk_op_costs_device_kind_id"),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name="fk_op_costs_environment_id"),
        sa.ForeignKeyConstraint(["signature_id"], ["op_signatures.id"], name="fk_op_costs_signature_id"),
        sa.PrimaryKeyConstraint("id", name="pk_op_costs"),
        sa.UniqueConstraint(
            "signature_id", "device_kind_id", "environment_id", "phase", name="uq_op_costs_key"
        ),
    )
    op.create_index(
        "ix_op_costs_device_kind_id_environment_id",
        "op_costs",
        ["device_kind_id", "environment_id"],
        unique=False,
    )
    op.create_table(
        "strategies",
        sa.Column("id", Id, nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("graph_id", sa.BigInteger(), nullable=False),
        sa.Column("device_count", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["graph_id"], ["graphs.id"], name="fk_strategies_graph_id"),
        sa.PrimaryKeyConstraint("id", name="pk_strategies"),
        sa.UniqueConstraint("digest", name="uq_strategies_digest"),
    )
    op.create_index("ix_strategies_graph_id", "strategies", ["graph_id"], unique=False)
    op.create_table(
        "executions",
        sa.Column("id", Id, nullable=False),
        sa.Column("strategy_id", sa.BigInteger(), nullable=False),
        sa.Column("topology_id", sa.BigInteger(), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("environment_id", sa.BigInteger(), nullable=False),
        sa.Column("iterations", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("step_times_s", sa.Text(), nullable=False),
        sa.Column("minimum_s", sa.Double(), nullable=True),
        sa.Column("median_s", sa.Double(), nullable=True),
        sa.Column("mean_s", sa.Double(), nullable=True),
        sa.Column("throughput_samples_per_s", sa.Double(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("largest_deviation", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("finished_at", sa.DateTime(), nullable=True),
        sa.CheckConstraint("status IN ('running', 'finished', 'failed')", name=op.f("ck_executions_status")),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name="fk_executions_environment_id"),
        sa.ForeignKeyConstraint(["strategy_id"], ["strategies.id"], name="fk_executions_strategy_id"),
        sa.ForeignKeyConstraint(["topology_id"], ["topologies.id"], name="fk_executions_topology_id"),
        sa.ForeignKeyConstraint(["training_id"], ["trainings.id"], name="fk_executions_training_id"),
        sa.PrimaryKeyConstraint("id", name="pk_executions"),
    )
    op.create_index(
        "ix_executions_strategy_id_topology_id_training_id",
        "executions",
        ["strategy_id", "topology_id", "training_id"],
        unique=False,
    )
    op.create_table(
        "searches",
        sa.Column("id", Id, nullable=False),
        sa.Column("graph_id", sa.BigInteger(), nullable=False),
        sa.Column("topology_id", sa.BigInteger(), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("algorithm", sa.String(length=32), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("proposals", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("initial_time_s", sa.Double(), nullable=True),
        sa.Column("best_time_s", sa.Double(), nullable=True),
        sa.Column("best_strategy_id", sa.BigInteger(), nullable=True),
        sa.Column("trace_path", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("finished_at", sa.DateTime(), nullable=True),
        sa.CheckConstraint(
            "status IN ('running', 'finished', 'interrupted', 'failed')", name=op.f("ck_searches_status")
        ),
        sa.ForeignKeyConstraint(["best_strategy_id"], ["strategies.id"], name="fk_searches_best_strategy_id"),
        sa.ForeignKeyConstraint(["graph_id"], ["graphs.id"], name="fk_searches_graph_id"),
        sa.ForeignKeyConstraint(["topology_id"], ["topologies.id"], name="fk_searches_topology_id"),
        sa.ForeignKeyConstraint(["training_id"], ["trainings.id"], name="fk_searches_training_id"),
        sa.PrimaryKeyConstraint("id", name="pk_searches"),
    )
    op.create_index("ix_searches_graph_id_topology_id", "searches", ["graph_id", "topology_id"], unique=False)
    op.create_table(
        "simulations",
        sa.Column("id", Id, nullable=False),
        sa.Column("strategy_id", sa.BigInteger(), nullable=False),
        sa.Column("topology_id", sa.BigInteger(), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("search_id", sa.BigInteger(), nullable=True),
        sa.Column("task_order", sa.String(length=16), nullable=False),
        sa.Column("cost_digest", sa.String(length=64), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("measured_share", sa.Double(), nullable=False),
        sa.Column("estimated_share", sa.Double(), nullable=False),
        sa.Column("datasheet_share", sa.Double(), nullable=False),
        sa.Column("compute_s", sa.Double(), nullable=False),
        sa.Column("communication_bytes", sa.BigInteger(), nullable=False),
        sa.Column("peak_bytes", sa.Text(), nullable=False),
        sa.Column("feasible", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.CheckConstraint("task_order IN ('program', 'fifo')", name=op.f("ck_simulations_task_order")),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_simulations_search_id"),
        sa.ForeignKeyConstraint(["strategy_id"], ["strategies.id"], name="fk_simulations_strategy_id"),
        sa.ForeignKeyConstraint(["topology_id"], ["topologies.id"], name="fk_simulations_topology_id"),
        sa.ForeignKeyConstraint(["training_id"], ["trainings.id"], name="fk_simulations_training_id"),
        sa.PrimaryKeyConstraint("id", name="pk_simulations"),
        sa.UniqueConstraint(
            "strategy_id",
            "topology_id",
            "training_id",
            "task_order",
            "cost_digest",
            name="uq_simulations_key",
        ),
    )
    op.create_index("ix_simulations_search_id", "simulations", ["search_id"], unique=False)
    op.create_table(
        "traces",
        sa.Column("id", Id, nullable=False),
        sa.Column("search_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("rows", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.CheckConstraint("kind IN ('proposals', 'configurations')", name=op.f("ck_traces_kind")),
        sa.ForeignKeyConstraint(["search_id"], ["searches.id"], name="fk_traces_search_id"),
        sa.PrimaryKeyConstraint("id", name="pk_traces"),
        sa.UniqueConstraint("path", name="uq_traces_path"),
    )
    op.create_index("ix_traces_search_id", "traces", ["search_id"], unique=False)


def downgrade() -> None:
    """Drop all tables."""
    op.drop_table("traces")
    op.drop_table("simulations")
    op.drop_table("searches")
    op.drop_table("executions")
    op.drop_table("strategies")
    op.drop_table("op_costs")
    op.drop_table("link_fits")
    op.drop_table("link_costs")
    op.drop_table("trainings")
    op.drop_table("topologies")
    op.drop_table("op_signatures")
    op.drop_table("graphs")
    op.drop_table("environments")
    op.drop_table("device_kinds")
