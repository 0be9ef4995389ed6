# shellcheck shell=bash
# Functions of all jobs: arithmetic, checks, launching, stopping, requeueing. A script sets its values, sources this file
# and calls launch_training with the trainer's flags. This file holds no value of a run.
#
# It is sourced from the folder where sbatch was called, the top of the checkout, because Slurm runs a copy of the script
# elsewhere.
#
# shellcheck disable=SC2153 # the script that sources this file sets these variables

ROOT="$SLURM_SUBMIT_DIR"
# Paths that the user has to edit, and values that a script has to set.
SITE_PATHS=(PYTHON DATA_PATH TOKENIZER NEMOTRON_CHECKPOINT RUN_DIR)
VALUES=(GPUS_PER_NODE ENCODER_NODES LLM_NODES ENCODER_TP LLM_TP GBS MBS TRAIN_SAMPLES)
# Seconds that torchrun leaves the ranks to save after SIGTERM. --signal of a script leaves 30 s more.
SHUTDOWN_TIMEOUT_S=570
# Seconds for the nodes to appear, while hundreds of processes read Python and torch from one file system.
PREFLIGHT_TIMEOUT_S=300
# A run that is requeued more often than this has another problem.
MAX_REQUEUES=200
# Folders and files that every node copies to STAGE_TO on its own disk. A script that copies nothing sets neither.
[[ -v STAGE_FROM ]] || STAGE_FROM=()
[[ -v STAGE_TO ]] || STAGE_TO=
# File into which preflight.py --dry-run wants the command. A job has none.
PRINT_COMMAND="${PRINT_COMMAND:-}"
# Slurm does not set it in the first attempt.
ATTEMPT="${SLURM_RESTART_COUNT:-0}"
stopped=

