#!/usr/bin/env bash
# Set up .venv with the development set, then run ruff, mypy, import-linter and the CPU tests. The first failure ends the
# script. The last line is pytest's.
#
# The tests run in two processes (with -n 0, in one). Tests of several ranks start more.
#
#   scripts/test.sh [--slow] [pytest arguments ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
answer_help "$@"

marks="not slow and not gpu"
limit_s=2400
if [[ "${1:-}" == --slow ]]; then
    shift
    marks="not gpu"
    limit_s=10800
fi

setup_venv cpu-dev
cd "$ROOT"
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1

say "ruff check"
"$VENV/bin/python" -m ruff check --quiet
say "mypy"
"$VENV/bin/python" -m mypy --no-error-summary
say "lint-imports"
"$VENV/bin/lint-imports" >/dev/null || { "$VENV/bin/lint-imports"; exit 1; }
exec "$VENV/bin/python" -m pytest -m "$marks" -n 2 --dist worksteal --session-timeout "$limit_s" --durations=25 "$@"
