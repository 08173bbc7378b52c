"""`app` with few samples of operators and links, for processes that tests start: `python -m tests.app.brief_app`."""

from app.cli.main import command
from tests.app.conftest import brief_measurements

if __name__ == "__main__":
    with brief_measurements():
        command()
