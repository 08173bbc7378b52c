"""The names of the Parquet files with recorded steps: beside the database, in a folder of the traces' one."""

FOLDER = "executions"

SCHEDULING = "soapstone.scheduling"
"""Among a file's key-value metadata: a JSON list of each step's times, efficiency and potential, see `recorded_steps`
in `app.analytics.catalog`."""

DIGITS = 12


def recording_name(execution_id: int, strategy_digest: str) -> str:
    """Return the name of the file with the recorded steps of an execution."""
    return f"execution-{execution_id:06d}-{strategy_digest[:DIGITS]}.parquet"
