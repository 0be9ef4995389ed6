"""Flags that programs of scripts/bench refuse before they start any process."""

from __future__ import annotations

import importlib
import shlex
import subprocess

import pytest

MOCK = "--model-provider mock --dataset-provider mock"
# Flags that work, by program.
BASES = {
    "layouts": "--device cpu --gpus 4 --global-batch-size 24 --no-variants",
    "refit_plan": "",
    "rl_sweep": "--device cpu --layout '' --layout '--llm-dp 2 --llm-ep 2' --tokens 512 --tokens 1024 "
                "--prompt-length 16",
    "schedule": "--device cpu",
    "startup": f"--device cpu {MOCK}",
    "timeline": f"--device cpu --steps 8 --warmup-steps 2 {MOCK} --seq-length 128 --micro-batch-size 2 "
                "--global-batch-size 4 --encoder-dp 1 --llm-dp 1",
    "train": "--run 'apart=--encoder-dp 1 --llm-dp 2' --run 'together=--layout colocated --encoder-dp 2 --llm-dp 2' "
             f"{MOCK} --seq-length 128 --steps 4 --warmup-steps 2",
}


@pytest.mark.parametrize(("program", "flags", "message"), [
    ("layouts", "--gpus 1", "--gpus 1 is below 2"),
    ("layouts", "--disjoint '--llm-dp 2'", "--disjoint '--llm-dp 2' has 3 ranks, --gpus is 4"),
    ("layouts", "--loss-steps 9", "--loss-steps 9: the shortest runs have --warmup-steps 3 + --search-steps 2"),
    ("layouts", "--llm-only --mock-images-max 0", "has 1 encoders here"),
    ("layouts", "--num-attention-heads 7", "no layout of 4 ranks works; --layout homogeneous --llm-dp 4: "),
    ("refit_plan", "--model qwen3-235b-a22b --trainer tp=4,ep=8", "ep * etp must divide tp * dp"),
    ("refit_plan", "--trainer tp=four", "tp=four"),
    ("rl_sweep", "--prompt-length 512", "--prompt-length 512 leaves no room for a completion in --seq-length 512"),
    ("rl_sweep", "-- --seq-length 600", "--max-tokens-per-microbatch 512 is below --seq-length 600"),
    ("rl_sweep", "--layout '--llm-dp 3'", "--llm-dp 3 = 3; nearest are 30 and 33"),
    ("rl_sweep", "-- --model-provider llava", "has the encoder vision"),
    ("schedule", "--layout colocated", "--layout colocated with 1 encoders"),
    ("schedule", "--no-timeline", "--no-timeline: the benchmark measures with the timeline"),
    ("schedule", "--global-batch-size 3 --llm-dp 2", "--global-batch-size 3 is not a multiple"),
    ("schedule", "--synthetic 5", "5 is not ENC_MS,LM_MS"),
    ("schedule", "--blocks 0", "--blocks 0 is below 1"),
    ("schedule", "--device cuda --synthetic 1,2", "--synthetic 1.0,2.0 needs --device cpu"),
    ("startup", "--run 'a=--llm-dp 2 --global-batch-size 3'", "--global-batch-size 3"),
    ("startup", "--steps 5 --warmup-steps 5", "need 1 <= warmup < steps"),
    ("timeline", "--no-timeline", "--no-timeline: the benchmark measures"),
    ("timeline", "--global-batch-size 3", "--global-batch-size 3"),
    ("train", "--run 'apart=--llm-dp 1'", "give each run a name of its own"),
    ("train", "--warmup-steps 4", "--steps 4 --warmup-steps 4"),
    ("train", "--global-batch-size 3", "--global-batch-size 3 is not a multiple"),
])
def test_flags_that_cannot_work_are_refused(program, flags, message, monkeypatch, capsys):
    monkeypatch.delattr(subprocess, "Popen")
    try:
        code = importlib.import_module(f"scripts.bench.{program}").main(shlex.split(f"{BASES[program]} {flags}"))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err
