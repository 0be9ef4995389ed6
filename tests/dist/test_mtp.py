"""Multi-token prediction on several layouts against plain PyTorch: losses, gradients, parameters, what is masked.

Rows are made here, with placeholders among their tokens, for which no encoder is needed: the decoder then reads their
word embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from mimo.config.validate import num_microbatches, validate
from mimo.data.batch import Microbatch, TextBatch, with_part
from mimo.data.collate import packed_sequences, positions_of
from mimo.model.mtp import MtpBlock, MtpInputs, MtpLayer, mtp_losses
from mimo.protocols import LANGUAGE
from tests.support import equality
from tests.support.equality import TOLERANCE, find_differences
from tests.support.global_state import assemble, read_gradients, read_parameters, worst_errors
from tests.support.marks import fast_only
from tests.support.spawn import WorkerPool

SEQ_LENGTH = 24
VOCAB_SIZE = 40
IMAGE, PAD = 39, 0
GLOBAL_BATCH = 4
FACTOR = 0.4
BASE = f"""--model-provider providers.nemotron_h:provider --dataset-provider mock --device cpu --no-bf16
--transformer-impl local --seq-length {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH} --micro-batch-size 1
--train-iters 3 --lr-decay-style constant --lr 2e-3 --weight-decay 0.1 --adam-eps 1e-5 --clip-grad 0.5
--num-generations 0 --watchdog-timeout-s 60 --mock-max-length 20 --hidden-size 32 --num-attention-heads 4
--num-query-groups 2 --kv-channels 8 --ffn-hidden-size 48 --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 16
--max-position-embeddings 64 --mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8
--mtp-loss-scaling-factor {FACTOR}""".split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16"


@dataclass(frozen=True)
class Sequence:
    """One sample.

    Attributes:
        tokens: its tokens.
        targets: whether each is one that is to be predicted; never a placeholder.
    """

    tokens: list[int]
    targets: list[bool]


@dataclass(frozen=True)
class Rows:
    """How rows are made and deliberately damaged.

    Attributes:
        packed: three sequences a row instead of one.
        image_label: stands in the labels for the placeholder.
        mistake: a mistake to make, one of `mistakes`.
    """

    packed: bool = False
    image_label: int | None = None
    mistake: str = ""


@dataclass
class MtpOutcome(equality.Outcome):
    """Also the reported losses of each step, depth by depth; empty on ranks that report none."""

    mtp_losses: list[list[float]] = field(default_factory=list)


def parse_config(*flags: str) -> Any:
    """Return the small model with more flags."""
    return equality.parse([*BASE, *flags])


def make_rows(step: int, packed: bool) -> list[list[Sequence]]:
    """Return the rows of a global batch: lists of one sequence, or of three."""
    generator = np.random.default_rng(100 + step)
    return [[_sequence(generator, 7 if packed else 16) for _ in range(3 if packed else 1)]
            for _ in range(GLOBAL_BATCH)]


def _sequence(generator: np.random.Generator, longest: int) -> Sequence:
    length = int(generator.integers(longest - 2, longest + 1))
    tokens = generator.integers(1, IMAGE, length)
    start = int(generator.integers(1, length - 3))
    tokens[start:start + 2] = IMAGE
    targets = (tokens != IMAGE) & (generator.random(length) < 0.8)
    return Sequence(tokens.tolist(), targets.tolist())


def microbatch(rows: list[list[Sequence]], how: Rows) -> Microbatch:
    """Rows as a language rank holds them."""
    ids = torch.full((len(rows), SEQ_LENGTH), PAD)
    labels, mask = ids.clone(), torch.zeros(ids.shape)
    ends = []
    for index, row in enumerate(rows):
        start = 0
        for sequence in row:
            stop = start + len(sequence.tokens)
            ids[index, start:stop] = torch.tensor(sequence.tokens)
            labels[index, start:stop - 1] = torch.tensor(sequence.tokens[1:])
            mask[index, start:stop - 1] = torch.tensor(sequence.targets[1:]).float()
            ends.append(stop)
            start = stop
    if how.image_label is not None:
        labels[labels == IMAGE] = how.image_label
    sequences = packed_sequences(np.array(ends), SEQ_LENGTH) if how.packed else None
    row_of, place_of = (ids == IMAGE).nonzero(as_tuple=True)
    return Microbatch(TextBatch(
        keys=tuple(f"sample-{index}" for index in range(len(rows))), token_counts={"vision": (0,) * len(rows)},
        input_ids=ids, labels=labels, loss_mask=mask,
        position_ids=positions_of(sequences, SEQ_LENGTH).expand(ids.shape).contiguous(),
        placeholders={"vision": place_of * len(rows) + row_of}, num_tokens=ids.numel(), packed=sequences), {})


def run_layout(rank: int, flags: tuple[str, ...], world_size: int, how: Rows) -> MtpOutcome:
    """Train NUM_STEPS steps on this rank of a layout; `flags` come after the small model's.

    With --save, the first step is saved; with --load, training goes on from there.
    """
    from mimo.checkpoint.save import Saver
    from mimo.registry import model_provider
    from mimo.training.setup import run_state, start
    from mimo.training.step import train_step

    config = parse_config(*flags)
    layout = validate(config, world_size)
    outcome = MtpOutcome()
    with equality.open_training(config, layout, rank) as (parts, loader):
        state = run_state(parts, loader)
        progress, _ = start(state, model_provider(config.model.model_provider), loader, parts.watchdog)
        lane, lanes = layout.language.coordinates(rank)["dp"], layout.language.dp
        equality.note_gradients(parts, outcome)
        with mistakes()[how.mistake]:
            while progress.iteration < equality.NUM_STEPS:
                rows = make_rows(progress.iteration, how.packed)[lane::lanes]
                size = len(rows) // num_microbatches(config)
                whole = [microbatch(rows[start:start + size], how).text for start in range(0, len(rows), size)]
                place = layout.language.coordinates(rank)["cp"]
                microbatches = [Microbatch(with_part(text, layout.language.cp, place), {}) for text in whole if text]
                result = train_step(parts, microbatches, force_all_reduce=progress.iteration == 0)
                assert result.success
                progress.iteration += 1
                outcome.losses.append(result.loss)
                outcome.grad_norms.append(result.grad_norm)
                outcome.mtp_losses.append(
                    list(mtp_losses(parts.built.model.mtp, parts.grids.collections[LANGUAGE]).values()))
                if config.checkpoint.save is not None and progress.iteration == 1:
                    saver = Saver(state, parts.watchdog)
                    saver.save(replace(progress))
                    saver.finish()
        # An overlapped gather of the last step's parameters would only happen in the next forward pass.
        parts.built.model.disable_forward_pre_hook()
        outcome.parameters = read_parameters(parts.built.model)
    return outcome


def load_weights_alone(rank: int, flags: tuple[str, ...], world_size: int, folder: str) -> list[str]:
    """Load a checkpoint with --finetune and again as a reference policy does; notes of the first."""
    from mimo.checkpoint import paths
    from mimo.checkpoint.load import load_checkpoint, load_weights
    from mimo.training.setup import run_state

    config = parse_config(*flags, "--load", folder, "--finetune")
    layout = validate(config, world_size)
    with equality.open_training(config, layout, rank) as (parts, loader):
        state, found = run_state(parts, loader), paths.find(Path(folder), None)
        assert found is not None
        loaded = load_checkpoint(state, found, parts.watchdog)
        load_weights(state, found, parts.watchdog, "--ref-load")
    return loaded.notes


def run_loop(rank: int, flags: tuple[str, ...], world_size: int, run_dir: str) -> None:
    """The whole training loop on this rank, on mock data; `flags` are all."""
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from mimo.registry import dataset_provider, model_provider
    from mimo.training.loop import TrainingLoop

    config = equality.parse([*flags, "--run-dir", run_dir])
    platform = current_platform()
    with Grids(validate(config, world_size), platform.backend) as grids:
        TrainingLoop(config, grids, platform, model_provider(config.model.model_provider),
                     dataset_provider("mock")).run()


def run_plain(rank: int, flags: tuple[str, ...], packed: bool = False) -> MtpOutcome:
    """The same training on one process: one sequence at a time, targets found by counting, torch's optimizer.

    The layers are the trainer's; how they are combined, the losses and their means are written out here.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    config = parse_config(*flags)
    layout = validate(config, 1)
    whole = replace(config, optim=replace(config.optim, use_distributed_optimizer=False))
    with equality.open_trainer(whole, layout) as parts:
        model = equality._unwrapped(parts.built.model)
        depths = config.model_family.num_mtp_depths
        optimizer = equality._torch_adam(config, model)
        outcome = MtpOutcome()
        for step in range(equality.NUM_STEPS):
            units = [unit for row in make_rows(step, packed) for unit in (_alone(row) if packed else [_padded(row[0])])]
            places = [[targets_of(unit, depth) for depth in range(depths + 1)] for unit in units]
            counts = [sum(len(found[depth]) for found in places) for depth in range(depths + 1)]
            MoEAuxLossAutoScaler.set_loss_scale(torch.full((1,), 1 / counts[0]))
            sums = torch.zeros(depths + 1)
            for unit, found in zip(units, places, strict=True):
                losses = plain_losses(model.language_model, unit, found)
                weights = torch.tensor([1.0, *[FACTOR / depths] * depths]) / torch.tensor(counts)
                loss = (losses * weights).sum()
                if loss.requires_grad:  # padding of a packed row has no target
                    loss.backward()
                sums += losses.detach()
            parameters = list(model.parameters())
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            _move_expert_biases(model, config.model_family.moe_router_bias_update_rate)
            if step == 0:
                outcome.gradients = read_gradients(model)
            main, *further = (sums / torch.tensor(counts)).tolist()
            outcome.losses.append(main)
            outcome.mtp_losses.append(further)
            outcome.grad_norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.optim.clip_grad).item())
            optimizer.step()
            optimizer.zero_grad()
        outcome.parameters = read_parameters(model)
    return outcome


