"""SQL that tries to write something, or to read what is not Soapstone's."""

from __future__ import annotations

from pathlib import Path

CANARY = "canary-of-another-program"


def hostile_queries(folder: Path, url: str) -> list[str]:
    """Return queries against the files that `lay_out` makes, and against the server of a PostgreSQL URL."""
    csv, parquet, lite = (folder / name for name in ("other.csv", "other.parquet", "other.sqlite"))
    keywords = "dbname=postgres user=soapstone"
    if "host=" in url:
        keywords += f" host={url.partition('host=')[2]}"
    writes = [
        f"COPY (SELECT 1) TO '{folder}/new.csv'",
        f"COPY op_costs TO '{folder}/new.parquet' (FORMAT parquet)",
        f"COPY op_costs FROM '{csv}'",
        f"EXPORT DATABASE '{folder}/new'",
        f"EXPLAIN COPY (SELECT 1) TO '{folder}/new.csv'",
        f"EXPLAIN ANALYZE COPY (SELECT 1) TO '{folder}/new.csv'",
        f"EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{folder}/new.csv'",
        f"EXPLAIN (ANALYZE, FORMAT json) COPY (SELECT 1) TO '{folder}/new.csv'",
        f"explain/**/analyze/*SELECT 1*/copy (select 1) to '{folder}/new.csv' -- SELECT 1",
        f"SELECT 1; COPY (SELECT 1) TO '{folder}/new.csv'",
        f"COPY (SELECT 1) TO '{folder}/new.csv'; SELECT 1",
        f"SELECT 1 -- ;\n; COPY (SELECT 1) TO '{folder}/new.csv'",
        f"SELECT ';' ; /* */ ATTACH '{folder}/new.duckdb'",
        f"SELECT 1\0; COPY (SELECT 1) TO '{folder}/new.csv'",
        f"ATTACH '{folder}/new.duckdb' AS new",
        f"ATTACH '{folder}/new.sqlite' AS new (TYPE sqlite)",
        "CREATE TABLE t AS SELECT 1",
        "CREATE TEMP TABLE t AS SELECT 1",
        "CREATE OR REPLACE VIEW op_costs AS SELECT 1",
        "CREATE MACRO f() AS TABLE SELECT 1",
        "CREATE SECRET s (TYPE postgres, PASSWORD 'x')",
        "CREATE TABLE store.t AS SELECT 1",
        "DROP VIEW op_costs",
        "DROP TABLE store.graphs",
        "ALTER TABLE store.graphs ADD COLUMN x INTEGER",
        "INSERT INTO store.device_kinds VALUES (1)",
        "EXPLAIN ANALYZE INSERT INTO store.device_kinds VALUES (1)",
        "WITH a AS (SELECT 1) INSERT INTO store.device_kinds SELECT * FROM a",
        "WITH a AS (DELETE FROM store.graphs RETURNING *) SELECT * FROM a",
        "UPDATE store.graphs SET name = 'x'",
        "DELETE FROM store.graphs",
        "TRUNCATE store.graphs",
        "MERGE INTO store.graphs AS g USING store.graphs AS h ON g.id = h.id WHEN MATCHED THEN DELETE",
        "VACUUM",
        "CHECKPOINT",
        "BEGIN",
        "COMMIT",
        "PREPARE p AS SELECT 1",
        "EXECUTE p",
        "CALL postgres_execute('store', 'DELETE FROM graphs')",
        f"CALL sqlite_attach('{lite}')",
        f"CALL postgres_attach('{keywords}')",
        "FROM enable_logging()",
        f"CALL enable_logging(storage = 'file', storage_path = '{folder}/log')",
        "FROM checkpoint()",
        "FROM force_checkpoint('store')",
        "SELECT write_log('x')",
        "SELECT nextval('x')",
    ]
    settings = [
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "RESET allowed_paths",
        f"SET temp_directory = '{folder}'",
        f"SET home_directory = '{folder}'",
        "SET VARIABLE x = 1",
        f"PRAGMA enable_profiling; PRAGMA profile_output = '{folder}/profile'",
        f"PRAGMA profile_output = '{folder}/profile'",
        "PRAGMA database_list",
        "PRAGMA table_info('op_costs')",
        "USE store",
        "LOAD httpfs",
        "INSTALL httpfs",
        "FORCE INSTALL sqlite",
        "UPDATE EXTENSIONS",
    ]
    reads = [
        f"SELECT * FROM '{csv}'",
        f'SELECT * FROM "{csv}"',
        f"FROM '{parquet}'",
        f"TABLE '{csv}'",
        f"DESCRIBE '{csv}'",
        f"SUMMARIZE '{csv}'",
        f"DESCRIBE SELECT * FROM '{csv}'",
        f"SELECT * FROM read_csv('{csv}')",
        f"SELECT * FROM READ_CSV_AUTO('{csv}')",
        f"SELECT * FROM main.read_csv('{csv}')",
        f"SELECT * FROM \"read_csv\"('{csv}')",
        f"SELECT * FROM read_parquet('{parquet}')",
        f"SELECT * FROM parquet_scan(['{parquet}'])",
        f"SELECT * FROM parquet_metadata('{parquet}')",
        f"SELECT * FROM parquet_schema('{parquet}')",
        f"SELECT * FROM parquet_kv_metadata('{parquet}')",
        f"SELECT * FROM read_text('{csv}')",
        f"SELECT * FROM read_blob('{csv}')",
        f"SELECT * FROM read_json('{csv}')",
        f"SELECT * FROM read_ndjson_objects('{csv}')",
        f"SELECT * FROM read_duckdb('{lite}')",
        f"SELECT * FROM sniff_csv('{csv}')",
        f"SELECT * FROM glob('{folder}/*')",
        f"SELECT * FROM sqlite_scan('{lite}', 'secrets')",
        f"SELECT * FROM sqlite_query('store', 'ATTACH ''{lite}'' AS o')",
        f"SELECT * FROM postgres_scan('{keywords}', 'pg_catalog', 'pg_user')",
        f"SELECT * FROM postgres_scan_pushdown('{keywords}', 'pg_catalog', 'pg_user')",
        "SELECT * FROM postgres_query('store', 'SELECT pg_read_file(''PG_VERSION'')')",
        f"SELECT * FROM read_postgres_binary('{csv}')",
        "SELECT * FROM 'https://example.invalid/x.parquet'",
        "SELECT * FROM read_csv('https://example.invalid/x.csv')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        f"WITH a AS (SELECT * FROM read_text('{csv}')) SELECT * FROM a",
        f"WITH a AS MATERIALIZED (SELECT * FROM '{csv}') SELECT * FROM a",
        f"WITH RECURSIVE a AS (SELECT 1 AS x UNION ALL SELECT x FROM a, read_text('{csv}')) SELECT * FROM a",
        f"WITH a AS (WITH b AS (FROM sqlite_scan('{lite}', 'secrets')) FROM b) FROM a",
        f'WITH "{csv}" AS (SELECT * FROM "{csv}") SELECT * FROM "{csv}"',
        f"SELECT (SELECT content FROM read_text('{csv}'))",
        f"SELECT 1 WHERE EXISTS (FROM read_text('{csv}'))",
        f"SELECT 1 WHERE 1 IN (SELECT secret FROM sqlite_scan('{lite}', 'secrets'))",
        f"SELECT * FROM op_costs, LATERAL (SELECT * FROM read_text('{csv}'))",
        f"SELECT * FROM op_costs LEFT JOIN read_text('{csv}') ON true",
        f"SELECT 1 UNION ALL SELECT content FROM read_text('{csv}')",
        f"SELECT 1 ORDER BY (SELECT content FROM read_text('{csv}'))",
        f"SELECT 1 LIMIT (SELECT count(*) FROM read_text('{csv}'))",
        f"SELECT list_transform([1], lambda x: (SELECT content FROM read_text('{csv}')))",
        f"FROM (PIVOT (FROM sqlite_scan('{lite}', 'secrets')) ON secret IN ('a') USING count(*))",
        f"PIVOT (FROM sqlite_scan('{lite}', 'secrets')) ON secret",
        f"PIVOT '{csv}' ON x",
        f"PIVOT sqlite_scan('{lite}', 'secrets') ON secret USING count(*)",
        f"PIVOT op_costs ON phase USING count((SELECT secret FROM sqlite_scan('{lite}', 'secrets')))",
        f"PIVOT op_costs ON phase IN (SELECT secret FROM sqlite_scan('{lite}', 'secrets'))",
        f"PIVOT op_costs ON phase IN ('a'), target IN (SELECT secret FROM sqlite_scan('{lite}', 'secrets'))",
        f"WITH a AS (FROM sqlite_scan('{lite}', 'secrets')) PIVOT a ON secret",
        f"WITH a AS (PIVOT op_costs ON phase) FROM a, sqlite_scan('{lite}', 'secrets')",
        f"FROM (PIVOT op_costs ON phase) UNION ALL BY NAME FROM sqlite_scan('{lite}', 'secrets')",
        f"FROM (PIVOT op_costs ON phase), (PIVOT (FROM sqlite_scan('{lite}', 'secrets')) ON secret)",
        f"EXPLAIN ANALYZE PIVOT (FROM sqlite_scan('{lite}', 'secrets')) ON secret",
        f"SUMMARIZE (PIVOT (FROM sqlite_scan('{lite}', 'secrets')) ON secret)",
        f"PIVOT op_costs ON phase; COPY (SELECT 1) TO '{folder}/new.csv'",
        f"COPY (PIVOT op_costs ON phase) TO '{folder}/new.csv'",
        "CREATE TABLE t AS PIVOT op_costs ON phase",
        "CREATE TYPE t AS ENUM ('a'); PIVOT op_costs ON phase",
        "INSERT INTO store.device_kinds PIVOT op_costs ON phase",
        f"VALUES ((SELECT content FROM read_text('{csv}')))",
        f"EXPLAIN ANALYZE SELECT * FROM sqlite_scan('{lite}', 'secrets')",
        f"EXPLAIN SELECT * FROM sqlite_scan('{lite}', 'secrets')",
        f"EXPLAIN (FORMAT json) SELECT * FROM sqlite_scan('{lite}', 'secrets')",
        f"/* SELECT 1 */ FROM sqlite_scan('{lite}', 'secrets')",
        f"FROM query('FROM sqlite_scan(''{lite}'', ''secrets'')')",
        f"FROM query_table('{csv}')",
        f"FROM query_table(['op_costs', '{csv}'])",
        f"FROM json_execute_serialized_sql(json_serialize_sql('FROM sqlite_scan(''{lite}'', ''secrets'')'))",
        f"SELECT json_serialize_plan('FROM sqlite_scan(''{lite}'', ''secrets'')')",
        f"FROM histogram('{csv}', 'x')",
        "SELECT getenv('HOME')",
        "FROM duckdb_databases()",
        "FROM duckdb_databases",
        "FROM duckdb_secrets()",
        "FROM duckdb_settings()",
        "FROM duckdb_temporary_files()",
        "FROM which_secret('x', 'postgres')",
        "SHOW DATABASES",
        "SHOW VARIABLES",
        "FROM store.pg_catalog.pg_hba_file_rules",
        "FROM store.pg_catalog.pg_authid",
        "FROM store.information_schema.tables",
        "FROM store.sqlite_master",
        "FROM present_chunks",
        "FROM python_variable",
        f"CALL read_text('{csv}')",
        "CALL duckdb_databases()",
    ]
    return [*writes, *settings, *reads]


def lay_out(folder: Path) -> None:
    """Make files of another program, each with the canary in it."""
    import sqlite3

    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    (folder / "other.csv").write_text(f"x\n{CANARY}\n")
    parquet.write_table(pa.table({"x": [CANARY]}), folder / "other.parquet")
    connection = sqlite3.connect(folder / "other.sqlite")
    connection.execute("CREATE TABLE secrets (secret TEXT)")
    connection.execute("INSERT INTO secrets VALUES (?)", [CANARY])
    connection.commit()
    connection.close()
