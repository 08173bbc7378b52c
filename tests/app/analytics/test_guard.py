"""Whatever the SQL, a query changes nothing and reads nothing but what is stored, over every backend."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from app.analytics.answer import answer
from app.analytics.catalog import CATALOG
from app.analytics.duck import _extension_file, connect
from app.analytics.formats import rows
from app.analytics.guard import REFUSED_FUNCTIONS, TABLE_FUNCTIONS, check_query
from app.db.store import Store
from graph.errors import UsageError
from tests.app.analytics.hostile import CANARY, hostile_queries, lay_out
from tests.app.db import samples

HARMLESS = [
    "SELECT 1",
    "select 1;",
    "(SELECT 1) UNION ALL (SELECT 2) ORDER BY 1",
    "VALUES (1), (2)",
    "FROM op_costs",
    "TABLE main.op_costs",
    'SELECT * FROM OP_COSTS AS "/etc/passwd"',
    "FROM memory.main.graphs SELECT model",
    "FROM store.graphs JOIN store.main.strategies AS s ON s.graph_id = graphs.id",
    "WITH op_costs AS (SELECT * FROM op_costs WHERE phase = 'forward') SELECT count(*) FROM op_costs",
    "WITH a AS (SELECT 1 AS x), b AS MATERIALIZED (SELECT x FROM a) SELECT * FROM a JOIN b USING (x)",
    "WITH RECURSIVE n AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM n WHERE x < 3) SELECT * FROM n",
    "SELECT (SELECT count(*) FROM op_costs), unnest([1, 2])",
    "SELECT model, avg(predicted_s) OVER (PARTITION BY model) FROM predicted_vs_measured QUALIFY true",
    "SELECT * FROM range(3) AS t(x), LATERAL (SELECT x + 1)",
    "FROM json_each('[1, 2]')",
    "PIVOT op_costs ON phase IN ('forward', 'backward') USING min(minimum_s) GROUP BY target",
    "PIVOT op_costs ON phase USING min(minimum_s) GROUP BY target ORDER BY target LIMIT 1",
    "PIVOT_WIDER (SELECT model, digest, operator_count FROM graphs) ON model USING sum(operator_count)",
    "PIVOT (FROM graphs SELECT id, model, digest) ON model || '_' || digest, lower(model) -- of both\n;",
    "PIVOT graphs ON model IN ('inception'), digest USING count(*)",
    "WITH a AS (FROM graphs), b AS (PIVOT a ON model USING count(*)) FROM b JOIN b AS c ON true",
    "SELECT (SELECT count(*) FROM (PIVOT graphs ON model)) UNION ALL SELECT count(*) FROM (PIVOT graphs ON digest)",
    "FROM graphs PIVOT (count(*) FOR model IN ('inception', 'vgg16'))",
    "EXPLAIN PIVOT graphs ON model",
    "EXPLAIN ANALYZE PIVOT graphs ON model",
    "UNPIVOT (SELECT 1 AS a, 2 AS b) ON COLUMNS(*) INTO NAME n VALUE v",
    "FROM (SELECT 1 AS a, 2 AS b) UNPIVOT (v FOR n IN (a, b))",
    "FROM op_costs TABLESAMPLE 10%",
    "FROM graphs USING SAMPLE 1",
    "SELECT list_transform([1], lambda x: x + 1), COLUMNS('model') FROM graphs",
    "SELECT [x + 1 FOR x IN [1, 2, 3] IF x > 1], {'a': 1}.a, MAP {'k': 1}['k'], [1, 2, 3][1:2], product_of([2, 3])",
    "SELECT * EXCLUDE (id) REPLACE ('x' AS model) RENAME (digest AS d) FROM graphs",
    "SELECT DISTINCT ON (model) n: model, min(COLUMNS('.*_count')) FROM graphs GROUP BY ALL ORDER BY ALL LIMIT 50%",
    "FROM graphs ANTI JOIN strategies ON graphs.id = strategies.graph_id",
    "FROM graphs POSITIONAL JOIN topologies",
    "FROM simulations AS s ASOF JOIN executions AS e ON s.model = e.model AND s.created_at >= e.created_at",
    "SELECT model, digest, count(*) FROM graphs GROUP BY GROUPING SETS ((model), (digest), ())",
    "SELECT sum(id) OVER w FROM graphs WINDOW w AS (ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)",
    "WITH RECURSIVE n(a, x) USING KEY (a) AS (SELECT 1, 1 UNION SELECT a, x + 1 FROM n WHERE x < 5) FROM n",
    "SELECT 1 AS a UNION BY NAME SELECT 2 AS b",
    "SELECT document->>'$.format' FROM store.strategies",
    "DESCRIBE op_costs",
    "SHOW op_costs",
    "DESCRIBE SELECT 1",
    "SUMMARIZE op_costs",
    "SUMMARIZE (PIVOT graphs ON model)",
    "FROM (SUMMARIZE SELECT model FROM graphs) SELECT column_name",
    "SHOW TABLES",
    "SHOW ALL TABLES",
    "FROM information_schema.columns",
    "SELECT 'COPY x TO y; DROP TABLE z' -- ; COPY",
    "EXPLAIN SELECT 1",
    "EXPLAIN (SELECT 1)",
    "EXPLAIN (FORMAT json) SELECT 1",
    "explain /* ü */ analyze (select 'ü')",
]


def fingerprints(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_hostile_queries_are_refused_in_one_line_and_touch_nothing(
    store: Store, database_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store.put_graph(samples.graph())
    folder = tmp_path / "other"
    lay_out(folder)
    before = fingerprints(folder)
    python_variable = CANARY
    assert python_variable
    got_through, messages = [], []
    with connect(store.database) as connection:
        for sql in hostile_queries(folder, database_url):
            try:
                got_through.append((sql, list(rows(answer(connection, sql)))))
            except UsageError as error:
                messages.append(str(error))
    assert got_through == []
    assert [message for message in messages if "\n" in message or CANARY in message] == []
    assert fingerprints(folder) == before
    assert store.table_counts()["graphs"] == 1
    assert CANARY not in "".join(capfd.readouterr())


def test_hostile_queries_are_sql(tmp_path: Path) -> None:
    """What cannot be parsed would be refused for another reason than what it tries."""
    connection = duckdb.connect()
    broken = []
    for sql in hostile_queries(tmp_path, "postgresql://soapstone@/x?host=/tmp"):
        try:
            connection.extract_statements(sql)
        except duckdb.Error:
            broken.append(sql)
    connection.close()
    # DuckDB's CTEs cannot write at all.
    assert broken == ["WITH a AS (DELETE FROM store.graphs RETURNING *) SELECT * FROM a"]


def test_harmless_queries_run(store: Store) -> None:
    with connect(store.database) as connection:
        for sql in HARMLESS:
            # SQLite's schema is main; PostgreSQL's public.
            text = sql.replace("store.main.", "store.") if "post" in store.database.url.drivername else sql
            assert sum(batch.num_rows for batch in answer(connection, text).batches) >= 0, text


def test_pivot_without_in_has_a_column_for_each_value(store: Store) -> None:
    for number, name in enumerate(("inception", "vgg16")):
        store.put_graph(samples.graph(number, name=name))
    pivot = "PIVOT (SELECT model, operator_count AS n FROM graphs) ON model USING sum(n) AS sum, count(*) AS count"
    with connect(store.database) as connection:
        found = answer(connection, pivot)
        assert found.schema.names == ["inception_sum", "inception_count", "vgg16_sum", "vgg16_count"]
        (row,) = rows(found)
        assert row == (121, 1, 121, 1)
        (plan,) = rows(answer(connection, f"EXPLAIN {pivot}"))
        assert "vgg16" in plan[-1]


def test_lock_alone_stops_all_but_what_the_scanners_open_by_themselves(store: Store, tmp_path: Path) -> None:
    lay_out(tmp_path / "other")
    csv, parquet = tmp_path / "other" / "other.csv", tmp_path / "other" / "other.parquet"
    unused = "postgres" if store.database.url.get_backend_name() == "sqlite" else "sqlite"
    with connect(store.database) as connection:
        for sql in (
            f"FROM '{csv}'",
            f"FROM read_text('{csv}')",
            f"FROM read_parquet('{parquet}')",
            f"FROM glob('{csv.parent}/*')",
            f"COPY (SELECT 1) TO '{csv.parent}/new.csv'",
            f"ATTACH '{csv.parent}/new.duckdb'",
            "SET enable_external_access = true",
            "SET lock_configuration = false",
            f"PRAGMA profile_output = '{csv.parent}/profile'",
            "SET allow_unsigned_extensions = false",
            "INSTALL httpfs",
            "LOAD httpfs",
            f"LOAD '{_extension_file(unused)}'",  # which is there, and signed
            "FROM csv",
        ):
            with pytest.raises(duckdb.Error):
                connection.execute(sql)
    assert sorted(path.name for path in csv.parent.iterdir()) == [
        "other.csv",
        "other.parquet",
        "other.sqlite",
    ]


def test_refusals_say_what_to_do() -> None:
    connection = duckdb.connect()
    for sql, message in {
        "": "is empty, must be one SELECT",
        "SELECT 1; SELECT 2": "is 2 statements, must be one SELECT",
        "PIVOT graphs ON model; SELECT 2": "is 2 statements, must be one SELECT",
        "PIVOT graphs ON model IN (SELECT 'x')": "list its values by IN",
        "DROP TABLE x": "is DROP, must be one SELECT, or EXPLAIN of one",
        "FROM op_cost": "FROM op_cost is not allowed.*did you mean op_costs",
        "SELECT * FRO x": "syntax error",
        "SELECT " + "abs(" * 900 + "1" + ")" * 900: "nested too deeply",
        "SELECT 1" + " + 1" * 5000: "too deeply|depth limit",
    }.items():
        with pytest.raises(UsageError, match=message) as raised:
            check_query(connection, sql)
        assert "\n" not in str(raised.value)
    connection.close()


def test_every_function_that_reads_or_changes_more_than_its_arguments_is_known(store: Store) -> None:
    """Fails where a newer DuckDB brings such a function: it must then be judged, and refused or listed here."""
    with connect(store.database) as connection:
        listed = connection.execute(
            "SELECT DISTINCT function_name, function_type, stability FROM duckdb_functions()"
        ).fetchall()
    random = {"random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "error", "sleep_ms"}
    about_itself = {
        "current_connection_id",
        "current_query",
        "current_query_id",
        "current_transaction_id",
    }
    changing = {name for name, _, stability in listed if stability == "VOLATILE"}
    assert changing - random - about_itself <= REFUSED_FUNCTIONS
    # Names that sound as if they opened, ran or called something.
    suspicious = re.compile(
        r"read|write|scan|file|glob|env|query|exec|attach|copy|http|secret|load|url|serialize|log\b"
    )
    judged = {
        "current_query",
        "current_query_id",
        "json_deserialize_sql",  # text to text
        "json_serialize_sql",
        "parse_filename",
        "url_decode",
        "url_encode",
        "log",
        "current_catalog",
        "pg_conf_load_time",
    }
    computing = {name for name, kind, _ in listed if kind in ("scalar", "aggregate", "macro")}
    assert {name for name in computing if suspicious.search(name)} - judged <= REFUSED_FUNCTIONS
    tables = {name for name, kind, _ in listed if kind in ("table", "table_macro")}
    assert tables.isdisjoint(CATALOG)
    assert {"unnest", "range", "generate_series", "json_each", "json_tree"} <= tables & TABLE_FUNCTIONS


def test_bytes_that_are_no_text_are_refused() -> None:
    """The command line gives them as lone surrogates."""
    with pytest.raises(UsageError, match="must be text"):
        check_query(duckdb.connect(), "SELECT '\udcff'")
