#!/usr/bin/env bash
# Train a model of any provider on mock data for a few iterations on this host, to see whether the layout runs, how fast,
# and in how much memory.
#
#   scripts/run_hetero_mock.sh [--nproc N] [flags of train_hetero.py ...]
#   scripts/run_hetero_mock.sh --model-provider nemotron-moe-vlm-20l --seq-length 4096
#   scripts/run_hetero_mock.sh --nproc 4 --device cpu --no-bf16 --model-provider mock
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage="usage: scripts/run_hetero_mock.sh [--nproc N] [flags of train_hetero.py ...]

Trains 10 iterations on mock data, with N processes on this host (default: 8), one for each GPU. Half of them hold the
encoder, data parallel. The other half holds the language model: tensor parallel 2 with sequence parallelism if that half
has an even size, and data parallel otherwise. Experts are split over the whole half. With 8 processes the flags are

  --encoder-dp 4 --llm-tp 2 --llm-dp 2 --sequence-parallel, and --llm-ep 4 for a mixture of experts

A text model takes all processes, and with --layout colocated or homogeneous both modules do. The flags are printed
before the start; those of the trainer given here follow and override them. A model's flags:
  python train_hetero.py --model-provider NAME --help all"
nproc=8
dry_run=
flags=()
while (($#)); do
    case "$1" in
        -h | --help)
            echo "$usage"
            exit 0
            ;;
        --nproc)
            (($# >= 2)) || { say "--nproc needs a value"; exit 2; }
            set -- "--nproc=$2" "${@:3}"
            continue
            ;;
        --nproc=*) nproc="${1#*=}" ;;
        --dry-run)
            dry_run=1
            flags+=("$1")
            ;;
        *) flags+=("$1") ;;
    esac
    shift
done
if [[ ! "$nproc" =~ ^[1-9][0-9]*$ ]]; then
    say "--nproc $nproc: must be a whole number above 0"
    exit 2
fi

setup_venv cpu
cd "$ROOT"

# The layout depends on the model: whether it has an encoder, and experts.
mapfile -t layout < <("$VENV/bin/python" - "$nproc" --dataset-provider mock ${flags[@]+"${flags[@]}"} <<'PYTHON'
import math
import os
import sys

sys.path.insert(0, os.getcwd())

from mimo import registry
from mimo.config.cli import parse

try:
    config = parse(sys.argv[2:])
    model = registry.model_provider(config.model.model_provider)
    text_only = config.layout.llm_only or not model.encoders(config.model_family)
    num_experts = model.num_experts(config.model_family) or 0
except ValueError as error:
    sys.exit(f"error: {error}")
ranks = int(sys.argv[1])
if not text_only and config.layout.layout == "disjoint":
    if ranks % 2:
        sys.exit(f"error: --nproc {ranks}: must be even; one half is for the encoder and one for the language model")
    ranks //= 2
tp = 1 if ranks % 2 else 2
flags = ["--llm-tp", tp, "--llm-dp", ranks // tp]
micro_batch_size = 1
if not text_only and config.layout.layout != "homogeneous":
    flags += ["--encoder-dp", ranks]
    micro_batch_size = tp  # each encoder rank has a sample of its lane
if tp > 1:
    flags.append("--sequence-parallel")
if num_experts:
    flags += ["--llm-ep", math.gcd(num_experts, ranks)]
flags += ["--micro-batch-size", micro_batch_size, "--global-batch-size", 2 * micro_batch_size * ranks // tp]
print(*flags, sep="\n")
PYTHON
)
# The program has printed its error already.
((${#layout[@]})) || exit 2
command=(train_hetero.py "${layout[@]}" --dataset-provider mock --seq-length 2048 --train-iters 10
    --run-dir runs/hetero_mock ${flags[@]+"${flags[@]}"})
say "${command[*]}"
# A dry run needs no processes.
[[ -z "$dry_run" ]] || exec "$VENV/bin/python" "${command[@]}" --world-size "$nproc"
# One thread per process, because they share the cores.
OMP_NUM_THREADS=1 exec "$VENV/bin/python" -m torch.distributed.run --standalone --nproc-per-node "$nproc" \
    "${command[@]}"