def _padded(sequence: Sequence) -> Sequence:
    rest = SEQ_LENGTH - len(sequence.tokens)
    return Sequence(sequence.tokens + [PAD] * rest, sequence.targets + [False] * rest)


def _alone(row: list[Sequence]) -> list[Sequence]:
    """Return the sequences of a packed row, its padding too."""
    rest = SEQ_LENGTH - sum(len(sequence.tokens) for sequence in row)
    return [*row, Sequence([PAD] * rest, [False] * rest)]


def targets_of(sequence: Sequence, depth: int) -> list[int]:
    """Positions from which the token `depth + 1` on is to be predicted, everything on the way there being text."""
    found = []
    for position in range(len(sequence.tokens) - depth - 1):
        target = position + depth + 1
        between = sequence.tokens[position + 1:target]
        if sequence.targets[target] and IMAGE not in between:
            found.append(position)
    return found


def plain_losses(language: Any, sequence: Sequence, places: list[list[int]]) -> Tensor:
    """Sum of the losses of the decoder and of each depth of multi-token prediction, `[1 + depths]`."""
    tokens, length = sequence.tokens, len(sequence.tokens)
    table = language.embedding.word_embeddings.weight
    output = table if language.share_embeddings_and_output_weights else language.output_layer.weight

    def loss_of(hidden: Tensor, depth: int) -> Tensor:
        log_probabilities = (hidden[:, 0] @ output.t())[:, :VOCAB_SIZE].log_softmax(-1)
        terms = [-log_probabilities[place, tokens[place + depth + 1]] for place in places[depth]]
        return torch.stack([torch.zeros(()), *terms]).sum()

    hidden = language.decoder(hidden_states=table[torch.tensor(tokens)][:, None], attention_mask=None)
    losses = [loss_of(hidden, 0)]
    for depth in range(1, len(places)):
        layer = language.mtp.layers[depth - 1]
        read = tokens[depth:] + [0] * min(depth, length)
        rows = [table[token] if place + depth < length and token != IMAGE else table[token].detach()
                for place, token in enumerate(read[:length])]
        joined = torch.cat([layer.enorm(torch.stack(rows)[:, None]), layer.hnorm(hidden)], dim=-1)
        inner = layer.mtp_model_layer(joined @ layer.eh_proj.weight.t(), attention_mask=None)
        hidden = layer.final_layernorm(inner)
        losses.append(loss_of(hidden, depth))
    return torch.stack(losses)


