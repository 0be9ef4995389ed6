#!/usr/bin/env bash
# Reinforcement learning of a small vision-language model on scans of handwritten numbers: a supervised run on answers
# most of which are in words, then GRPO with rewards for the right digits. Encoder and language model are a process each,
# the rollout engine a third. It takes minutes on 2 CPU cores and ends with the reward on held-out scans.
#
#   scripts/rl/digits_cpu.sh [llava|qwen3_vl|nemotron] [flags of train_rl.py ...]   # without a family: llava
#   RUNS=folder scripts/rl/digits_cpu.sh       # elsewhere than in runs/digits_cpu (qwen3_vl: runs/digits_qwen3_vl_cpu)
#   PYTHON=python3 scripts/rl/digits_cpu.sh    # an environment with the extra rl-cpu, instead of .venv
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

family=llava
if (($#)) && [[ "$1" != -* ]]; then
    family="$1"
    shift
fi
case "$family" in
    llava) model=rl_digits ;;
    qwen3_vl | nemotron) model="rl_digits_$family" ;;
    *)
        say "scripts/rl/digits_cpu.sh $family: the families are llava, qwen3_vl and nemotron"
        exit 2
        ;;
esac
prepare
runs="${RUNS:-runs/${model#rl_}_cpu}"
configs=scripts/configs
supervised 2 "$runs" --config "$configs/${model}_model.toml" --config "$configs/rl_digits_sft.toml"
reinforce 2 "$runs" --config "$configs/${model}_model.toml" --config "$configs/rl_digits.toml" "$@"
