#!/usr/bin/env bash
# Builds the wheel, installs it alone into a fresh environment, and uses it from a folder whose own `runtime`
# package must not be taken for ours.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

echo "== wheel: build"
# From a copy: a build folder left in the project could lend the wheel modules that are gone.
mkdir "$work/source"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$work/source"
"$root/.venv/bin/python" -m pip wheel --quiet --no-deps --no-input --wheel-dir "$work/dist" "$work/source"
wheel=("$work"/dist/soapstone-*.whl)

echo "== wheel: install $(basename "${wheel[0]}") into a fresh environment"
"$root/.venv/bin/python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
    --no-compile -c constraints.txt "${wheel[0]}"

elsewhere="$work/elsewhere"
mkdir -p "$elsewhere/runtime"
cat >"$elsewhere/runtime/__init__.py" <<'PYTHON'
raise ImportError("this runtime package belongs to the user's folder, and must never be imported")
PYTHON
cd "$elsewhere"
export SOAPSTONE_DATABASE_URL="sqlite:///$elsewhere/wheel.sqlite" OMP_NUM_THREADS=1
# What a command imports is compiled once, by the first that does.
unset PYTHONPATH PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE

app() {
    echo "== wheel: app $*"
    "$work/venv/bin/app" "$@"
}

app --help >/dev/null
app db upgrade
mlp=(--device cpu --devices 2 --model mlp --preset small --batch-size 8)
app profile "${mlp[@]}"
app search "${mlp[@]}" --topology local --seed 0
app run "${mlp[@]}" --strategy data-parallel --verify
app run "${mlp[@]}" --strategy best
app compare --model mlp-small
echo "wheel test: passed"
