#!/usr/bin/env bash
#SBATCH --job-name=nemotron-54l-8n-gbs192
#SBATCH --nodes=8
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
# The homogeneous reference for parity_9n_gbs192.sh: the same batches on the language model's GPUs alone. Each of them
# has a part of both modules.
# Submit it from the top of the checkout, after editing the paths in nemotron_54l.sh; see README.md:
#   sbatch --account=... --partition=... scripts/sbatch/homogeneous_8n_gbs192.sh
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '/^#SBATCH/d;2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
# shellcheck source=scripts/sbatch/nemotron_54l.sh
source "${SLURM_SUBMIT_DIR:?submit this file with sbatch, from the top of the checkout}/scripts/sbatch/nemotron_54l.sh"

RUN_NAME=nemotron-54l-8n-gbs192
ENCODER_NODES=0
LLM_NODES=8
LLM_EP=16
GBS=192
NUM_WORKERS=2
# 3 * 10^11 tokens.
TRAIN_SAMPLES=36621094
train_nemotron
