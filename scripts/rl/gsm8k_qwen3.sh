#!/usr/bin/env bash
# GRPO on GSM8K with a Hugging Face model, Qwen3 or Nemotron-H for example, on the GPUs of one node: trainer and engine
# on the same ones, in turns. Started again with the same folder of runs, it goes on from its last checkpoint.
#
#   scripts/rl/gsm8k_qwen3.sh MODEL DATA [--nproc N] [--stage FOLDER] [flags of train_rl.py ...]
#   scripts/rl/gsm8k_qwen3.sh /models/Qwen3-4B /data/gsm8k/main
#   RUNS=runs/moe scripts/rl/gsm8k_qwen3.sh /models/Qwen3-30B-A3B /data/gsm8k/main --stage /local --lr 2e-6
#   scripts/rl/gsm8k_qwen3.sh /models/Qwen3-4B /data/gsm8k/main --dry-run   # the plan, with each rank's memory; anywhere
#
# DATA is a folder with train.jsonl or train-*.jsonl, and test likewise, or .parquet. PYTHON names a Python with the
# extra rl-gpu; without it the script sets up .venv.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

usage="usage: scripts/rl/gsm8k_qwen3.sh MODEL DATA [--nproc N] [--stage FOLDER] [flags of train_rl.py ...]

  MODEL            folder of a Hugging Face model
  DATA             folder with train.jsonl or train-*.jsonl and test likewise, or .parquet, of GSM8K
  --nproc N        GPUs (default: 8)
  --stage FOLDER   copy MODEL and DATA there first, a folder on this node's own disk
  --dry-run        print the plan with the memory of each rank, on any machine; this reads DATA, and of MODEL only
                   config.json and the tokenizer

Your flags follow those of scripts/configs/rl_gsm8k.toml and of scripts/rl/hf_model.py, and override them."
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    echo "$usage"
    exit 0
fi
if (($# < 2)) || [[ "$1" == -* || "$2" == -* ]]; then
    say "$usage"
    exit 2
fi
# Resolve paths before the current folder changes.
model="$(realpath -m "$1")"
data="$(realpath -m "$2")"
runs="$(realpath -m "${RUNS:-$ROOT/runs/gsm8k}")"
shift 2
nproc=8
stage=
plan=
flags=()
while (($#)); do
    case "$1" in
        --nproc | --stage)
            (($# >= 2)) || { say "$1 needs a value"; exit 2; }
            if [[ "$1" == --nproc ]]; then nproc="$2"; else stage="$(realpath -m "$2")"; fi
            shift
            ;;
        --dry-run) plan=1 ;;
        *) flags+=("$1") ;;
    esac
    shift
done
[[ "$nproc" =~ ^[1-9][0-9]*$ ]] || { say "--nproc $nproc: must be a whole number above 0"; exit 2; }
if [[ -z "${PYTHON:-}" ]]; then
    if [[ -n "$plan" ]]; then setup_venv cpu; else setup_venv rl-gpu; fi
    PYTHON="$VENV/bin/python"
fi
cd "$ROOT"
if [[ -n "$stage" && -z "$plan" ]]; then
    "$PYTHON" scripts/stage.py "$model" "$data" --to "$stage"
    model="$stage/$(basename "$model")"
    data="$stage/$(basename "$data")"
fi
# A failure in a process substitution would go unnoticed, so the output goes through a variable.
described="$("$PYTHON" scripts/rl/hf_model.py "$model" --ranks "$nproc" --engine-gpus "$nproc")"
mapfile -t layout <<<"$described"
run=(train_rl.py --config scripts/configs/rl_gsm8k.toml "${layout[@]}" --data-path "$data"
    --engine-placement colocated --save "$runs/checkpoints" --load "$runs/checkpoints" --run-dir "$runs"
    ${flags[@]+"${flags[@]}"})
if [[ -n "$plan" ]]; then
    exec "$PYTHON" "${run[@]}" --load-hf "" --device cuda --world-size "$nproc" --dry-run
fi
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec "$PYTHON" -m torch.distributed.run --standalone \
    --nproc-per-node "$nproc" "${run[@]}"
