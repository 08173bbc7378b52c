"""What an import of the search costs."""

import subprocess
import sys


def test_numba_is_imported_only_when_something_is_simulated() -> None:
    script = (
        "import sys, search.algorithms.mcmc, search.simulate.simulator, search.cost.calls_to_profile; "
        "import search.space.baselines; "
        "print([name for name in ('numba', 'torch') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
