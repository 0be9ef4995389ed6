#!/usr/bin/env bash
#SBATCH --job-name=nemotron-54l-9n-gbs192
#SBATCH --nodes=9
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
# The recipe on few nodes, to compare its loss with that of a homogeneous run, which README.md makes of this file.
# sbatch --account=... --partition=... scripts/sbatch/parity_9n_gbs192.sh, from the top of the checkout; see README.md.
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '/^#SBATCH/d;2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi

# ---- paths: edit these; all nodes have to see them under the same name -----------------------------------------------
PYTHON=/path/to/checkout/.venv/bin/python
DATA_PATH=/path/to/data/blend.yaml
TOKENIZER=/path/to/tokenizer
NEMOTRON_CHECKPOINT=/path/to/megatron-checkpoint
RUN_DIR=/path/to/runs/nemotron-54l-9n-gbs192
# Copied to every node's own disk first, to STAGE_TO/NAME, where the paths above may then point; () copies nothing.
STAGE_FROM=()
STAGE_TO=/path/to/local-disk
# What the cluster wants of srun besides, such as --container-image=... --container-mounts=...
SRUN_FLAGS=()
# ----------------------------------------------------------------------------------------------------------------------

# Topology: data-parallel sizes follow from it.
GPUS_PER_NODE=8
ENCODER_NODES=1
LLM_NODES=8
ENCODER_TP=1
LLM_TP=2
LLM_EP=16

# Batch: microbatches follow from it.
GBS=192
MBS=1
SEQ_LENGTH=8192

# Length and learning rate, in samples of SEQ_LENGTH tokens: 3 * 10^11 tokens.
TRAIN_SAMPLES=36621094
LR_WARMUP_SAMPLES=1024000
# The decay's end, counted from sample 0. The recipe has it here: its last LR_WARMUP_SAMPLES samples train at --min-lr.
LR_DECAY_SAMPLES=35597094
LR_WSD_DECAY_SAMPLES=5493164

# shellcheck source=scripts/sbatch/common.sh
source "${SLURM_SUBMIT_DIR:?submit this file with sbatch, from the top of the checkout}/scripts/sbatch/common.sh"
derive_sizes

FLAGS=(
    # layout
    --layout disjoint
    --encoder-tp "$ENCODER_TP"
    --encoder-dp "$ENCODER_DP"
    --llm-tp "$LLM_TP"
    --llm-dp "$LLM_DP"
    --llm-pp 1
    --llm-ep "$LLM_EP"
    --llm-expt-tp 1
    --sequence-parallel
    # model
    --model-provider nemotron-moe-vlm-54l
    --training-stage stage2
    --load-nemotron-checkpoint "$NEMOTRON_CHECKPOINT"
    --bf16
    --transformer-impl transformer_engine
    --recompute none
    --vision-dynamic-resolution
    --vision-class-token-len 10
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-router-bias-update-rate 1e-3
    --no-moe-router-force-load-balancing
    --hidden-dropout 0.0
    --attention-dropout 0.0
    # batch and length
    --micro-batch-size "$MBS"
    --global-batch-size "$GBS"
    --seq-length "$SEQ_LENGTH"
    --train-samples "$TRAIN_SAMPLES"
    --eval-interval 0
    --eval-iters 0
    --seed 1234
    # data
    --dataset-provider energon
    --data-path "$DATA_PATH"
    --tokenizer "$TOKENIZER"
    # the id of <image> in the tokenizers of Nemotron's published vision-language models
    --image-token-id 18
    --prompt-format nemotron6-moe
    --image-tag-type internvl
    --image-tiling dynamic
    --min-patches 1024
    --max-patches 13312
    --image-mean 0.48145466 0.4578275 0.40821073
    --image-std 0.26862954 0.26130258 0.27577711
    --packing-buffer-size 128
    --shuffle-buffer-size 0
    --max-samples-per-sequence 100
    --num-workers 2
    --lane-loader routed
    # optimizer
    --lr 1.2e-3
    --min-lr 1.2e-5
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-8
    --clip-grad 1.0
    --use-distributed-optimizer
    --no-correct-encoder-grad-for-partial-participation
    --lr-decay-style WSD
    --lr-warmup-init 0.0
    --lr-warmup-samples "$LR_WARMUP_SAMPLES"
    --lr-decay-samples "$LR_DECAY_SAMPLES"
    --lr-wsd-decay-samples "$LR_WSD_DECAY_SAMPLES"
    --lr-wsd-decay-style minus_sqrt
    # data parallelism
    --grad-reduce-in-fp32
    --overlap-grad-reduce
    --overlap-param-gather
    --no-encoder-ddp-overlap
    --ddp-num-buckets 8
    --ddp-pad-buckets-for-high-nccl-busbw
    # checkpoints: the first attempt starts from NEMOTRON_CHECKPOINT, each later one from the newest of --load
    --save "$RUN_DIR/checkpoints"
    --load "$RUN_DIR/checkpoints"
    --save-interval 1000
    --keep-last 10
    # 220 of the 240 minutes of --time; the rest is for the preflight, the start and the last save
    --exit-duration-in-mins 220
    # records
    --run-dir "$RUN_DIR"
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --log-interval 100
    --no-progress
)
launch_training "${FLAGS[@]}"
