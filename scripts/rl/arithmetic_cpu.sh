#!/usr/bin/env bash
# Reinforcement learning of a small mixture of experts on sums: a supervised run on answers most of which are one too
# many, then GRPO with rewards for the right ones. It takes minutes on 2 CPU cores and ends with the reward on held-out
# sums.
#
#   scripts/rl/arithmetic_cpu.sh [flags of train_rl.py ...]
#   RUNS=folder scripts/rl/arithmetic_cpu.sh       # elsewhere than in runs/arithmetic_cpu
#   PYTHON=python3 scripts/rl/arithmetic_cpu.sh    # an environment with the extra rl-cpu, instead of .venv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare
recipe arithmetic_cpu rl_arithmetic 1 "$@"
