"""The reference policy: the policy comes back bit by bit, and the KL divergence is that of the weights it was given."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from mimo.checkpoint.load import find_checkpoint
from mimo.checkpoint.save import Saver
from mimo.checkpoint.state import Progress, RunState
from mimo.config.cli import parse
from mimo.config.rl import RlConfig
from mimo.config.validate import validate
from mimo.registry import model_provider
from mimo.rl.losses import advantages
from mimo.rl.policy import PolicyResult, PolicyTrainer
from mimo.rl.reference import ReferencePolicy, reference_policy
from mimo.watchdog.process_exit import ReportedElsewhereError
from tests.support import equality, hf_families, policy_updates
from tests.support.marks import fast_only
from tests.support.policy_updates import FLAGS, MOE, VOCAB_SIZE, completions
from tests.support.resuming import bits, exact_state
from tests.support.spawn import WorkerPool

CONFIG = RlConfig(completions_per_prompt=2, temperature=0.7, importance_cap=1.1, max_tokens_per_microbatch=24)


@dataclass
class Updated:
    """Results on a rank.

    Attributes:
        results: results of each update.
        state: everything that a step reads or writes, bit for bit, at the end.
        references: log-probs of the first completions, by the policy at the start, and by the reference before each
            update and at the end.
        lines: that say where the reference is from.
        error: why there was none.
    """

    results: list[PolicyResult] = field(default_factory=list)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    references: list[list[torch.Tensor]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: str = ""


def moe_trainer(flags: tuple[str, ...], world_size: int) -> contextlib.AbstractContextManager[Any]:
    """Open a small mixture of experts on this rank."""
    run = parse([*FLAGS, *MOE, "--lr", "1e-2", "--seq-length", str(CONFIG.max_tokens_per_microbatch), *flags])
    return equality.open_trainer(run, validate(run, world_size))


def everything(parts: Any) -> dict[str, np.ndarray]:
    """Parameters, buffers that are not saved, too, and optimizers of this rank, their gathers finished."""
    parts.built.model.disable_forward_pre_hook()
    parts.built.model.enable_forward_pre_hook()
    found = exact_state(parts)
    return found | {f"buffer {name}": bits(value) for name, value in parts.built.model.named_buffers()}


def updates(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[Updated, Updated]:
    """The same two updates without a reference, and with one that is the policy at the start and has no weight."""
    plain, watched = Updated(), Updated()
    with moe_trainer(flags, world_size) as parts:
        trainer = PolicyTrainer(parts, CONFIG, VOCAB_SIZE, pad_token_id=0)
        plain.results = [trainer.update(completions(step)) for step in range(2)]
        plain.state = everything(parts)
    with moe_trainer(flags, world_size) as parts:
        reference = ReferencePolicy(parts.built, parts.platform.device)
        trainer = PolicyTrainer(parts, CONFIG, VOCAB_SIZE, pad_token_id=0, reference=reference)
        own = trainer.microbatches(completions(0))
        watched.references.append(trainer.old_log_probs(own))
        for step in range(2):
            with reference.in_place():
                watched.references.append(trainer.old_log_probs(own))
            watched.results.append(trainer.update(completions(step)))
        with reference.in_place():
            watched.references.append(trainer.old_log_probs(own))
        watched.state = everything(parts)
    return plain, watched


def save(rank: int, flags: tuple[str, ...], world_size: int, folder: str, iteration: int = 3,
         config: RlConfig = CONFIG) -> None:
    """A checkpoint of the model with other weights, 1.1 times those of every test."""
    with moe_trainer((*flags, "--save", folder), world_size) as parts:
        state = _state(parts)
        state.source = find_checkpoint(state)
        reference_policy(state, model_provider("causal_lm"), config, parts.watchdog, resumed=False)
        with torch.no_grad():
            for parameter in parts.built.model.parameters():
                parameter.mul_(1.1)
        parts.optimizer.reload_model_params()
        saver = Saver(state, parts.watchdog)
        saver.save(Progress(iteration, 8 * iteration, 0))
        saver.finish()


def update_from(rank: int, flags: tuple[str, ...], world_size: int, config: RlConfig, resumed: bool = False,
                other: bool = False) -> Updated:
    """Take one update with the reference that the flags name.

    Args:
        rank: this process.
        flags: flags of the run.
        world_size: number of processes.
        config: the algorithm.
        resumed: the weights are not those that the run started from.
        other: take `other_reference` instead.
    """
    done = Updated()
    with moe_trainer(flags, world_size) as parts:
        before = everything(parts)
        try:
            if other:
                reference: ReferencePolicy | None = policy_updates.other_reference(parts)
            else:
                state = _state(parts)
                if parts.config.checkpoint.save is not None:
                    state.source = find_checkpoint(state)
                reference, done.lines = reference_policy(
                    state, model_provider("causal_lm"), config, parts.watchdog, resumed=resumed)
        except (ValueError, ReportedElsewhereError) as error:
            done.error = f"{type(error).__name__}: {error}"
            return done
        assert all(np.array_equal(value, before[name]) for name, value in everything(parts).items())
        trainer = PolicyTrainer(parts, config, VOCAB_SIZE, pad_token_id=0, reference=reference)
        done.results = [trainer.update(completions(0))]
        done.state = everything(parts)
    return done


def update_hf(rank: int, name: str, policy: str, reference: str, layout: tuple[str, ...], world_size: int,
              config: RlConfig, rewards: Sequence[float] | None = None) -> Updated:
    """Take one update of a saved model, with another as the reference.

    Args:
        rank: this process.
        name: name of `hf_families.MODELS`.
        policy: folder of the policy.
        reference: folder of the reference.
        layout: flags.
        world_size: number of processes.
        config: the algorithm; --ref-load-hf is added where it has a --kl-coeff.
        rewards: rewards of the completions; None: their own.
    """
    done = Updated()
    flags = hf_families.flags_of(name, policy, ("--micro-batch-size", "1", *layout, "--seq-length",
                                                str(config.max_tokens_per_microbatch)))
    asked = completions(0)
    if rewards is not None:
        asked = [replace(each, reward=reward) for each, reward in zip(asked, rewards, strict=True)]
    with hf_families.trainer_of(flags, world_size) as parts:
        hf_families.load(parts, model=policy)
        parts.optimizer.reload_model_params()
        if config.kl_coeff:
            config = replace(config, ref_load_hf=reference)
        found, done.lines = reference_policy(_state(parts), model_provider(parts.config.model.model_provider), config,
                                             parts.watchdog, resumed=False)
        trainer = PolicyTrainer(parts, config, hf_families.VOCAB_SIZE, pad_token_id=0, reference=found)
        done.results = [trainer.update(asked)]
        done.state = everything(parts)
    return done


def save_hf(rank: int, name: str, policy: str, reference: str) -> None:
    """Save a model, and one with other weights."""
    model = hf_families.build_hf(name)
    model.save_pretrained(policy)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(reference)


def hf_log_probs(rank: int, folder: str, temperature: float) -> list[torch.Tensor]:
    """Log-probs of the tokens of each completion by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for each in completions(0):
            ids = torch.tensor([(*each.prompt_ids, *each.token_ids)])
            scores = (model(ids).logits[0, :-1].double() / temperature).log_softmax(-1)
            picked = scores.gather(-1, ids[0, 1:, None]).squeeze(-1)
            found.append(picked[len(each.prompt_ids) - 1:])
    return found


