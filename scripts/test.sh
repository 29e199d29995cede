#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every test that needs no GPU, in two phases: the fast ones first, so that a simple mistake shows in a minute, then the slow ones.
# Arguments go to pytest; with a marker expression of the caller's own (-m) there is one phase. The exit status is pytest's.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTEST=("${VENV:-.venv}/bin/python" -m pytest)
NO_TESTS=5

for argument in "$@"; do
    if [ "$argument" = "-m" ]; then exec "${PYTEST[@]}" "$@"; fi
done

status=$NO_TESTS
for phase in "not slow and not gpu" "slow and not gpu"; do
    echo "== tests: $phase"
    "${PYTEST[@]}" -m "$phase" "$@"
    code=$?
    # A selection by path may leave one phase empty; both empty is an error.
    if [ $code -ne 0 ] && [ $code -ne $NO_TESTS ]; then exit $code; fi
    if [ $code -eq 0 ]; then status=0; fi
done
exit $status
