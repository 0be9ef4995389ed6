"""The reference policy: the policy comes back bit by bit, and the KL divergence is that of the weights it was given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mimo.rl.losses import advantages
from tests.support import rl_reference
from tests.support.marks import fast_only
from tests.support.policy_updates import completions
from tests.support.rl_reference import CONFIG
from tests.support.spawn import WorkerPool

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000")
# name -> (ranks, flags)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2-ep2-overlap-bf16": (2, ("--llm-dp", "2", "--llm-ep", "2", "--bf16", *OVERLAP)),
    "dp2-float32": (2, ("--llm-dp", "2")),
    "tp2-unsharded-optimizer-bf16": (2, ("--llm-tp", "2", "--sequence-parallel", "--bf16",
                                         "--no-use-distributed-optimizer")),
    "pp2-tied": (2, ("--llm-pp", "2", "--no-untie-embeddings-and-output-weights")),
}


@pytest.mark.parametrize("layout", fast_only(["dp2-ep2-overlap-bf16"], LAYOUTS))
def test_a_reference_that_is_the_policy_changes_no_bit(pool: WorkerPool, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    found = pool.run(rl_reference.updates, flags, world_size, world_size=world_size)
    for plain, watched in found:
        assert plain.state.keys() == watched.state.keys() and len(plain.state) > 20
        assert [name for name, value in plain.state.items() if not np.array_equal(value, watched.state[name])] == []
        for mine, expected in zip(watched.results, plain.results, strict=True):
            figures = dict(mine.metrics)
            reference_kl = figures.pop("reference_kl")
            assert figures == expected.metrics and mine.grad_norm == expected.grad_norm
        assert watched.results[0].metrics["reference_kl"] == 0 and reference_kl > 1e-6
        for later in watched.references[1:]:
            assert all(torch.equal(mine, own) for mine, own in zip(later, watched.references[0], strict=True))
    # The last stage has log-probs, and they are not all alike.
    assert found[-1][1].references[0][0].count_nonzero() > 5


HF_LAYOUTS = {"dp2-ep2": ("--llm-dp", "2", "--llm-ep", "2"), "tp2": ("--llm-tp", "2", "--sequence-parallel")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", HF_LAYOUTS)
def test_the_divergence_is_that_of_hugging_faces_models(pool: WorkerPool, tmp_path, layout: str) -> None:
    folders = str(tmp_path / "policy"), str(tmp_path / "reference")
    pool.run(rl_reference.save_hf, "qwen3-moe", *folders, world_size=1)
    policy, reference = (pool.run(rl_reference.hf_log_probs, folder, CONFIG.temperature, world_size=1)[0]
                         for folder in folders)
    ratios = [mine - theirs for mine, theirs in zip(policy, reference, strict=True)]
    assert max(each.abs().max().item() for each in ratios) < 10, "nothing is clamped"
    k3 = torch.cat([torch.exp(-each) - 1 + each for each in ratios]).mean().item()
    assert k3 > 0.01
    flags = HF_LAYOUTS[layout]
    config = dataclasses.replace(CONFIG, kl_coeff=0.3, kl_in="reward", kl_type="k1")
    for found in pool.run(rl_reference.update_hf, "qwen3-moe", *folders, flags, 2,
                          dataclasses.replace(config, kl_in="loss", kl_type="k3"), world_size=2):
        assert found.results[0].metrics["reference_kl"] == pytest.approx(k3, rel=1e-4)
        assert found.lines == [f"reference policy: weights from {folders[1]}"]
    penalties = [0.3 * each.sum().item() for each in ratios]
    rewards = [each.reward - penalty for each, penalty in zip(completions(0), penalties, strict=True)]
    before = [each.reward for each in completions(0)]
    prompts = [each.prompt for each in completions(0)]
    assert not torch.allclose(advantages(rewards, prompts, "grpo"), advantages(before, prompts, "grpo"), atol=0.1)
    by_hand = pool.run(rl_reference.update_hf, "qwen3-moe", *folders, flags, 2, CONFIG, rewards, world_size=2)
    for mine, expected in zip(pool.run(rl_reference.update_hf, "qwen3-moe", *folders, flags, 2, config, world_size=2),
                              by_hand, strict=True):
        figures = dict(mine.results[0].metrics)
        assert figures.pop("kl_penalty") == pytest.approx(sum(penalties) / len(penalties), rel=1e-4)
        assert figures.pop("reference_kl") == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-4)
        assert figures == pytest.approx(expected.results[0].metrics, rel=1e-4, abs=1e-5)
        assert mine.results[0].grad_norm == pytest.approx(expected.results[0].grad_norm, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_another_layout_is_the_reference_and_nothing_else_changes(pool: WorkerPool, tmp_path) -> None:
    folder = str(tmp_path / "saved")
    pool.run(rl_reference.save, ("--llm-tp", "2", "--sequence-parallel", "--bf16"), 2, folder, world_size=2)
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)
    flags = ("--llm-dp", "2", "--llm-ep", "2", "--bf16", *OVERLAP)
    expected = pool.run(rl_reference.update_from, flags, 2, config, False, True, world_size=2)
    config = dataclasses.replace(config, ref_load=folder)
    for resumed in (False, True):
        for mine, wanted in zip(pool.run(rl_reference.update_from, flags, 2, config, resumed, world_size=2), expected,
                                strict=True):
            assert not mine.error and mine.lines[0].startswith(f"reference policy: weights from {folder}/iter_0000003")
            assert mine.results[0].metrics == wanted.results[0].metrics
            assert mine.results[0].metrics["reference_kl"] > 1e-3
            assert all(np.array_equal(value, wanted.state[name]) for name, value in mine.state.items())


@pytest.mark.slow
def test_a_run_started_again_has_the_reference_of_its_first_start(pool: WorkerPool, tmp_path) -> None:
    """--load --finetune names the reference, also once the run goes on from --save."""
    began, own = str(tmp_path / "began"), str(tmp_path / "own")
    pool.run(rl_reference.save, ("--llm-dp", "2"), 2, began, world_size=2)
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)
    flags = ("--llm-dp", "2", "--load", began, "--ckpt-step", "3")
    pool.run(rl_reference.save, (*flags, "--finetune"), 2, own, world_size=2)
    # The weights that it began with are 1.1 times those that this test's runs have.
    for found in pool.run(rl_reference.update_from, (*flags, "--finetune", "--load-hf", "nowhere", "--save", own), 2,
                          config, True, world_size=2):
        assert (found.error, found.lines) == ("", [f"reference policy: weights from {began}/iter_0000003"])
        assert found.results[0].metrics["reference_kl"] > 1e-3
    # Without --finetune it began in the middle of a run.
    first, _ = pool.run(rl_reference.update_from, (*flags, "--save", own), 2, config, True, world_size=2)
    assert first.error.startswith(f"ValueError: --kl-coeff 0.3 with --load {began}: the run goes on from its")


@pytest.mark.slow
def test_a_reference_that_nobody_can_know_or_that_does_not_fit_is_refused(pool: WorkerPool, tmp_path) -> None:
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)

    def error_of(config, *flags, resumed=False):
        first, *_ = pool.run(rl_reference.update_from, flags, 2, config, resumed, world_size=2)
        assert not first.results
        return first.error

    flags = ("--llm-dp", "2", "--load", "own")
    assert error_of(config, *flags, resumed=True).startswith(
        "ValueError: --kl-coeff 0.3 with --load own: the run goes on from its checkpoint, which does not hold the "
        "weights that it started from, the reference policy. Name them: --ref-load FOLDER")
    nothing = dataclasses.replace(config, ref_load=str(tmp_path / "nothing"))
    assert error_of(nothing, "--llm-dp", "2") == f"ValueError: --ref-load {tmp_path / 'nothing'} does not exist"
    pool.run(rl_reference.save, ("--llm-pp", "2", "--num-layers", "4"), 2, str(tmp_path / "deeper"), world_size=2)
    deeper = dataclasses.replace(config, ref_load=str(tmp_path / "deeper"))
    said = error_of(deeper, "--llm-dp", "2")
    folder = tmp_path / "deeper" / "iter_0000003"
    assert said.startswith(
        f"ValueError: --ref-load {folder}: its weights belong to a model that computes something else")
    assert said.splitlines()[1:] == ["  --num-layers 2 (checkpoint: 4)"]
    assert f"--ref-load {folder} does not fit this run; nothing was loaded" in error_of(
        deeper, "--llm-dp", "2", "--allow-difference", "num-layers")
    # What the flags of a resumed run name is read for the reference.
    assert "--load-hf nowhere" in error_of(config, *flags, "--load-hf", "nowhere", resumed=True)
    assert "--ref-load-hf nowhere" in error_of(dataclasses.replace(config, ref_load_hf="nowhere"), "--llm-dp", "2")
