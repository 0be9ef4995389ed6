#!/usr/bin/env bash
# Reinforcement learning of a small vision-language model on scans of handwritten numbers: a supervised run on answers
# most of which are in words, then GRPO with rewards for the right digits. Encoder and language model are a process each,
# the rollout engine a third. It takes minutes on 2 CPU cores and ends with the reward on held-out scans.
#
#   scripts/rl/digits_cpu.sh [flags of train_rl.py ...]
#   RUNS=folder scripts/rl/digits_cpu.sh       # elsewhere than in runs/digits_cpu
#   PYTHON=python3 scripts/rl/digits_cpu.sh    # an environment with the extra rl-cpu, instead of .venv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

prepare
recipe digits_cpu rl_digits 2 "$@"
