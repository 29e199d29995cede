#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment that every other target uses (pinned dependencies, protocol code and the two packages, editable)
# and the kernel library. Safe to run again at any time; with nothing changed it takes seconds.
#
#   PYTHON       interpreter; default: the first of python3, python3.12, python3.11, python3.13 whose version fits
#   VENV         where the environment goes; default: .venv
#   CEDAR_CUDA   the kernel library's CUDA bodies: auto (where nvcc is; default), on or off
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
CONSTRAINTS=requirements/constraints.txt
INSTALLED="$VENV/.cedar-installed"
CURRENT="start"

say() { printf '\033[1m[setup %4ds]\033[0m %s\n' "$SECONDS" "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
trap 'code=$?; [ $code -eq 0 ] || printf "setup: failed while: %s\n" "$CURRENT" >&2' EXIT
step() { CURRENT="$1"; say "$1"; }

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

pick_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
        return
    fi
    for candidate in python3 python3.12 python3.11 python3.13; do
        if fits "$candidate"; then PYTHON="$candidate"; return; fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found; install one, or name it: make setup PYTHON=/path/to/python3.12"
}

# What the installed packages depend on: when this is unchanged, pip has nothing to do.
digest() {
    { "$VENV/bin/python" -V; pwd; cat "$CONSTRAINTS" pyproject.toml setup.py client/pyproject.toml; } | sha256sum | cut -d' ' -f1
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }
# In a terminal pip shows its progress; in a log only errors are worth a line.
if [ -t 1 ]; then QUIET=(); else QUIET=(-qq); fi

if [ -x "$VENV/bin/python" ] && fits "$VENV/bin/python" && pip --version >/dev/null 2>&1; then
    say "virtual environment $VENV: $("$VENV/bin/python" -V), kept"
else
    pick_python
    step "virtual environment $VENV with $("$PYTHON" -V)"
    "$PYTHON" -m venv --clear "$VENV" || fail "python -m venv failed (Debian and Ubuntu keep it in the package python3-venv)"
fi

if [ "$(cat "$INSTALLED" 2>/dev/null)" = "$(digest)" ]; then
    say "packages: unchanged"
else
    step "build tools"
    pip install "${QUIET[@]}" --upgrade -c "$CONSTRAINTS" pip setuptools grpcio-tools mypy-protobuf
    step "packages: cedar-client, cedar-serving[serve,dev] and what they need (the longest step: PyTorch)"
    # The build tools above are pinned; isolated builds would fetch their own, unpinned and for every run.
    pip install "${QUIET[@]}" --no-build-isolation -c "$CONSTRAINTS" -e client -e ".[serve,dev]"
    pip check
    digest >"$INSTALLED"
fi

step "protocol code from protos/"
"$VENV/bin/python" scripts/build_protos.py

step "kernel library from backend/kernels"
"$VENV/bin/python" scripts/build_kernels.py

if ! "$VENV/bin/python" -c 'import ctypes, sysconfig; ctypes.CDLL(sysconfig.get_config_var("LIBDIR") + "/" + sysconfig.get_config_var("INSTSONAME"))' 2>/dev/null; then
    say "note: this Python has no shared libpython, which the bundled tritonserver needs; use a system tritonserver, or another Python"
fi
say "done"
