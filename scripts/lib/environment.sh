# Makes the project's environment, .venv, where it is absent or out of date. Sourced by every script.
#
# Sets `root` (the project's folder) and changes into it. A second start compares one stamp and goes on.
# The stamp is written last, so an interrupted installation is done again; a lock makes two starts at once
# wait for each other. Needs Python >= 3.11, pip and git, nothing else.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
cd "$root" || exit 1

environment_error() {
    echo "error: $*" >&2
    exit 1
}

# All that the environment depends on: the hash of the requirements, and the folder that its commands are written for.
environment_stamp() {
    echo "$(cat pyproject.toml constraints.txt | git hash-object --stdin) $root"
}

environment_is_current() {
    [[ -f .venv/soapstone-stamp && -x .venv/bin/python && -x .venv/bin/app ]] \
        && [[ "$(<.venv/soapstone-stamp)" == "$(environment_stamp)" ]]
}

# Fails where nothing in .venv can be trusted: an installation was cut short, its Python or pip is gone, or
# the project was moved, and with it commands whose first lines name the old folder.
environment_is_usable() {
    [[ ! -e .venv/soapstone-installing ]] && .venv/bin/python -m pip --version >/dev/null 2>&1 \
        && [[ ! -f .venv/soapstone-stamp || "$(<.venv/soapstone-stamp)" == *" $root" ]]
}

# Prints the first Python on PATH that is new enough and has pip; PYTHON names another one.
environment_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

# Some distributions ship Python without ensurepip: there, pip from outside puts pip into the environment.
environment_create() {
    if "$1" -c 'import ensurepip' >/dev/null 2>&1; then
        "$1" -m venv .venv
    else
        "$1" -m venv --without-pip .venv && "$1" -m pip --python .venv/bin/python install --no-input pip
    fi
}

# Compiles what was installed: on all cores, where pip takes one, and without the half of the files that hardly any
# command imports. Those Python compiles when it does; so it does with a file that fails here.
environment_compile() {
    .venv/bin/python -m compileall -q -j 0 -x '/(tests|plotly|pip|transformers/models)/' \
        .venv/lib/python*/site-packages || true
}

environment_install() {
    local python="$1" log="$root/.venv-install.log"
    if environment_is_usable; then
        echo "soapstone: bringing the environment in .venv up to date" >&2
    else
        echo "soapstone: installing the environment into .venv (about 1.5 GB with torch, a minute or more)" >&2
        rm -rf .venv
    fi
    mkdir -p .venv && rm -f .venv/soapstone-stamp && touch .venv/soapstone-installing
    if [[ ! -e .venv/bin/python ]] && ! environment_create "$python" >"$log" 2>&1; then
        environment_error ".venv: $python cannot make a virtual environment; see .venv-install.log"
    fi
    if ! .venv/bin/python -m pip install --no-input --disable-pip-version-check --no-compile \
        -c constraints.txt -e '.[dev]' >"$log" 2>&1; then
        rm -f .venv/soapstone-installing # pip ended in order, and took back what it had changed
        environment_error ".venv: pip could not install: $(grep -m 1 '^ERROR' "$log" || echo 'no reason given');" \
            "see .venv-install.log"
    fi
    rm -f .venv/soapstone-installing
    environment_compile >>"$log" 2>&1
    environment_stamp >.venv/soapstone-stamp.new
    mv .venv/soapstone-stamp.new .venv/soapstone-stamp
}

environment_ensure() {
    local python
    command -v git >/dev/null || environment_error "git: not on PATH; install it"
    environment_is_current && return
    PATH="${PATH//"$root/.venv/bin:"/}" # where .venv is activated, it must not be made with its own Python
    python="$(environment_python)" \
        || environment_error "python: none on PATH is 3.11 or newer and has pip; install one, or name it in PYTHON"
    # The lock belongs to the open file, so it outlives the Python that takes it, and ends with file 9.
    exec 9>.venv.lock
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' \
        || environment_error ".venv.lock: cannot be locked; is the project on a file system without locks?"
    # pip may answer an interrupt as an error of its own: end here, with the mark of the interruption in place.
    trap 'exit 130' INT
    trap 'exit 143' TERM
    environment_is_current || environment_install "$python"
    trap - INT TERM
    exec 9>&-
}

environment_ensure