def _state(parts: Any) -> RunState:
    return RunState(parts.config, parts.grids, parts.platform, parts.built, parts.optimizer, parts.scheduler)


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
    found = pool.run(updates, flags, world_size, world_size=world_size)
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
    pool.run(save_hf, "qwen3-moe", *folders, world_size=1)
    policy, reference = (pool.run(hf_log_probs, folder, CONFIG.temperature, world_size=1)[0]
                         for folder in folders)
    ratios = [mine - theirs for mine, theirs in zip(policy, reference, strict=True)]
    assert max(each.abs().max().item() for each in ratios) < 10, "nothing is clamped"
    k3 = torch.cat([torch.exp(-each) - 1 + each for each in ratios]).mean().item()
    assert k3 > 0.01
    flags = HF_LAYOUTS[layout]
    config = dataclasses.replace(CONFIG, kl_coeff=0.3, kl_in="reward", kl_type="k1")
    for found in pool.run(update_hf, "qwen3-moe", *folders, flags, 2,
                          dataclasses.replace(config, kl_in="loss", kl_type="k3"), world_size=2):
        assert found.results[0].metrics["reference_kl"] == pytest.approx(k3, rel=1e-4)
        assert found.lines == [f"reference policy: weights from {folders[1]}"]
    penalties = [0.3 * each.sum().item() for each in ratios]
    rewards = [each.reward - penalty for each, penalty in zip(completions(0), penalties, strict=True)]
    before = [each.reward for each in completions(0)]
    prompts = [each.prompt for each in completions(0)]
    assert not torch.allclose(advantages(rewards, prompts, "grpo"), advantages(before, prompts, "grpo"), atol=0.1)
    by_hand = pool.run(update_hf, "qwen3-moe", *folders, flags, 2, CONFIG, rewards, world_size=2)
    for mine, expected in zip(pool.run(update_hf, "qwen3-moe", *folders, flags, 2, config, world_size=2),
                              by_hand, strict=True):
        figures = dict(mine.results[0].metrics)
        assert figures.pop("kl_penalty") == pytest.approx(sum(penalties) / len(penalties), rel=1e-4)
        assert figures.pop("reference_kl") == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-4)
        assert figures == pytest.approx(expected.results[0].metrics, rel=1e-4, abs=1e-5)
        assert mine.results[0].grad_norm == pytest.approx(expected.results[0].grad_norm, rel=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_another_layout_is_the_reference_and_nothing_else_changes(pool: WorkerPool, tmp_path) -> None:
    folder = str(tmp_path / "saved")
    pool.run(save, ("--llm-tp", "2", "--sequence-parallel", "--bf16"), 2, folder, world_size=2)
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)
    flags = ("--llm-dp", "2", "--llm-ep", "2", "--bf16", *OVERLAP)
    expected = pool.run(update_from, flags, 2, config, False, True, world_size=2)
    config = dataclasses.replace(config, ref_load=folder)
    for resumed in (False, True):
        for mine, wanted in zip(pool.run(update_from, flags, 2, config, resumed, world_size=2), expected,
                                strict=True):
            assert not mine.error and mine.lines[0].startswith(f"reference policy: weights from {folder}/iter_0000003")
            assert mine.results[0].metrics == wanted.results[0].metrics
            assert mine.results[0].metrics["reference_kl"] > 1e-3
            assert all(np.array_equal(value, wanted.state[name]) for name, value in mine.state.items())


