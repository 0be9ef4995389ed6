"""A run with prompts that are too long ends before it has built a model; with --skip-long-prompts it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_tokenizer import write_tokenizer
from tests.support.spawn import WorkerPool

pytestmark = pytest.mark.slow

RL = """--model-provider causal_lm --num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 64
--vocab-size 400 --no-bf16 --device cpu --transformer-impl local --seq-length 96 --max-completion-tokens 16
--max-tokens-per-microbatch 128 --global-batch-size 16 --completions-per-prompt 4 --train-iters 3 --llm-dp 2
--dataset-provider gsm8k --gsm8k-format plain""".split()
HELD_OUT = ("--eval-prompts", "2")


def set_up(rank: int, flags: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the error that ends the set-up of this rank, and the prompts that it has opened."""
    from mimo.config.cli import parse_as
    from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.registry import model_provider, prompt_provider
    from mimo.rl import loop
    from mimo.watchdog.process_exit import ReportedElsewhereError

    config = parse_as(RlRunConfig, list(flags), DESCRIPTION)
    layout = validate_rl(config, 2, rank)

    def built(*_: Any) -> None:
        raise AssertionError("the model is built")

    with pytest.MonkeyPatch.context() as patch, Grids(layout, current_platform().backend) as grids:
        patch.setattr(loop, "setup_trainer", built)
        run = loop.RlLoop(config, grids, current_platform(), model_provider("causal_lm"), prompt_provider("gsm8k"))
        try:
            run._set_up()
        except (AssertionError, ValueError, ReportedElsewhereError) as error:
            prompts = run._splits.get("train")
            return str(error), [prompts.prompt(index).key for index in range(8)] if prompts else []
        finally:
            run.watchdog.close()
    raise AssertionError("a trainer was set up without one")


def test_long_prompts_end_a_run_before_it_begins(pool: WorkerPool, tmp_path: Path) -> None:
    rows = [{"question": "why " * (50 if number == 2 else 1) + str(number), "answer": "1"} for number in range(4)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    flags = (*RL, "--data-path", str(tmp_path), "--tokenizer", str(tokenizer), "--run-dir", str(tmp_path / "run"))
    (first, _), (other, _) = pool.run(set_up, flags, world_size=2)
    assert first.startswith("1 of 4 prompts of the train split of gsm8k have more than the 80 tokens"), first
    assert other == "rank 0 reports what is wrong"
    (first, keys), (other, none) = pool.run(set_up, (*flags, *HELD_OUT, "--skip-long-prompts"), world_size=2)
    assert first == other == "the model is built" and not none
    assert sorted(keys[:3]) == ["gsm8k/train/000000", "gsm8k/train/000001", "gsm8k/train/000003"]
    assert "gsm8k/train/000002" not in keys