say() { printf '%s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Only a script with TAKES_FLAGS=1 passes on the words after its name.
[[ -v TAKES_FLAGS ]] || (($# == 0)) || die "$*: this script takes no flags; edit those in it"

# Refuse flags that decide about requeueing and that a variable of the script sets. The arguments are pairs of flag and
# variable, then --, then the words that the user gave.
refuse_flags() {
    local -A variables=()
    local word flag
    while [[ "$1" != -- ]]; do
        variables[$1]="$2"
        shift 2
    done
    for word in "${@:2}"; do
        # The trainer reads --train_iters as --train-iters, too.
        flag="${word%%=*}"
        flag="${flag//_/-}"
        [[ -z "$flag" || -z "${variables[$flag]:-}" ]] ||
            die "$flag: the script needs this value to requeue the job; edit ${variables[$flag]} in it instead"
    done
}

# Refuse words that take an earlier checkpoint or only a part of one. The job loads what it has saved, so every attempt
# would do that again. With a --load of the user's own, only the first attempt does. As in the trainer, that is neither
# the folder of the job's checkpoints nor one of them.
refuse_partial_loads() {
    local word flag found='' load='' takes_load='' own name
    for word in "$@"; do
        if [[ -n "$takes_load" ]]; then
            load="$word" takes_load=''
            continue
        fi
        flag="${word%%=*}"
        flag="${flag//_/-}"
        case "$flag" in
            --load) if [[ "$word" == *=* ]]; then load="${word#*=}"; else takes_load=1; fi ;;
            --ckpt-step | --no-load-optim | --no-load-scheduler | --no-load-rng | --no-load-data) found="$flag" ;;
        esac
    done
    if [[ -n "$load" ]]; then
        own="$(realpath -m -- "$RUN_DIR/checkpoints")"
        load="$(realpath -m -- "$load")"
        name="${load##*/}"
        if [[ "${load%/*}" == "$own" && ("$name" == iter_* || "$name" == release) ]]; then
            found="--load $load"
        elif [[ "$load" != "$own" ]]; then
            return 0
        fi
    fi
    [[ -z "$found" ]] || die "$found: every attempt of the job would do this again; use a --load of another folder than \
$RUN_DIR/checkpoints, or write the iteration into $RUN_DIR/checkpoints/latest_checkpointed_iteration.txt"
}

# Refuse variables that are not set, or empty.
require_set() {
    local name
    for name in "$@"; do
        [[ -n "${!name+set}" && -n "${!name}" ]] || die "$name is not set; set it in the script"
    done
}

# Set quotient to $1 / $2, which must be a whole number. $3 describes it for the error.
divide() {
    (($1 % $2 == 0)) || die "$3: $1 is not divisible by $2"
    quotient=$(($1 / $2))
}

# Derive layout, data-parallel sizes and microbatches from the values of a run, and print them.
derive_sizes() {
    local quotient
    require_set "${SITE_PATHS[@]}" "${VALUES[@]}"
    divide $((LLM_NODES * GPUS_PER_NODE)) "$LLM_TP" \
        "LLM_DP = LLM_NODES $LLM_NODES * GPUS_PER_NODE $GPUS_PER_NODE / LLM_TP $LLM_TP"
    LLM_DP=$quotient
    # shellcheck disable=SC2034 # read by the script
    if ((ENCODER_NODES > 0)); then
        LAYOUT=disjoint
        divide $((ENCODER_NODES * GPUS_PER_NODE)) "$ENCODER_TP" \
            "ENCODER_DP = ENCODER_NODES $ENCODER_NODES * GPUS_PER_NODE $GPUS_PER_NODE / ENCODER_TP $ENCODER_TP"
        ENCODER_DP=$quotient
    else
        # Homogeneous: both modules are on the same nodes in the same grid.
        LAYOUT=colocated ENCODER_TP=$LLM_TP ENCODER_DP=$LLM_DP
    fi
    divide "$GBS" $((MBS * LLM_DP)) "NUM_MICROBATCHES = GBS $GBS / (MBS $MBS * LLM_DP $LLM_DP)"
    NUM_MICROBATCHES=$quotient
    NUM_NODES=$((ENCODER_NODES + LLM_NODES))
    TRAIN_ITERS=$(((TRAIN_SAMPLES + GBS - 1) / GBS))
    say "nodes:            $NUM_NODES = $ENCODER_NODES encoder + $LLM_NODES language, $GPUS_PER_NODE GPUs each"
    say "ENCODER_DP:       $ENCODER_DP (TP $ENCODER_TP)"
    say "LLM_DP:           $LLM_DP (TP $LLM_TP)"
    say "NUM_MICROBATCHES: $NUM_MICROBATCHES = GBS $GBS / (MBS $MBS * LLM_DP $LLM_DP)"
    say "iterations:       $TRAIN_ITERS of $GBS samples"
}

# Check that the paths have been edited and exist. Slurm's nodes see the same ones; preflight.py checks on each of them.
check_paths() {
    local name
    for name in "${SITE_PATHS[@]}"; do
        [[ "${!name}" == /* ]] || die "$name=${!name}: must be an absolute path"
        [[ "${!name}" != /path/to/* ]] || die "$name=${!name}: edit this path"
        [[ "$name" == RUN_DIR || -e "${!name}" ]] || is_staged "${!name}" || is_in_container ||
            die "$name=${!name}: there is no such file or folder"
    done
    [[ -x "$PYTHON" ]] || is_in_container || die "PYTHON=$PYTHON: is not a program"
}

# Whether steps run in a container, whose paths this host does not have.
is_in_container() { [[ " ${SRUN_FLAGS[*]}" == *" --container-"* ]]; }

# Whether the nodes get a path from STAGE_FROM.
is_staged() {
    local source
    for source in "${STAGE_FROM[@]}"; do
        source="${source%/}"
        # The name of a copy from the Hugging Face Hub has no @revision.
        [[ "$source" != hf://* ]] || source="${source%@*}"
        if [[ "$1/" == "${STAGE_TO%/}/${source##*/}"/* ]]; then return 0; fi
    done
    return 1
}

# Copy STAGE_FROM to STAGE_TO on the nodes of a step, once per node. Files that are there already are not copied again.
# The arguments are further options of srun.
stage_files() {
    local code=0
    ((${#STAGE_FROM[@]})) || return 0
    require_set STAGE_TO
    [[ "$STAGE_TO" == /* && "$STAGE_TO" != /path/to/* ]] ||
        die "STAGE_TO=$STAGE_TO: must be a folder on every node's own disk"
    run_step "$@" "$PYTHON" "$ROOT/scripts/stage.py" "${STAGE_FROM[@]}" --to "$STAGE_TO" || code=$?
    if ((code != 0)) && [[ -z "$stopped" ]]; then
        die "staging to $STAGE_TO failed with exit code $code; nothing was started"
    fi
}

# Set variables for NCCL and the libraries around it, which are the same in every run.
set_communication() {
    # Steps get these variables also in a job that was submitted with --export=NONE.
    export SLURM_EXPORT_ENV=ALL
    # Warnings name the peer and the device of a failed connection. INFO would print megabytes on every node.
    export NCCL_DEBUG=WARN
    # Kernels of one stream start in the order in which they were issued, as Megatron's overlap of tensor-parallel
    # communication with computation expects on GPUs before Blackwell. --encoder-run-ahead and
    # encoder windows with pipeline stages need more: set 32 before.
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
    # If a peer is gone, end the process instead of waiting in a collective that cannot finish.
    export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
    # Eight ranks and their data workers share a node's cores.
    export OMP_NUM_THREADS=1
    # Variables of a cluster (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...) are set by its administrators, or in SRUN_FLAGS.
}

# Handle SIGTERM, which comes before the time limit (--signal) or before a preemption. A signal to srun would end the
# ranks at once, so it goes to the step, where scripts/sbatch/node.sh passes it to torchrun.
pass_stop_on() {
    stopped=SIGTERM
    say "$(date +%FT%T) SIGTERM: the run has to save and end"
    # For nodes that are just being started and do not get the signal.
    : >"$logs/stopped"
    scancel --signal=TERM "$SLURM_JOB_ID" || say "scancel failed: the step was not told to save"
}

# Run a step in the background, so that SIGTERM is handled meanwhile, and return its exit code.
run_step() {
    local step code last=0
    srun --kill-on-bad-exit=1 --cpu-bind=none "${SRUN_FLAGS[@]}" "$@" &
    step=$!
    while true; do
        code=0
        wait "$step" || code=$?
        # wait also returns when a signal comes.
        kill -0 "$step" 2>/dev/null || break
    done
    # A step that ended while the signal was handled has another exit code, which the next wait returns.
    wait "$step" 2>/dev/null || last=$?
    ((last == 127)) || code=$last
    return "$code"
}

# Print the iteration of the newest checkpoint; 0 before the first.
saved_iterations() {
    local tracker="$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt" saved=0
    # The file has no newline at its end, so read reports a failure.
    if [[ -f "$tracker" ]]; then read -r saved <"$tracker" || true; fi
    [[ "$saved" =~ ^[0-9]+$ ]] || saved=0
    say "$saved"
}

# Run a command of Slurm, and again if it fails: the controller of a busy cluster does not always answer.
insist() {
    local pause
    for pause in 2 10 30; do
        if "$@"; then return 0; fi
        sleep "$pause"
    done
    "$@"
}

# Put the job back into the queue. A cancelled job is no longer RUNNING, and Slurm itself requeues a preempted one.
requeue() {
    local state
    state="$(insist squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)"
    if [[ "$state" != RUNNING ]]; then
        say "not requeued from here: the job is $state"
    elif ((ATTEMPT >= MAX_REQUEUES)); then
        die "requeued $ATTEMPT times, which is the most (MAX_REQUEUES): not requeued again"
    else
        say "requeued: $1, at iteration $(saved_iterations) of $TRAIN_ITERS"
        insist scontrol requeue "$SLURM_JOB_ID"
    fi
}

# Note the trainer's flags in the logs $1, and refuse other flags than those of the job's first attempt. Slurm keeps a
# copy of the submitted script, but not of what it sources: an edit there must not change a run that is under way.
check_flags() {
    local first="$RUN_DIR/logs/$SLURM_JOB_ID-attempt-000/flags"
    printf '%s\n' "${@:2}" >"$1/flags"
    [[ ! -f "$first" ]] || diff "$first" "$1/flags" ||
        die "the flags (>) are not those of the job's first attempt (<): undo the change, or submit a new job"
}

# Whether the trainer, with logs in $1, has come to the end of the run. Its own summary decides: a run that went on with
# another global batch size has more or fewer iterations than TRAIN_ITERS.
is_finished() {
    if grep -Eqs '^stopped by .* after iteration [0-9]+/' "$1"/*.log; then return 1; fi
    grep -Eqs '^finished iteration [0-9]+/' "$1"/*.log || (($(saved_iterations) >= TRAIN_ITERS))
}

# Whether the trainer, with logs in $1, has said that a rank failed.
has_error() { grep -Eqs '^error on ' "$1"/*.log; }

# Whether the trainer, with logs in $1, has come to its summary, which follows the last save.
has_summary() { grep -Eqs '^(stopped by .* after|finished) iteration [0-9]+/' "$1"/*.log; }

# End the job after a training step with exit code $1 and logs in $2: with an error, by requeueing, or as finished.
conclude() {
    local code=$1
    # A node that gets SIGTERM before node.sh can handle it returns 143.
    if ((code == 143)) && [[ -n "$stopped" ]] && ! has_error "$2"; then code=0; fi
    # A stopped node returns 0. After an error, srun stops the other nodes, too, so the exit code comes first.
    if ((code != 0)); then die "training ended with exit code $code; see $2"; fi
    if [[ -e "$2/stopped" ]]; then stopped=SIGTERM; fi
    if [[ -n "$stopped" ]] && has_error "$2" && ! has_summary "$2"; then
        # Stopped nodes return 0 also where the last save has failed.
        die "the run was told to stop ($stopped), and an error ended it before it had saved; see $2"
    elif [[ -n "$stopped" ]]; then
        requeue "$stopped"
    elif is_finished "$2"; then
        say "finished: $(saved_iterations) iterations"
    else
        requeue "--exit-duration-in-mins"
    fi
}

# Run the trainer with these flags on all nodes, after a preflight. Requeue the job if the run was stopped.
launch_training() {
    local hosts port logs code=0 trainer
    (($# > 0)) || die "launch_training was given no flags of the trainer"
    port=29500
    if [[ -z "$PRINT_COMMAND" ]]; then
        check_paths
        [[ "$SLURM_JOB_NUM_NODES" == "$NUM_NODES" ]] ||
            die "the job has $SLURM_JOB_NUM_NODES nodes, the layout needs ENCODER_NODES $ENCODER_NODES + LLM_NODES \
$LLM_NODES = $NUM_NODES: change #SBATCH --nodes"
        mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
        # Below the ephemeral ports of the system, and different for each job.
        port=$((20000 + SLURM_JOB_ID % 10000))
    else
        hosts=(localhost)
    fi
    # With a static rendezvous, rank 0 is on the first node of the list, and the nodes keep Slurm's order, which is that
    # of the network if a topology is configured. node.sh reads SLURM_NODEID on the node.
    trainer=("$PYTHON" -m torch.distributed.run --nnodes "$NUM_NODES" --nproc-per-node "$GPUS_PER_NODE"
        --master-addr "${hosts[0]}" --master-port "$port" --shutdown-timeout "$SHUTDOWN_TIMEOUT_S"
        "$ROOT/train_hetero.py" "$@")
    if [[ -n "$PRINT_COMMAND" ]]; then
        printf '%s\0' "${trainer[@]}" >"$PRINT_COMMAND"
        exit 0
    fi
    set_communication
    logs="$RUN_DIR/logs/$SLURM_JOB_ID-attempt-$(printf %03d "$ATTEMPT")"
    mkdir -p "$logs" "$RUN_DIR/checkpoints"
    check_flags "$logs" "$@"
    say "attempt $ATTEMPT of job $SLURM_JOB_ID on ${#hosts[@]} nodes from ${hosts[0]}; logs in $logs"
    say "from iteration $(saved_iterations) of $TRAIN_ITERS"
    trap pass_stop_on TERM

    stage_files --ntasks-per-node=1
    # The preflight names the nodes that do not answer.
    export MASTER_ADDR="${hosts[0]}" MASTER_PORT="$port" JOB_HOSTS="${hosts[*]}"
    if [[ -z "$stopped" ]]; then
        run_step "$PYTHON" "$ROOT/scripts/preflight.py" --gpus-per-node "$GPUS_PER_NODE" \
            --timeout-s "$PREFLIGHT_TIMEOUT_S" -- "$@" || code=$?
        if ((code != 0)) && [[ -z "$stopped" ]]; then
            die "preflight failed with exit code $code; nothing was started"
        fi
    fi
    if [[ -z "$stopped" ]]; then
        # One log per node. The marker says that this script or Slurm told a step to stop.
        run_step --output="$logs/%N.log" "$ROOT/scripts/sbatch/node.sh" "$logs/stopped" "${trainer[@]}" || code=$?
        conclude "$code" "$logs"
    else
        requeue "$stopped"
    fi
}
