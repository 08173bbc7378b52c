#!/usr/bin/env bash
# Writes constraints.txt anew: the newest versions that pyproject.toml allows, torch apart, which stays as it is
# until it is changed by hand. Run the whole of .ci/run afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
grep '^torch==' constraints.txt >"$work/torch.txt"
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-input -c "$work/torch.txt" -e '.[dev]'
{
    echo '# Tested together, under Python 3.11: every package of `pip install -e .[dev]`. Written by scripts/lib/pin.sh.'
    # A local part, such as +cpu, names one build; users get the one that their index offers.
    "$work/venv/bin/python" -m pip freeze --all --exclude-editable --exclude pip | sed -E 's/\+[a-z0-9.]+$//'
} >"$work/constraints.txt"
mv "$work/constraints.txt" constraints.txt
