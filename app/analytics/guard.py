"""The SQL that `app query` runs: one SELECT, or an EXPLAIN of one, over Soapstone's views and tables alone.

DuckDB's own parser says what a text is (`extract_statements`) and what it consists of (`json_serialize_sql`).
Everything in that tree that yields rows must be known here: one of our views or tables, a CTE of the query, or a
function that reads no file. This closes what `app.analytics.duck`'s lock leaves open (functions such as
`sqlite_scan` and `postgres_query` open files and servers by themselves), and does so before anything runs.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from app.analytics.catalog import CATALOG
from app.db.models import metadata
from graph.errors import UsageError

if TYPE_CHECKING:
    import duckdb

Kind = Literal["select", "explain"]

TABLE_FUNCTIONS = frozenset(
    {"unnest", "range", "generate_series", "generate_subscripts", "json_each", "json_tree"}
)
"""Functions that may stand in FROM: they read nothing but their arguments."""

REFUSED_FUNCTIONS = frozenset(
    {"json_serialize_plan", "nextval", "currval", "setseed", "write_log", "getenv", "stats"}
)
"""Functions of values that read more than their arguments, or change something."""

# What a node of FROM may be, apart from tables, functions and SHOW, which are looked at one by one.
_HARMLESS_SOURCES = frozenset({"EMPTY", "SUBQUERY", "JOIN", "EXPRESSION_LIST", "PIVOT"})
_QUERY_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_SHOWN = frozenset({'"tables"', "__show_tables_expanded"})
_DESCRIBED = frozenset({"tables", "columns"})
_LIST = b"\n IN ('') "


def check_query(connection: duckdb.DuckDBPyConnection, sql: str) -> Kind:
    """Return the kind of a statement that may run; it is parsed here, not run.

    Args:
        connection: any DuckDB connection; its parser is used.
        sql: what the user gave.

    Raises:
        UsageError: it cannot be parsed, is several statements or another one, or reads what is not Soapstone's.
    """
    import duckdb

    if "\0" in sql or any("\ud800" <= letter <= "\udfff" for letter in sql):
        raise UsageError("query: has a NUL character or bytes that are no UTF-8, must be text; remove them")
    try:
        sql = _with_listed_pivots(connection, sql)
        statements = connection.extract_statements(sql)
    except (duckdb.Error, UnicodeError) as error:
        raise UsageError(f"query: {_reason(error)}; correct it") from None
    if not statements:
        raise UsageError("query: is empty, must be one SELECT; see the views by: app query --views")
    if len(statements) != 1:
        if any(not statement.query for statement in statements):
            raise UsageError(
                "query: has a PIVOT that cannot be looked at, must be alone and plain; list its values by IN"
            )
        raise UsageError(f"query: is {len(statements)} statements, must be one SELECT; run them one by one")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        trees = _explained(connection, sql)
    elif kind == duckdb.StatementType.SELECT:
        trees = _trees(connection, [sql])
    else:
        trees = []
    if not trees:
        name = "SELECT, but no plain one" if kind == duckdb.StatementType.SELECT else kind.name
        raise UsageError(
            f"query: is {name}, must be one SELECT, or EXPLAIN of one; app query only reads (app query --views "
            "lists what there is)"
        )
    for tree in trees:
        try:
            _check(tree, frozenset())
        except RecursionError:
            raise UsageError("query: is nested too deeply, must be simpler; split it") from None
    return "explain" if kind == duckdb.StatementType.EXPLAIN else "select"


def _with_listed_pivots(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    """Return the text with a list of values for each PIVOT that has none: one statement then, and no other source.

    DuckDB parses PIVOT x ON y into CREATE TYPE ... AS ENUM (SELECT DISTINCT y FROM x) and a SELECT, of neither of which
    it gives the tree; PIVOT x ON y IN ('') reads the same. Where the list belongs DuckDB tells: that CREATE is gone.
    Only text for the tree is made here; the user's own is run.

    Raises:
        duckdb.Error: it cannot be parsed.
    """
    import duckdb

    left = _pivot_types(connection, sql)
    position: int | None = 0
    while left and position is not None:
        encoded = sql.encode()
        starts = [start for start, _ in duckdb.tokenize(sql)]
        # Never between a function's name and its arguments: what is a source of rows stays one.
        positions = [start for start in starts if start > position and encoded[start : start + 1] != b"("]
        for inserted_at in [*positions, len(encoded)]:
            # On a line of its own, since a comment may stand before.
            listed = (encoded[:inserted_at] + _LIST + encoded[inserted_at:]).decode()
            try:
                types = _pivot_types(connection, listed)
            except duckdb.Error:
                continue
            if types == left - 1:
                sql, left, position = listed, types, inserted_at + len(_LIST)
                break
        else:
            position = None
    return sql


def _pivot_types(connection: duckdb.DuckDBPyConnection, sql: str) -> int:
    """Return the number of types that DuckDB makes for PIVOT's columns: statements without a text of their own."""
    import duckdb

    statements = connection.extract_statements(sql)
    return sum(
        statement.type == duckdb.StatementType.CREATE and not statement.query for statement in statements
    )