@torch.no_grad()
def _move_expert_biases(model: Any, rate: float) -> None:
    for part in model.modules():
        if "expert_bias" in part._buffers:
            load = part.local_tokens_per_expert
            part.expert_bias += rate * torch.sign(load.mean() - load)
            load.zero_()


def mistakes() -> dict[str, Any]:
    """Contexts in which one thing of multi-token prediction is wrong, by name; with an empty name nothing is."""
    right, begin_step, forward = MtpInputs.target_masks, MtpBlock.begin_step, MtpBlock.forward

    def without_loss_mask(inputs: MtpInputs, depths: int) -> list[Tensor]:
        return right(replace(inputs, loss_mask=torch.ones_like(inputs.loss_mask)), depths)

    def without_path(inputs: MtpInputs, depths: int) -> list[Tensor]:
        return right(replace(inputs, is_text=torch.ones_like(inputs.is_text)), depths)

    def with_one_divisor(block: MtpBlock, targets: Tensor) -> None:
        begin_step(block, targets[:1].expand_as(targets))

    def joined(text: TextBatch) -> MtpInputs:
        return MtpInputs(text.input_ids, text.labels, text.loss_mask, text.input_ids != IMAGE, None)

    def with_gradient(block: MtpBlock, hidden: Tensor, inputs: MtpInputs, *rest: Any) -> list[Tensor]:
        return forward(block, hidden, replace(inputs, is_text=torch.ones_like(inputs.is_text)), *rest)

    return {"": nullcontext(), "no loss mask": mock.patch.object(MtpInputs, "target_masks", without_loss_mask),
            "no path": mock.patch.object(MtpInputs, "target_masks", without_path),
            "own divisor left out": mock.patch.object(MtpBlock, "begin_step", with_one_divisor),
            "placeholders train": mock.patch.object(MtpBlock, "forward", with_gradient),
            "sequences joined": mock.patch.object(MtpInputs, "of", joined)}