@pytest.mark.slow
def test_a_run_started_again_has_the_reference_of_its_first_start(pool: WorkerPool, tmp_path) -> None:
    """--load --finetune names the reference, also once the run goes on from --save."""
    began, own = str(tmp_path / "began"), str(tmp_path / "own")
    pool.run(save, ("--llm-dp", "2"), 2, began, world_size=2)
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)
    flags = ("--llm-dp", "2", "--load", began, "--ckpt-step", "3")
    pool.run(save, (*flags, "--finetune"), 2, own, world_size=2)
    # The weights that it began with are 1.1 times those that this test's runs have.
    for found in pool.run(update_from, (*flags, "--finetune", "--load-hf", "nowhere", "--save", own), 2,
                          config, True, world_size=2):
        assert (found.error, found.lines) == ("", [f"reference policy: weights from {began}/iter_0000003"])
        assert found.results[0].metrics["reference_kl"] > 1e-3
    # Without --finetune it began in the middle of a run.
    first, _ = pool.run(update_from, (*flags, "--save", own), 2, config, True, world_size=2)
    assert first.error.startswith(f"ValueError: --kl-coeff 0.3 with --load {began}: the run goes on from its")


@pytest.mark.slow
def test_a_folder_that_grows_does_not_change_the_reference(pool: WorkerPool, tmp_path) -> None:
    folders = began, named, own = [str(tmp_path / name) for name in ("began", "named", "own")]
    for folder in folders[:2]:
        pool.run(save, ("--llm-dp", "2"), 2, folder, world_size=2)
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)
    configs = {began: config, named: dataclasses.replace(config, ref_load=named)}
    flags = ("--llm-dp", "2", "--load", began, "--finetune")
    pool.run(save, flags, 2, own, 3, configs[named], world_size=2)
    for folder in folders[:2]:
        pool.run(save, ("--llm-dp", "2"), 2, folder, 4, world_size=2)
        first, other = pool.run(update_from, (*flags, "--save", own), 2, configs[folder], True, world_size=2)
        assert (first.error, first.lines) == ("", [f"reference policy: weights from {folder}/iter_0000003"])
        assert other.lines == first.lines
    shutil.rmtree(tmp_path / "named" / "iter_0000003")
    first, _ = pool.run(update_from, (*flags, "--save", own), 2, configs[named], True, world_size=2)
    assert first.error.startswith(f"ValueError: --ref-load {named}: the reference policy of this run has the weights "
                                  "of iter_0000003, which is not there any more; put it back")


@pytest.mark.slow
def test_a_reference_that_nobody_can_know_or_that_does_not_fit_is_refused(pool: WorkerPool, tmp_path) -> None:
    config = dataclasses.replace(CONFIG, kl_coeff=0.3)

    def error_of(config, *flags, resumed=False):
        first, *_ = pool.run(update_from, flags, 2, config, resumed, world_size=2)
        assert not first.results
        return first.error

    flags = ("--llm-dp", "2", "--load", "own")
    assert error_of(config, *flags, resumed=True).startswith(
        "ValueError: --kl-coeff 0.3 with --load own: the run goes on from its checkpoint, which does not hold the "
        "weights that it started from, the reference policy. Name them: --ref-load FOLDER")
    nothing = dataclasses.replace(config, ref_load=str(tmp_path / "nothing"))
    assert error_of(nothing, "--llm-dp", "2") == f"ValueError: --ref-load {tmp_path / 'nothing'} does not exist"
    pool.run(save, ("--llm-pp", "2", "--num-layers", "4"), 2, str(tmp_path / "deeper"), world_size=2)
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
