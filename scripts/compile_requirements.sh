#!/usr/bin/env bash
# Compile scripts/requirements/*.txt from pyproject.toml. Pins that still fit stay; --upgrade takes the newest,
# --upgrade-package NAME one of them. The files hold names and versions only, so any index or mirror serves them.
#
#   scripts/compile_requirements.sh [--upgrade] [--upgrade-package NAME]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
answer_help "$@"
cd "$ROOT"
ensure_venv
ensure_uv

# A set takes its pins from another one, where both have a package. `uv pip tree --invert --package NAME` says why a
# package is installed.
compile() {
    local file="scripts/requirements/$1.txt" pins="$2"
    shift 2
    "$VENV/bin/uv" pip compile --quiet pyproject.toml --universal --python-version "$(<.python-version)" \
        --no-annotate --no-emit-index-url --no-emit-find-links \
        --custom-compile-command ./scripts/compile_requirements.sh \
        --output-file "$file" ${pins:+--constraint "scripts/requirements/$pins.txt"} "$@" >/dev/null
    say "$file"
}

compile cpu-dev "" --extra cpu --extra rl-cpu --extra dev "$@"
compile rl-cpu cpu-dev --extra cpu --extra rl-cpu
compile cpu rl-cpu --extra cpu
# vLLM's two builds pin packages of their own differently: these agree with the training set alone.
compile rl-gpu cpu --extra gpu --extra rl-gpu "$@"
compile gpu rl-gpu --extra gpu
