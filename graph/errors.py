"""All errors that Soapstone raises on purpose, one tree.

    SoapstoneError
    |-- UsageError            an option or argument of a command
    |-- GraphError            an operator graph that cannot be used
    |   `-- ImportFailure     a module that cannot be imported as a graph
    |       `-- NeedsDataError  the same on meta alone: with data it might be
    |-- TopologyError         a topology file or device
    |-- StrategyError         a strategy that does not fit its graph or topology
    |-- TrainingError         a training description
    |-- CostError             an operator cost that is missing or unusable
    |-- RuntimeFailure        an execution that failed on a rank
    |   `-- RankFailure       the same among processes that torchrun started: one of those within reach says it
    |-- QueryFailure          a query that took more time or memory than it may, or whose process ended
    `-- DatabaseError         the database, its schema or its location
        `-- DatabaseFailure       an operation on it that failed
            |-- DamagedDataError  a row, a file of SQLite or a trace that is not as it was written
            `-- StorageFullError  no space is left where something had to be written

Each message is one line: where: what is, what must be; what to do. Each class has the exit code of a command that ends
with it: 2 where what the user gave cannot be used (nothing was changed), 1 where something else failed.
"""


class SoapstoneError(Exception):
    """Root of all errors that are the user's or the environment's, never a bug of ours."""

    exit_code = 2


class UsageError(SoapstoneError):
    """A command was given something that it cannot use."""


class GraphError(SoapstoneError):
    """An operator graph is malformed or cannot be used as asked."""


class ImportFailure(GraphError):
    """A module could not be imported as an operator graph."""


class NeedsDataError(ImportFailure):
    """A module on meta could not be imported for want of data; built with data it might be."""


class TopologyError(SoapstoneError):
    """A topology, a device or a link is unknown or malformed."""


class StrategyError(SoapstoneError):
    """A strategy does not fit the graph or the topology."""


class TrainingError(SoapstoneError):
    """A training description is malformed."""


class CostError(SoapstoneError):
    """The cost of an operator is missing or cannot be used."""


class RuntimeFailure(SoapstoneError):
    """An execution failed; the message names the rank and the reason."""

    exit_code = 1


class RankFailure(RuntimeFailure):
    """A rank failed among those that torchrun started. `exit_code` is due on all of them.

    said_here: this process says it, though it is not rank 0, which is out of reach.
    """

    def __init__(self, message: str, exit_code: int = 1, *, said_here: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.said_here = said_here


class QueryFailure(SoapstoneError):
    """A query took more time or memory than it may, or its process ended."""

    exit_code = 1


class DatabaseError(SoapstoneError):
    """The database cannot be opened, or its schema is not this version's."""


class DatabaseFailure(DatabaseError):
    """An operation on a database or a trace failed: the file system, a lock that nobody gave back, damage."""

    exit_code = 1


class DamagedDataError(DatabaseFailure):
    """A file or row is not as it was written; the message names the file, and table, row and column if it is a row."""


class StorageFullError(DatabaseFailure):
    """No space is left for what had to be written; the message names the file or folder."""
