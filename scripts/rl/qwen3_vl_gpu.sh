#!/usr/bin/env bash
# GRPO of a model with the shapes of Qwen3-VL-8B on the GPUs of one node: trainer and engine on the same ones, in turns.
# Without a model's folder its weights are random: the run shows what an iteration costs, and that refits are verified.
#
#   scripts/rl/qwen3_vl_gpu.sh [--nproc N] [flags of train_rl.py ...]
#   scripts/rl/qwen3_vl_gpu.sh --dry-run                                # the plan, with each rank's memory; on any machine
#   scripts/rl/qwen3_vl_gpu.sh --nproc 1 --num-layers 18                # half of the decoder on one GPU
#   scripts/rl/qwen3_vl_gpu.sh --hf-config /models/Qwen3-VL-8B-Instruct --load-hf /models/Qwen3-VL-8B-Instruct
#   RUNS=folder, PYTHON=python3                                         # as for the other scripts of this folder
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

nproc=8
plan=
flags=()
while (($#)); do
    case "$1" in
        --nproc)
            (($# >= 2)) || { say "--nproc needs a value"; exit 2; }
            nproc="$2"
            shift
            ;;
        --dry-run) plan=1 ;;
        *) flags+=("$1") ;;
    esac
    shift
done
[[ "$nproc" =~ ^[1-9][0-9]*$ ]] || { say "--nproc $nproc: must be a whole number above 0"; exit 2; }
run=(--config scripts/configs/rl_qwen3_vl_gpu.toml --encoder-dp "$nproc" --llm-dp "$nproc" --engine-dp "$nproc"
    --run-dir "${RUNS:-runs/qwen3_vl_gpu}" ${flags[@]+"${flags[@]}"})
if [[ -n "$plan" ]]; then
    if [[ -z "${PYTHON:-}" ]]; then
        setup_venv cpu
        PYTHON="$VENV/bin/python"
    fi
    cd "$ROOT"
    exec "$PYTHON" train_rl.py "${run[@]}" --dry-run --world-size "$nproc"
fi
choose_python rl-gpu vllm
cd "$ROOT"
# Encoder windows with pipeline stages need 32.
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
launch "$nproc" train_rl.py "${run[@]}"
