#!/usr/bin/env bash
# Reinforcement learning of a text mixture of experts at a size that fills a GPU: a short supervised run on generated
# sums, then 20 steps of GRPO. The environment is one with the extra rl-gpu.
#
#   scripts/rl/arithmetic_gpu.sh colocated   # trainer and engine on one GPU, in turns
#   scripts/rl/arithmetic_gpu.sh separate    # on two
#   ... [flags of train_rl.py]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

placement="${1:?usage: scripts/rl/arithmetic_gpu.sh colocated|separate [flags of train_rl.py]}"
shift
runs="${RUNS:-runs/arithmetic_gpu}"
model=(--config scripts/configs/rl_arithmetic_gpu_model.toml)

if [[ ! -e "$runs/checkpoints/latest_checkpointed_iteration.txt" ]]; then
    python -m torch.distributed.run --standalone --nproc-per-node 1 train_hetero.py "${model[@]}" \
        --config scripts/configs/rl_arithmetic_gpu_sft.toml --save "$runs/checkpoints" --run-dir "$runs/supervised"
fi
python -m torch.distributed.run --standalone --nproc-per-node 1 train_rl.py "${model[@]}" \
    --config scripts/configs/rl_arithmetic_gpu.toml --load "$runs/checkpoints" --finetune \
    --engine-placement "$placement" --run-dir "$runs/$placement" "$@"
