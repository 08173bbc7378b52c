"""Analysis by DuckDB: views over the database and the traces, and comparisons on them."""
