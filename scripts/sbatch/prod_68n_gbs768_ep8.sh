#!/usr/bin/env bash
#SBATCH --job-name=nemotron-54l-68n-gbs768-ep8
#SBATCH --nodes=68
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
# Production: 3 microbatches, four encoder nodes for 256 lanes.
# Submit it from the top of the checkout, after editing the paths in nemotron_54l.sh; see README.md:
#   sbatch --account=... --partition=... scripts/sbatch/prod_68n_gbs768_ep8.sh
set -euo pipefail
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '/^#SBATCH/d;2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
# shellcheck source=scripts/sbatch/nemotron_54l.sh
source "${SLURM_SUBMIT_DIR:?submit this file with sbatch, from the top of the checkout}/scripts/sbatch/nemotron_54l.sh"

RUN_NAME=nemotron-54l-68n-gbs768-ep8
ENCODER_NODES=4
LLM_NODES=64
LLM_EP=8
train_nemotron
