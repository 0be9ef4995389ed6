#!/usr/bin/env bash
# Bring .venv to one of the pinned sets, and install this checkout into it. A second time installs nothing.
#
#   scripts/setup.sh SET
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage="usage: scripts/setup.sh SET

Brings .venv to a pinned set and to this checkout. SET is one of these:

  cpu      training on CPUs, and scripts/quickstart.sh, which installs it
  rl-cpu   with it vLLM's build for CPUs, and Ray; installed by scripts/rl/*_cpu.sh
  cpu-dev  with these what scripts/test.sh runs; installed by it
  gpu      cpu and Transformer Engine: training on GPUs
  rl-gpu   with it vLLM and Ray; installed by scripts/rl/*_gpu.sh and scripts/rl/gsm8k_qwen3.sh

Sets add to what .venv has. vLLM is there in one build, the one of the set that was asked for last. gpu and rl-gpu are
for CUDA 13 and need a driver for it."

sets=()
for file in "$ROOT"/scripts/requirements/*.txt; do
    file="${file##*/}"
    sets+=("${file%.txt}")
done
if (($# == 1)) && [[ "$1" == -h || "$1" == --help ]]; then
    echo "$usage"
    exit 0
fi
if (($# != 1)); then
    say "$usage"
    exit 2
fi
if [[ ! -f "$(requirements_of "$1")" || "$1" == */* ]]; then
    say "there is no set $1; sets: ${sets[*]}"
    exit 2
fi
setup_venv "$1"
