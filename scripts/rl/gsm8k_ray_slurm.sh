#!/usr/bin/env bash
#SBATCH --job-name=gsm8k-grpo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --dependency=singleton
#SBATCH --signal=B:TERM@600
#SBATCH --output=%x-%j.out
#
# GRPO on GSM8K over several nodes: the trainer on the first ones, by torchrun; the engine's replicas on the others, by
# Ray, whose head is on the trainer's first node and offers none of its GPUs. With ENGINE_NODES=0, the
# replicas share the GPUs of all the trainer's nodes, and take turns with it.
#
#   sbatch --account=... --partition=... scripts/rl/gsm8k_ray_slurm.sh [flags of train_rl.py ...]
#   scripts/rl/gsm8k_ray_slurm.sh --dry-run    # the plan, with the memory of each rank; on any machine, without Slurm
#
# From the top of the checkout, after editing the paths. PYTHON is one with the extra rl-gpu (scripts/setup.sh rl-gpu).
# Flags after the script's name override its own, except that --train-iters, --save and --run-dir are refused: edit
# TRAIN_ITERS and RUN_DIR. --ckpt-step and --no-load-* need a --load of another folder than that of the job's
# checkpoints. The job goes back into the queue as those of scripts/sbatch do (README.md there), and continues from its
# last checkpoint.
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '/^#SBATCH/d;2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi

# ---- paths: edit these; all nodes have to see them under the same name -----------------------------------------------
PYTHON=/path/to/checkout/.venv/bin/python
MODEL=/path/to/models/Qwen3-30B-A3B
DATA=/path/to/data/gsm8k/main
RUN_DIR=/path/to/runs/gsm8k-grpo
# The trainer's nodes copy these to their own disk first, to STAGE_TO/NAME, where MODEL and DATA may then point; ()
# copies nothing. Engines read neither.
STAGE_FROM=()
STAGE_TO=/path/to/local-disk
# What the cluster wants of srun besides, such as --container-image=... --container-mounts=...
SRUN_FLAGS=()
# ----------------------------------------------------------------------------------------------------------------------

GPUS_PER_NODE=8
TRAINER_NODES=2
# 0: the engine has no nodes of its own
ENGINE_NODES=2
# Parallel sizes of the trainer and of an engine replica; 0 lets scripts/rl/hf_model.py choose. A replica of more GPUs
# than GPUS_PER_NODE spreads over several nodes.
LLM_TP=1
LLM_PP=1
LLM_EP=0
ENGINE_TP=0
ENGINE_PP=1
RAY_PORT=6379
RAY_TIMEOUT_S=600
# Also in FLAGS, and what the job is requeued by.
TRAIN_ITERS=200
# FLAGS has those behind the script's name.
# shellcheck disable=SC2034 # read by common.sh
TAKES_FLAGS=1

placement=ray
((ENGINE_NODES > 0)) || placement=colocated
sizes=(--ranks $((TRAINER_NODES * GPUS_PER_NODE))
    --engine-gpus $(((ENGINE_NODES > 0 ? ENGINE_NODES : TRAINER_NODES) * GPUS_PER_NODE))
    --gpus-per-node "$GPUS_PER_NODE" --tp "$LLM_TP" --pp "$LLM_PP" --ep "$LLM_EP" --engine-tp "$ENGINE_TP"
    --engine-pp "$ENGINE_PP")
if [[ " $* " == *" --dry-run "* ]]; then
    top="$(dirname "${BASH_SOURCE[0]}")/../.."
    # Slurm runs a copy of this file, which is in a folder of its own.
    [[ -f "$top/train_rl.py" ]] || top="${SLURM_SUBMIT_DIR:-$top}"
    described=$("$PYTHON" "$top/scripts/rl/hf_model.py" "$MODEL" "${sizes[@]}")
    mapfile -t layout <<<"$described"
    exec "$PYTHON" "$top/train_rl.py" --config "$top/scripts/configs/rl_gsm8k.toml" "${layout[@]}" \
        --load-hf "" --data-path "$DATA" --train-iters "$TRAIN_ITERS" --engine-placement "$placement" \
        --ray-address auto \
        --save "$RUN_DIR/checkpoints" --device cuda --world-size "${sizes[1]}" "$@"
fi

