#!/usr/bin/env bash
# Reinforcement learning of a text mixture of experts that fills a GPU: a supervised run on sums, most of them one too
# many, then 20 steps of GRPO.
#
#   scripts/rl/arithmetic_gpu.sh colocated [flags of train_rl.py ...]   # trainer and engine on one GPU, in turns
#   scripts/rl/arithmetic_gpu.sh separate [flags of train_rl.py ...]    # on two
#   PYTHON=python3                                   # an environment with the extra rl-gpu; left out: .venv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

placement="${1:?usage: scripts/rl/arithmetic_gpu.sh colocated|separate [flags of train_rl.py ...]}"
case "$placement" in
    colocated | separate) shift ;;
    *)
        say "$placement: neither colocated nor separate"
        exit 2
        ;;
esac
PYTHON="${PYTHON:-$VENV/bin/python}"
cd "$ROOT"
runs="${RUNS:-runs/arithmetic_gpu}"
model=(--config scripts/configs/rl_arithmetic_gpu_model.toml)
supervised 1 "$runs" "${model[@]}" --config scripts/configs/rl_arithmetic_gpu_sft.toml
reinforce 1 "$runs" "${model[@]}" --config scripts/configs/rl_arithmetic_gpu.toml \
    --engine-placement "$placement" --run-dir "$runs/$placement" "$@"
