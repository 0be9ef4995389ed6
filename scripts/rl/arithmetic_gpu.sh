#!/usr/bin/env bash
# Reinforcement learning of a text mixture of experts that fills a GPU: a supervised run on sums, most of them one too
# many, then 20 steps of GRPO.
#
#   scripts/rl/arithmetic_gpu.sh colocated [flags of train_rl.py ...]   # trainer and engine on one GPU, in turns
#   scripts/rl/arithmetic_gpu.sh separate [flags of train_rl.py ...]    # on two
#   PYTHON=python3                                   # an environment with the extra rl-gpu; left out: .venv, set up
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

recipe_on_gpus arithmetic_gpu rl_arithmetic_gpu 1 "$@"