# shellcheck source=scripts/sbatch/common.sh
source "${SLURM_SUBMIT_DIR:?submit this file with sbatch, from the top of the checkout}/scripts/sbatch/common.sh"
refuse_flags --train-iters TRAIN_ITERS --save RUN_DIR --run-dir RUN_DIR -- "$@"
refuse_partial_loads "$@"
SITE_PATHS=(PYTHON MODEL DATA RUN_DIR)
require_set "${SITE_PATHS[@]}" GPUS_PER_NODE TRAINER_NODES ENGINE_NODES LLM_TP LLM_PP LLM_EP ENGINE_TP ENGINE_PP RAY_PORT TRAIN_ITERS
check_paths
[[ -x "$(dirname "$PYTHON")/ray" ]] || is_in_container ||
    die "PYTHON=$PYTHON: has no ray beside it; scripts/setup.sh rl-gpu sets it up"
((SLURM_JOB_NUM_NODES == TRAINER_NODES + ENGINE_NODES)) ||
    die "the job has $SLURM_JOB_NUM_NODES nodes, the script uses TRAINER_NODES $TRAINER_NODES + ENGINE_NODES \
$ENGINE_NODES: change #SBATCH --nodes"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=("${hosts[@]:0:TRAINER_NODES}")
engines=("${hosts[@]:TRAINER_NODES}")
logs="$RUN_DIR/logs/$SLURM_JOB_ID-attempt-$(printf %03d "$ATTEMPT")"
mkdir -p "$logs" "$RUN_DIR/checkpoints"
# Ray's nodes besides its head.
workers=("${engines[@]}")
((ENGINE_NODES > 0)) || workers=("${trainers[@]:1}")
say "attempt $ATTEMPT of job $SLURM_JOB_ID: trainer on ${trainers[*]}, engine on ${engines[*]:-the same}; logs in $logs"
say "from iteration $(saved_iterations) of $TRAIN_ITERS"
set_communication
export RAY_USAGE_STATS_ENABLED=0
# The trainer moves its state to host memory for an engine on its GPUs. Ray would end that engine if memory got scarce.
((ENGINE_NODES > 0)) || export RAY_memory_monitor_refresh_ms=0
# Whoever reaches Ray's port can run programs here: only those with this job's token may. It is said to all of Ray's
# processes, which would each decide by themselves whether there are tokens.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$logs/ray_token"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")

# Options of srun for a task on each of some nodes, beside other steps.
on_nodes() {
    local IFS=,
    step_flags=(--overlap --nodes="$#" --ntasks="$#" --ntasks-per-node=1 --nodelist="$*")
}

# SIGTERM is for the trainer's step alone: without Ray its ranks could not finish their iteration.
pass_stop_on() {
    local step=
    stopped=SIGTERM
    say "$(date +%FT%T) SIGTERM: the run has to save and end"
    # For a step that is just being started and has not noted its number.
    : >"$logs/stopped"
    if [[ -f "$logs/step" ]]; then read -r step <"$logs/step"; fi
    [[ -n "$step" ]] || return 0
    scancel --signal=TERM "$SLURM_JOB_ID.$step" || say "scancel failed: the step was not told to save"
}
trap pass_stop_on TERM

# The steps before the trainer; none of them where the job is told to end meanwhile.
on_nodes "${trainers[@]}"
stage_files "${step_flags[@]}"
code=0
describe_model() {
    srun --overlap --nodes=1 --ntasks=1 --nodelist="${trainers[0]}" "${SRUN_FLAGS[@]}" "$PYTHON" \
        "$ROOT/scripts/rl/hf_model.py" "$MODEL" "${sizes[@]}"
}
described="$(describe_model)" || code=$?
((code == 0)) || [[ -n "$stopped" ]] || die "no layout for MODEL=$MODEL"
mapfile -t layout <<<"$described"

# Colocated engines and one-step-off rollouts cannot replace an engine.
restarts=(--engine-restarts 3)
[[ "$placement" == ray && " $* " != *one-step-off* ]] || restarts=()
FLAGS=(
    --config "$ROOT/scripts/configs/rl_gsm8k.toml"
    "${layout[@]}"
    --data-path "$DATA"
    --train-iters "$TRAIN_ITERS"
    # A node without a working GPU is an error. By default it would train on its CPUs.
    --device cuda
    --engine-placement "$placement"
    "${restarts[@]}"
    --ray-address "${trainers[0]}:$RAY_PORT"
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    # 220 of the 240 minutes of --time; the rest is for the start and the last save
    --exit-duration-in-mins 220
    --run-dir "$RUN_DIR"
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --no-progress
    "$@"
)

