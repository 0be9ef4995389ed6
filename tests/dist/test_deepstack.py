"""Levels of an encoder reach the decoder layers that add them, with exact gradients, on any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.equality import Outcome, assert_equal, reference, run_layout, run_oracle
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

MODEL = ("--model-provider", "tests.support.deepstack:provider", "--num-layers", "4", "--vision-num-layers", "3")
# name -> (ranks, flags). With two pipeline stages of two layers the third level is added on the second stage.
LAYOUTS = {
    "disjoint-encoder-dp2": (3, "--encoder-dp 2 --micro-batch-size 2"),
    "disjoint-tp2-pp2": (4, "--llm-pp 2 --llm-tp 1 --encoder-tp 2"),
    "disjoint-sequence-parallel": (3, "--llm-tp 2 --sequence-parallel --recompute full"),
    "disjoint-tensor-parallel": (3, "--llm-tp 2"),
    "disjoint-run-ahead-pp2": (3, "--llm-pp 2 --encoder-run-ahead 2"),
    "encoder-pp3": (4, "--encoder-pp 3"),
    "colocated-dp2": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
    "colocated-pp2-balanced-windows": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
    "colocated-pp4-one-window": (4, "--layout colocated --encoder-dp 4 --llm-pp 4 --encoder-window 0 "
                                    "--recompute selective"),
    "colocated-tp2-pp2": (4, "--layout colocated --encoder-dp 4 --llm-tp 2 --llm-pp 2 --sequence-parallel "
                             "--recompute full"),
    "disjoint-cp2": (3, "--llm-cp 2"),
    "colocated-cp2-pp2": (4, "--layout colocated --encoder-dp 4 --llm-cp 2 --llm-pp 2"),
    "homogeneous-pp2": (2, "--layout homogeneous --llm-pp 2 --encoder-recompute full"),
}
FAST = ["disjoint-sequence-parallel", "colocated-pp2-balanced-windows", "homogeneous-pp2"]


@pytest.fixture(scope="module")
def oracle(pool: WorkerPool) -> Outcome:
    return pool.run(run_oracle, MODEL, world_size=1)[0]


def test_every_level_has_a_gradient(oracle: Outcome) -> None:
    gradients, _ = reference(oracle)
    found = [abs(gradients[name]).max() for name in gradients if "projectors." in name and "linear_fc1.weight" in name]
    assert len(found) == 4 and min(found) > 0


@pytest.mark.parametrize("layout", fast_only(FAST, LAYOUTS))
def test_equal_to_one_process(pool: WorkerPool, oracle: Outcome, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    assert_equal(oracle, pool.run(run_layout, (*flags.split(), *MODEL), world_size, world_size=world_size))


def memory_of_inputs(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[int, int]]:
    """Train and return the bytes of each input of the decoder, and those of the memory behind it."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    found, forward = [], TransformerBlock.forward

    def noted(self: Any, hidden_states: Any, *rest: Any, **named: Any) -> Any:
        if self.config.sequence_parallel:
            found.append((hidden_states.nbytes, hidden_states.untyped_storage().nbytes()))
        return forward(self, hidden_states, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerBlock, "forward", noted)
        run_layout(rank, flags, world_size)
    return found


def test_a_rank_keeps_no_more_than_its_part_of_the_row(pool: WorkerPool) -> None:
    flags = (*LAYOUTS["disjoint-sequence-parallel"][1].split(), *MODEL)
    encoder, *language = pool.run(memory_of_inputs, flags, 3, world_size=3)
    assert not encoder and all(language)
    assert all(own == kept for inputs in language for own, kept in inputs)
