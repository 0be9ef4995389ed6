#!/usr/bin/env bash
# Bring .venv to one of the pinned sets, and install this checkout into it. A second time installs nothing.
#
#   scripts/setup.sh SET
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage="usage: scripts/setup.sh SET

Brings .venv to a pinned set and to this checkout. SET is one of these:

  cpu      for training on CPUs; scripts/quickstart.sh installs it
  rl-cpu   cpu with vLLM's build for CPUs and Ray, for the tutorial; scripts/rl/*_cpu.sh install it
  cpu-dev  rl-cpu with the tools of scripts/test.sh, which installs it
  gpu      cpu with Transformer Engine, for training on GPUs
  rl-gpu   gpu with vLLM and Ray; scripts/rl/*_gpu.sh and scripts/rl/gsm8k_qwen3.sh install it

A set keeps the packages that .venv already has. The exception is vLLM: .venv holds one build of it, for CPUs or for
GPUs, and the last set decides which. gpu and rl-gpu are built for CUDA 13 and need driver 580 or newer."

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