if [[ -z "$stopped" ]]; then
    # The dry run checks all flags of train_rl.py. The preflight knows only those that train_hetero.py has, too.
    on_nodes "${trainers[0]}"
    run_step "${step_flags[@]}" "$PYTHON" "$ROOT/train_rl.py" "${FLAGS[@]}" --dry-run --world-size "${sizes[1]}" ||
        code=$?
    ((code == 0)) || [[ -n "$stopped" ]] || die "no plan for these flags, exit code $code; nothing was started"
fi
if [[ -z "$stopped" ]]; then
    # The preflight checks GPUs, paths and NCCL of the trainer's nodes.
    on_nodes "${trainers[@]}"
    export MASTER_ADDR="${trainers[0]}" MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) JOB_HOSTS="${trainers[*]}"
    run_step "${step_flags[@]}" "$PYTHON" "$ROOT/scripts/preflight.py" --gpus-per-node "$GPUS_PER_NODE" \
        --timeout-s "$PREFLIGHT_TIMEOUT_S" -- --dataset-provider mock --hf-config "$MODEL" --load-hf "$MODEL" \
        "${layout[@]:0:2}" --save "$RUN_DIR/checkpoints" --save-interval 20 --keep-last 2 \
        --train-iters "$TRAIN_ITERS" --run-dir "$RUN_DIR" || code=$?
    ((code == 0)) || [[ -n "$stopped" ]] || die "preflight failed with exit code $code; nothing was started"
fi
if [[ -z "$stopped" ]]; then
    # A node gives Ray's own processes 15 s to come up; where Python is slow to start they miss it, and find its files
    # in memory the next time. These steps end with the job.
    # shellcheck disable=SC2016 # expanded on the node
    ray=("$BASH" -c 'for attempt in 1 2 3; do "$@" && exit 0; ((SECONDS < 300)) || exit 1; done; exit 1' ray
        "$(dirname "$PYTHON")/ray" start --block)
    # Ray's sockets have long names: a short folder, and one of this job's own.
    on_nodes "${trainers[0]}"
    srun "${step_flags[@]}" --cpu-bind=none --output="$logs/ray-%N.log" "${SRUN_FLAGS[@]}" "${ray[@]}" --head \
        --port "$RAY_PORT" --num-cpus 0 --num-gpus 0 --include-dashboard false --temp-dir "/tmp/ray-$SLURM_JOB_ID" &
    # The trainer's GPUs are not Ray's to give.
    num_gpus=$((ENGINE_NODES > 0 ? GPUS_PER_NODE : 0))
    if ((${#workers[@]})); then
        on_nodes "${workers[@]}"
        srun "${step_flags[@]}" --cpu-bind=none --output="$logs/ray-%N.log" "${SRUN_FLAGS[@]}" "${ray[@]}" \
            --address "${trainers[0]}:$RAY_PORT" --num-gpus "$num_gpus" &
    fi
    on_nodes "${trainers[0]}"
    run_step "${step_flags[@]}" "$PYTHON" "$ROOT/scripts/rl/wait_for_ray.py" "${trainers[0]}:$RAY_PORT" \
        --gpus $((ENGINE_NODES * GPUS_PER_NODE)) --nodes $((${#workers[@]} + 1)) --timeout-s "$RAY_TIMEOUT_S" || code=$?
    ((code == 0)) || [[ -n "$stopped" ]] || die "Ray did not come up; see $logs/ray-*.log"
fi
if [[ -n "$stopped" ]]; then
    requeue "$stopped"
    exit 0
fi
on_nodes "${trainers[@]}"
# The first task notes which step this is, so that it alone can be told to stop.
# shellcheck disable=SC2016 # expanded on the node
run_step "${step_flags[@]}" --output="$logs/%N.log" "$BASH" -c \
    '[[ "$SLURM_NODEID" != 0 ]] || echo "$SLURM_STEP_ID" >"$1"; shift; exec "$@"' \
    bash "$logs/step" "$ROOT/scripts/sbatch/node.sh" "$logs/stopped" "$PYTHON" -m torch.distributed.run --nnodes "$TRAINER_NODES" \
    --nproc-per-node "$GPUS_PER_NODE" --master-addr "${trainers[0]}" --master-port "$MASTER_PORT" \
    --shutdown-timeout "$SHUTDOWN_TIMEOUT_S" "$ROOT/train_rl.py" "${FLAGS[@]}" || code=$?
conclude "$code" "$logs"
