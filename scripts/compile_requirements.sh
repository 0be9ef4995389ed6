#!/usr/bin/env bash
# Compile scripts/requirements/*.txt from pyproject.toml. Pins that still fit stay; --upgrade takes the newest,
# --upgrade-package NAME one of them. The files hold names and versions only, so any index or mirror serves them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$ROOT"
ensure_venv
ensure_uv

compile() {
    local name="$1"
    shift
    "$VENV/bin/uv" pip compile --quiet pyproject.toml --universal --python-version "$(<.python-version)" \
        --no-emit-index-url --no-emit-find-links --custom-compile-command ./scripts/compile_requirements.sh \
        --output-file "scripts/requirements/$name.txt" "$@" >/dev/null
    say "scripts/requirements/$name.txt"
}

compile cpu-dev --extra cpu --extra dev "$@"
# Pins of the file that is there are kept, so the smaller set starts from the larger one and agrees with it.
cp scripts/requirements/cpu-dev.txt scripts/requirements/cpu.txt
compile cpu --extra cpu
[[ -f scripts/requirements/gpu.txt ]] || cp scripts/requirements/cpu.txt scripts/requirements/gpu.txt
compile gpu --extra gpu "$@"
