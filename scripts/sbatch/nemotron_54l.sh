# shellcheck shell=bash
# The runs of Nemotron MoE VLM with 54 layers: paths, batch, learning rate and every flag of the trainer.
#
# The scripts beside this file source it, set what is different in their run, and call train_nemotron. Any variable
# below may be set again after this file is sourced.
#
# shellcheck disable=SC2153 # LLM_EP is set by the scripts

# ---- paths: edit these; all nodes must see them under the same name --------------------------------------------------
PYTHON=/path/to/checkout/.venv/bin/python
DATA_PATH=/path/to/data/blend.yaml
TOKENIZER=/path/to/tokenizer
NEMOTRON_CHECKPOINT=/path/to/megatron-checkpoint
# Each run has a folder of its own here, RUNS/RUN_NAME.
RUNS=/path/to/runs
# Every node first copies these to its own disk, to STAGE_TO/NAME, where the paths above may then point. With (), none.
STAGE_FROM=()
STAGE_TO=/path/to/local-disk
# Further options of srun for this cluster, such as --container-image=... --container-mounts=...
SRUN_FLAGS=()
# ----------------------------------------------------------------------------------------------------------------------

# Topology: data-parallel sizes follow from it. A run sets ENCODER_NODES, LLM_NODES and LLM_EP. With ENCODER_NODES=0,
# the encoder shares the language model's nodes and has the same grid.
GPUS_PER_NODE=8
ENCODER_TP=1
LLM_TP=2

# Batch: the number of microbatches follows from it.
GBS=768
MBS=1
SEQ_LENGTH=8192
NUM_WORKERS=1

# Length and learning rate, in samples of SEQ_LENGTH tokens: 10^12 tokens.
TRAIN_SAMPLES=122070313
LR_WARMUP_SAMPLES=1024000

# shellcheck source=scripts/sbatch/common.sh
source "$SLURM_SUBMIT_DIR/scripts/sbatch/common.sh"
VALUES+=(RUN_NAME RUNS LLM_EP SEQ_LENGTH NUM_WORKERS LR_WARMUP_SAMPLES)

# Derive what follows from the values, and start the trainer.
train_nemotron() {
    RUN_DIR="$RUNS/$RUN_NAME"
    derive_sizes
    # The decay ends at this sample, counted from sample 0. The recipe has it here: its last LR_WARMUP_SAMPLES samples
    # train at --min-lr.
    local lr_decay_samples=$((TRAIN_SAMPLES - LR_WARMUP_SAMPLES))
    # The decay takes the last 15 % of the samples.
    local lr_wsd_decay_samples=$(((TRAIN_SAMPLES * 15 + 50) / 100))
    local flags
    flags=(
        # layout
        --layout "$LAYOUT"
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
        # A node without a working GPU is an error. By default it would train on its CPUs.
        --device cuda
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
        --num-workers "$NUM_WORKERS"
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
        # Off, and written out because it has to stay off: the gradient is exact without the correction, even if some
        # encoder ranks saw no image. With it, the number of encoder ranks would change their gradients, and losses
        # could not be compared with those of the homogeneous run.
        --no-correct-encoder-grad-for-partial-participation
        --lr-decay-style WSD
        --lr-warmup-init 0.0
        --lr-warmup-samples "$LR_WARMUP_SAMPLES"
        --lr-decay-samples "$lr_decay_samples"
        --lr-wsd-decay-samples "$lr_wsd_decay_samples"
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
    launch_training "${flags[@]}"
}
