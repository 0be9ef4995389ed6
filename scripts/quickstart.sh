#!/usr/bin/env bash
# From a fresh machine to a trained model: set up .venv, then train a small llava on handwritten digits with its
# encoder on two processes and its language model on two others.
#
#   scripts/quickstart.sh [--steps N] [flags of train_hetero.py ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage="usage: scripts/quickstart.sh [--steps N] [flags of train_hetero.py ...]"
run_dir=runs/quickstart
tensorboard_dir=
flags=()
while (($#)); do
    case "$1" in
        -h | --help)
            echo "$usage"
            exit 0
            ;;
        --steps | --run-dir | --tensorboard-dir)
            (($# >= 2)) || { say "$1 needs a value; $usage"; exit 2; }
            set -- "$1=$2" "${@:3}"
            continue
            ;;
        --steps=*)
            steps="${1#*=}"
            [[ "$steps" =~ ^[1-9][0-9]*$ ]] || { say "--steps $steps: must be a whole number above 0; $usage"; exit 2; }
            # A shorter run warms up shorter.
            flags+=(--train-iters "$steps" --lr-warmup-iters "$((steps / 20))")
            ;;
        --run-dir=*) run_dir="${1#*=}" ;;
        --tensorboard-dir=*) tensorboard_dir="${1#*=}" ;;
        *) flags+=("$1") ;;
    esac
    shift
done
tensorboard_dir="${tensorboard_dir:-$run_dir/tensorboard}"

setup_venv cpu
cd "$ROOT"
flags=(--config scripts/configs/quickstart.toml --run-dir "$run_dir" --tensorboard-dir "$tensorboard_dir"
    ${flags[@]+"${flags[@]}"})
# Flags that cannot be read end the script here, with one message. torchrun would add pages of its own.
"$VENV/bin/python" train_hetero.py "${flags[@]}" --print-config >/dev/null
say "Starting 4 training processes. Their first lines take about half a minute the first time, and later a few seconds."
# One thread per process, because four share the cores. Dynamo would compile the few fused functions of Megatron Core.
OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 "$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node 4 \
    train_hetero.py "${flags[@]}"

say "Writing the report."
"$VENV/bin/python" scripts/report.py "$run_dir" >/dev/null

absolute() { case "$1" in /*) echo "$1" ;; *) echo "$ROOT/$1" ;; esac; }
cat <<MESSAGE

report:       $(absolute "$run_dir")/report.html (open it in a browser: did it learn, how fast, which grid waited)
metrics:      $(absolute "$run_dir")/metrics.jsonl (one record an iteration)
TensorBoard:  $(absolute "$tensorboard_dir")
look at them: $VENV/bin/tensorboard --logdir $(absolute "$tensorboard_dir")
next:         docs/tutorial.md, after 'source .venv/bin/activate': your own images, rewards, export and serving
MESSAGE
