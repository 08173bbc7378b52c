"""The database: tables, engines, migrations, and the store, which is the one port to all of it.

`records` are the rows as dataclasses, `store.Store` reads and writes them, `schema.open_database` opens a
database and checks its schema, `trace.ProposalTrace` writes the proposals of a search beside it. Only this
package knows SQLAlchemy.
"""
