"""A trainer's weights in a live vLLM engine: log-probs of both sides and of Hugging Face's model after every sync."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mimo.refit.options import RefitOptions
from mimo.rollout.process import EngineProcess
from tests.support import hf_families, refit
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

MAX_ERROR = 1e-5
DENSE_LAYOUTS = {"one-process": (1, ""), "tp2": (2, "--llm-tp 2 --sequence-parallel"), "pp2": (2, "--llm-pp 2"),
                 "dp2": (2, "--llm-dp 2")}
MOE_LAYOUTS = {"one-process": (1, ""), "tp2": (2, "--llm-tp 2 --sequence-parallel"), "pp2": (2, "--llm-pp 2"),
               "ep2": (2, "--llm-dp 2 --llm-ep 2"), "cp2-ep2": (2, "--llm-cp 2 --llm-ep 2"),
               "tp2-ep2": (4, "--llm-tp 2 --sequence-parallel --llm-dp 2 --llm-ep 2"),
               "tp2-expert-tp2": (2, "--llm-tp 2 --sequence-parallel --llm-expt-tp 2")}
LAYOUTS = {"refit-qwen3": DENSE_LAYOUTS, "refit-qwen3-tied": {"tp2": DENSE_LAYOUTS["tp2"]},
           "refit-qwen3-moe": MOE_LAYOUTS, "refit-nemotron-h": DENSE_LAYOUTS,
           "refit-deepseek": {"pp2": DENSE_LAYOUTS["pp2"], "ep2": MOE_LAYOUTS["ep2"]}}
# Tensor-parallel size and stages of engines. vLLM has no expert parallelism on CPUs: `CPUUnquantizedExperts.apply` of
# its experts/cpu_moe.py leaves out the `expert_map`, so that a worker looks for experts that others have, and crashes.
# It has no experts without a gate on CPUs either, as Nemotron's are: `FusedMoEConfig.__post_init__` refuses them.
ENGINES = {"1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
CASES = [(name, layout, "1") for name, layouts in LAYOUTS.items() for layout in layouts]
CASES += [(name, layout, sizes) for sizes in ("tp2", "pp2") for name, layout in (
    ("refit-qwen3-moe", "tp2-ep2"), ("refit-nemotron-h", "tp2"), ("refit-deepseek", "pp2"))]
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=60, chunk_bytes=10_000)

Engine = Callable[[str, str], tuple[Path, EngineProcess, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def engine(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Model, sizes -> (saved folder, an engine with made-up weights of it, Hugging Face's logits); one at a time."""
    running: dict[tuple[str, str], tuple[Path, EngineProcess, dict[str, torch.Tensor]]] = {}

    def get(name: str, sizes: str) -> tuple[Path, EngineProcess, dict[str, torch.Tensor]]:
        if (name, sizes) not in running:
            for _, process, _ in running.values():
                process.close()
            running.clear()
            folder = tmp_path_factory.mktemp(name)
            logits = pool.run(refit.save, name, str(folder), world_size=1)[0]
            running[name, sizes] = folder, EngineProcess(refit.engine_options(folder, *ENGINES[sizes])), logits
        return running[name, sizes]

    yield get
    for _, process, _ in running.values():
        process.close()


def logprobs(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return the log-prob of each token but the first."""
    wanted = torch.tensor(tokens[1:]).unsqueeze(-1)
    return logits[:-1, :hf_families.VOCAB_SIZE].double().log_softmax(-1).gather(-1, wanted).squeeze(-1).float()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "layout", "sizes"), fast_only([("refit-qwen3-moe", "tp2-ep2", "1")], CASES))
def test_log_probs_after_three_syncs_equal_the_trainers(pool, engine, name, layout, sizes):
    world_size, flags = LAYOUTS[name][layout]
    folder, process, expected = engine(name, sizes)
    prompts = pool.run(refit.prompts_of, name, str(folder), world_size=1)[0]
    by_rank = pool.run(refit.sync, name, str(folder), tuple(flags.split()), world_size, process.handle, OPTIONS,
                       prompts, 3, world_size=world_size, timeout_s=300)
    for step in range(3):
        ours = {key: each for rank in by_rank for key, each in rank[step]["ours"].items()}
        theirs = by_rank[0][step]["theirs"]
        assert ours.keys() == theirs.keys() == expected.keys()
        for key, mine in ours.items():
            assert float((mine - torch.tensor(theirs[key])).abs().max()) <= MAX_ERROR, (step, key)
            if step == 0:
                hugging_face = logprobs(expected[key], prompts[key])
                assert float((mine - hugging_face).abs().max()) <= MAX_ERROR, key
        if step:
            changed = [float((mine - by_rank[0][step - 1]["ours"].get(key, mine + 1)).abs().max()) for key, mine
                       in ours.items()]
            assert min(changed) > 1e-2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_delta_refits_load_only_the_modules_that_have_changed(pool: WorkerPool, engine: Engine) -> None:
    name = "refit-qwen3-moe"
    folder, process, _ = engine(name, "1")
    prompts = pool.run(refit.prompts_of, name, str(folder), world_size=1)[0]
    options = dataclasses.replace(OPTIONS, delta=True, block_bytes=1024)
    by_rank = pool.run(refit.sync, name, str(folder), ("--llm-pp", "2"), 2, process.handle, options, prompts, 3,
                       "experts", world_size=2, timeout_s=300)
    reports = [step["report"] for step in by_rank[0]]
    assert [report.is_delta for report in reports] == [False, True, True]
    assert all(0 < report.wire_bytes < 0.5 * reports[0].wire_bytes for report in reports[1:])
    for step in range(3):
        ours = {key: each for rank in by_rank for key, each in rank[step]["ours"].items()}
        for key, mine in ours.items():
            assert float((mine - torch.tensor(by_rank[0][step]["theirs"][key])).abs().max()) <= MAX_ERROR, (step, key)