# name -> further flags
MODELS = {"one-depth": f"--hybrid-layer-pattern M*/*E --moe-aux-loss-coeff 0.01 {EXPERTS}",
          "two-depths": f"--hybrid-layer-pattern ME*-/M*E/M*E --moe-aux-loss-coeff 0.01 {EXPERTS}",
          "tied": "--hybrid-layer-pattern *-/-* --no-untie-embeddings-and-output-weights",
          "packed": f"--hybrid-layer-pattern ME*-/*M/*M --moe-aux-loss-coeff 0 {EXPERTS}"}
# name -> (ranks, flags)
LAYOUTS = {"one-process": (1, "--micro-batch-size 2"), "pp2": (2, "--llm-pp 2 --logits-chunk-size 7"),
           "tp2": (2, "--llm-tp 2 --sequence-parallel"), "dp2-ep2": (2, "--llm-dp 2 --llm-ep 2"),
           "cp2": (2, "--llm-cp 2"),
           "cp2-tp2": (4, "--llm-cp 2 --llm-tp 2 --sequence-parallel --micro-batch-size 2 --logits-chunk-size 9"),
           "recomputed-tp2-pp2": (4, "--llm-tp 2 --llm-pp 2 --sequence-parallel --recompute full"),
           "overlapped-dp2-pp2": (4, "--llm-dp 2 --llm-pp 2 --overlap-grad-reduce --overlap-param-gather")}
# Overlapped, the optimizer's shard of the gradients alone is reduced: parameters and norms are compared.
SHARDED = {"overlapped-dp2-pp2"}
CASES = [("two-depths", layout) for layout in LAYOUTS]
CASES += [("one-depth", "one-process"), ("tied", "one-process"), ("tied", "pp2"), ("tied", "overlapped-dp2-pp2"),
          ("packed", "tp2"), ("packed", "pp2")]


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Callable[[str], MtpOutcome]:
    """Train a model in plain PyTorch."""
    @cache
    def of(model: str) -> MtpOutcome:
        outcome: MtpOutcome
        (outcome,) = pool.run(run_plain, tuple(MODELS[model].split()), model == "packed", world_size=1)
        return outcome

    return of


def run(pool: WorkerPool, model: str, layout: str = "one-process", *more: str,
        **differently: Any) -> list[MtpOutcome]:
    """Outcomes of the ranks, with more flags or rows made differently."""
    world_size, flags = LAYOUTS[layout]
    if model == "packed":
        flags = flags.replace("--micro-batch-size 2", "")
    return pool.run(run_layout, (*MODELS[model].split(), *flags.split(), *more), world_size,
                    Rows(packed=model == "packed", **differently), world_size=world_size)


@pytest.mark.parametrize(("model", "layout"), fast_only([("two-depths", "pp2"), ("packed", "tp2")], CASES))
def test_training_equals_plain_pytorch(pool: WorkerPool, plain: Any, model: str, layout: str) -> None:
    outcomes, expected = run(pool, model, layout), plain(model)
    found = find_differences(expected, outcomes)
    assert not [difference for difference in found if layout not in SHARDED or not difference.startswith("gradient")]
    reporting = [outcome.mtp_losses for outcome in outcomes if outcome.mtp_losses[0]]
    assert len(reporting) == len(outcomes) // (2 if "pp2" in layout else 1)  # the last stage alone
    for losses in reporting:
        assert losses == [pytest.approx(step, rel=TOLERANCE) for step in expected.mtp_losses]


def memory_of_embeddings(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[int, int]]:
    """Train and return the bytes of the embeddings that each depth adds, and those of the memory behind them."""
    found, forward = [], MtpLayer.forward

    def noted(layer: MtpLayer, hidden: Tensor, embedded: Tensor, *rest: Any) -> Tensor:
        found.append((embedded.nbytes, embedded.untyped_storage().nbytes()))
        return forward(layer, hidden, embedded, *rest)

    with mock.patch.object(MtpLayer, "forward", noted):
        run_layout(rank, flags, world_size, Rows())
    return found