def _explained(connection: duckdb.DuckDBPyConnection, sql: str) -> list[Any]:
    """Return the trees of the query of an EXPLAIN: after the word, after ANALYZE, after options in parentheses.

    Only one of these texts can be a whole statement, save for parentheses that are the statement's own; each that
    is one is looked at.
    """
    import duckdb

    encoded = sql.encode()
    # Positions are bytes.
    starts = [position for position, _ in duckdb.tokenize(sql)] + [len(encoded)]
    texts = [encoded[start:end] for start, end in pairwise(starts)]
    rests = [encoded[starts[1] :]] if len(starts) > 2 else []
    if len(starts) > 3:
        word = re.match(rb"[A-Za-z]*", texts[1])
        if word is not None and word[0].upper() in (b"ANALYZE", b"ANALYSE"):
            rests.append(encoded[starts[2] :])
        elif texts[1].startswith(b"("):
            close = next((index for index, text in enumerate(texts) if text.startswith(b")")), None)
            if close is not None:
                rests.append(encoded[starts[close + 1] :])
    return _trees(connection, [rest.decode() for rest in rests])


def _trees(connection: duckdb.DuckDBPyConnection, texts: list[str]) -> list[Any]:
    """Return the parse trees of the texts that are one SELECT."""
    trees = []
    for text in texts:
        # Not as a parameter: DuckDB then imports pandas by itself, and loses an interrupt that comes meanwhile.
        literal = "'" + text.replace("'", "''") + "'"
        row = connection.execute(f"SELECT json_serialize_sql({literal})").fetchone()
        assert row is not None
        try:
            document = json.loads(row[0])
        except RecursionError:
            raise UsageError("query: is nested too deeply, must be simpler; split it") from None
        if not document["error"] and len(document["statements"]) == 1:
            trees.append(document["statements"][0])
    return trees


def _check(node: Any, ctes: frozenset[str]) -> None:
    """Walk a tree; `ctes` are the names of the CTEs that can be seen from here, in lower case."""
    if isinstance(node, list):
        for item in node:
            _check(item, ctes)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if "cte_map" in node:
        ctes = _check_ctes(node, ctes)
    if kind in ("RECURSIVE_CTE_NODE", "CTE_NODE"):
        ctes |= {_name(node, "cte_name")}
    _check_source(node, ctes)
    if node.get("class") == "FUNCTION" and _name(node, "function_name") in REFUSED_FUNCTIONS:
        raise UsageError(
            f"query: function {node['function_name']} may not be used, must be one that only computes; leave it out"
        )
    for key, child in node.items():
        if key == "node" and isinstance(child, dict) and child.get("type") not in _QUERY_NODES:
            raise UsageError(f"query: has a {child.get('type')}, must be a plain SELECT; write it otherwise")
        if key != "cte_map":
            _check(child, ctes)


def _check_ctes(node: dict[str, Any], ctes: frozenset[str]) -> frozenset[str]:
    """Check the CTEs of a query, each of which sees those before it; return the names that the query sees."""
    for entry in node["cte_map"]["map"]:
        _check(entry["value"], ctes)
        ctes |= {str(entry["key"]).lower()}
    return ctes


def _check_source(node: dict[str, Any], ctes: frozenset[str]) -> None:
    """Check one source of rows, if the node is one."""
    kind = node.get("type")
    if kind == "BASE_TABLE":
        _check_table(node, ctes)
    elif kind == "TABLE_FUNCTION":
        name = str(node["function"].get("function_name", "")).lower()
        if node["function"].get("class") != "FUNCTION" or name not in TABLE_FUNCTIONS:
            raise UsageError(
                f"query: FROM {name or 'a function'}(...) is not allowed, must be a view of Soapstone's; "
                "app query --views lists them"
            )
    elif kind == "SHOW_REF":
        if node.get("query") is None and node.get("table_name") not in _SHOWN:
            raise UsageError(
                "query: shows what is not Soapstone's, must be a view of Soapstone's; app query --views lists them"
            )
    elif _is_source(node) and kind not in _HARMLESS_SOURCES:
        raise UsageError(f"query: reads from a {kind}, must be a view of Soapstone's; write it otherwise")


def _is_source(node: dict[str, Any]) -> bool:
    """True of a node of FROM: it has an alias and may be sampled, and is no expression."""
    return "sample" in node and "alias" in node and "class" not in node


def _check_table(node: dict[str, Any], ctes: frozenset[str]) -> None:
    catalog, schema, table = (_name(node, key) for key in ("catalog_name", "schema_name", "table_name"))
    ours = catalog in ("", "memory") and schema in ("", "main")
    if ours and (table in CATALOG or (table in ctes and not catalog and not schema)):
        return
    # `store.x` is parsed as schema and table; SQLite's only schema is main, PostgreSQL's the first one's public.
    stored = (catalog == "store" and schema in ("main", "public")) or (not catalog and schema == "store")
    if stored and table in metadata.tables:
        return
    if schema == "information_schema" and catalog in ("", "memory") and table in _DESCRIBED:
        return
    shown = ".".join(part for part in (catalog, schema, str(node.get("table_name"))) if part)
    close = get_close_matches(table, sorted(CATALOG), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(
        f"query: FROM {shown} is not allowed, must be a view of Soapstone's; {hint}app query --views lists them"
    )


def _name(node: dict[str, Any], key: str) -> str:
    return str(node.get(key) or "").lower()


def _reason(error: Exception) -> str:
    """Return DuckDB's reason in one line, without its picture of the place."""
    return " ".join(str(error).split("LINE ", 1)[0].split()) or type(error).__name__
