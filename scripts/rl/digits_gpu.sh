#!/usr/bin/env bash
# Reinforcement learning of a vision-language model that fills a GPU: a supervised run on scans of numbers, most answers in
# words, then 20 steps of GRPO. Grids of encoder and language model share a GPU.
#
#   scripts/rl/digits_gpu.sh colocated [flags of train_rl.py ...]   # trainer and engine on one GPU, in turns
#   scripts/rl/digits_gpu.sh separate [flags of train_rl.py ...]    # on two
#   PYTHON=python3                                   # an environment with the extra rl-gpu; left out: .venv, set up
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

recipe_on_gpus digits_gpu rl_digits_gpu 1 "$@"