def test_a_depth_keeps_no_more_than_this_ranks_part_of_the_row(pool: WorkerPool) -> None:
    flags = (*MODELS["two-depths"].split(), *LAYOUTS["tp2"][1].split())
    for found in pool.run(memory_of_embeddings, flags, 2, world_size=2):
        assert found and all(own == kept for own, kept in found)


def test_label_of_a_placeholder_has_no_effect(pool: WorkerPool, plain: Any) -> None:
    assert not find_differences(plain("two-depths"), run(pool, "two-depths", image_label=5))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mistake"), [
    ("two-depths", "no loss mask"), ("two-depths", "no path"), ("two-depths", "own divisor left out"),
    ("two-depths", "placeholders train"), ("packed", "sequences joined")])
def test_a_mistake_is_felt(pool: WorkerPool, plain: Any, model: str, mistake: str) -> None:
    found = find_differences(plain(model), run(pool, model, mistake=mistake))
    assert any(difference.startswith("gradient mtp.") or "embedding" in difference for difference in found)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout", "other"), [
    ("two-depths", "pp2", "tp2"), ("two-depths", "dp2-ep2", "pp2"), ("tied", "pp2", "one-process")])
def test_checkpoint_goes_on_on_another_layout(pool, plain, tmp_path, model, layout, other):
    run(pool, model, layout, "--save", str(tmp_path))
    resumed, expected = run(pool, model, other, "--load", str(tmp_path)), plain(model)
    for outcome in resumed:
        assert outcome.losses == pytest.approx(expected.losses[1:], rel=TOLERANCE)
    errors = worst_errors(assemble(expected.parameters), [outcome.parameters for outcome in resumed])
    assert max(errors.values()) < TOLERANCE
    assert any("mtp.layers.1.eh_proj" in name for name in errors) == (model == "two-depths")


@pytest.mark.slow
def test_weights_load_without_multi_token_prediction(pool: WorkerPool, tmp_path: Path) -> None:
    run(pool, "two-depths", "one-process", "--save", str(tmp_path))
    flags = ("--hybrid-layer-pattern", "ME*-", "--mtp-loss-scaling-factor", "0", *EXPERTS.split())
    for notes in pool.run(load_weights_alone, (*flags, "--llm-pp", "2"), 2, str(tmp_path), world_size=2):
        (note,) = [note for note in notes if "multi-token" in note]
        assert note.startswith("multi-token prediction (") and note.endswith(" is passed over: this run has none")
    left = r"in the checkpoint, but not in this run \(\d+\):\n(.*\n)*? +language\.mtp\."
    with pytest.raises(RuntimeError, match=left):
        pool.run(run_layout, (*flags, "--load", str(tmp_path)), 1, Rows(), world_size=1)


def test_run_reports_the_losses(pool: WorkerPool, tmp_path: Path) -> None:
    """The whole loop, evaluation and MoE losses of several stages included."""
    flags = (*BASE, *MODELS["two-depths"].split(), *"--llm-pp 2 --eval-iters 1 --moe-per-layer-logging".split())
    pool.run(run_loop, flags, 2, str(tmp_path), world_size=2)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "lm loss" in step and "grad-norm" in step]
    assert len(trained) == 3
    for step in trained:
        # Untrained, every one is near that of guessing.
        assert all(2 < step[f"mtp_{depth} loss"] < 6 for depth in (1, 2))
        # Four layers, and an entry for each depth; those without experts are 0.
        assert [step[f"moe/seq_load_balancing_loss_layer_{entry}"] > 0 for entry in range(6)] == [
            False, True, False, False, True, True]
        # The mean is over the three layers with experts, not over all layers.
        by_layer = [step[f"moe/seq_load_balancing_loss_layer_{entry}"] for entry in range(6)]
        assert step["seq_load_balancing_loss"] == pytest.approx(sum(by_layer) / 3)


def test_unread_tokens_are_no_targets() -> None:
    """Rows have predictions that only the path masks: later than an image token, of a text token."""
    rows = [row[0] for row in make_rows(0, packed=False)]
    assert all(IMAGE in row.tokens for row in rows)
    for depth in (1, 2):
        kept = sum(len(targets_of(row, depth)) for row in rows)
        without_path = sum(sum(row.targets[depth + 1:]) for row in rows)
        assert 0 < kept < without_path
