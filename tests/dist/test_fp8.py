"""FP8 products: rounding, which layers take part, sizes, and runs with the emulation on several layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mimo.config.validate import validate
from mimo.protocols import Fp8
from tests.support.equality import MOE, parse_config
from tests.support.marks import fast_only
from tests.support.resuming import Run, assert_same_bits, refusal, train
from tests.support.spawn import WorkerPool
from tests.support.weights import HYBRID

FP8 = ("--fp8-format", "hybrid", "--encoder-fp8-format", "e4m3")
LOGITS = ("--fp8-format", "hybrid", "--fp8-output-proj")
TIED = (*LOGITS, "--no-untie-embeddings-and-output-weights")
# Models whose widths plans have to know, with tensor parallelism and with experts that ranks divide.
LANGUAGE_OVER_TWO = "--llm-tp 2 --sequence-parallel"
OVER_TWO = f"--layout colocated --encoder-tp 2 {LANGUAGE_OVER_TWO}"
QWEN = f"""{OVER_TWO} --num-query-groups 2 --vision-patch-size 4 --vision-hidden-size 16 --vision-num-layers 2
--vision-num-attention-heads 2 --vision-ffn-hidden-size 20 --image-token-id 95 --hidden-size 32 --num-attention-heads 4
--num-layers 2 --ffn-hidden-size 48 --vocab-size 96 --max-position-embeddings 4096 --rotary-base 100"""
WIDTHS = {
    "dense": OVER_TWO,
    "fewer-key-heads-than-tp": f"{OVER_TWO} --num-query-groups 1",
    "experts": f"{OVER_TWO} {' '.join(MOE)} --llm-expt-tp 2",
    "hybrid": f"{LANGUAGE_OVER_TWO} {' '.join(HYBRID)} --llm-expt-tp 2",
    "latent-attention": f"--model-provider deepseek_v3 {LANGUAGE_OVER_TWO} --vocab-size 90 --hidden-size 32 "
                        "--ffn-hidden-size 48 --moe-ffn-hidden-size 16 --num-layers 2 --num-attention-heads 4 "
                        "--moe-shared-expert-intermediate-size 32 --num-experts 8 --kv-lora-rank 16 --q-lora-rank 24 "
                        "--qk-pos-emb-head-dim 8 --v-head-dim 12 --qk-head-dim 16 --moe-router-num-groups 1 "
                        "--moe-router-group-topk 1 --moe-router-topk 2 --first-k-dense-replace 1",
    "radio": f"--model-provider nemotron-moe-vlm-tiny --mock-image-size 32 {OVER_TWO}",
    "qwen2.5-vl": f"--model-provider qwen2_5_vl --mrope-section 1 2 1 {QWEN} --vision-window-size 16 "
                  "--vision-full-attention-layers 1",
    "qwen3-vl": f"--model-provider qwen3_vl --mrope-section 4 2 2 --kv-channels 16 {QWEN} "
                "--vision-num-position-embeddings 25 --vision-deepstack-layers 0 1",
}
BLOCKWISE = ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--hidden-size", "128", "--ffn-hidden-size", "128",
             "--kv-channels", "64", "--num-layers", "2")


def rounding_facts(rank: int) -> None:
    from mimo.model.fp8 import E4M3, E5M2, rounded

    values = torch.randn(256, 256)
    for dtype, error in ((E4M3, 2**-4), (E5M2, 2**-3)):
        for recipe in ("tensorwise", "blockwise"):
            for is_weight in (False, True):
                found = rounded(values, dtype, recipe, is_weight=is_weight)
                assert ((found - values).abs() <= error * values.abs() + 0.05).all(), (dtype, recipe)
                torch.testing.assert_close(rounded(found, dtype, recipe, is_weight=is_weight), found)
        for tiny in (1e-37, 1e-42):
            few = torch.full((2, 128), tiny)
            for recipe in ("tensorwise", "blockwise"):
                assert torch.isfinite(rounded(few, dtype, recipe)).all(), (dtype, recipe, tiny)
    values[3, 5] = 1e7
    assert not rounded(values, E4M3, "tensorwise")[200:].any(), "too small beside the largest value"
    for is_weight in (False, True):
        found = rounded(values, E4M3, "blockwise", is_weight=is_weight)
        assert ((found - values)[200:].abs() <= 2**-4 * values[200:].abs() + 0.05).all(), "it is in another block"
    assert not rounded(torch.zeros(4, 128), E4M3, "blockwise").any() and rounded(torch.zeros(0, 8), E4M3, "tensorwise"
                                                                                  ).shape == (0, 8)


def products_are_those_of_rounded_operands(rank: int) -> None:
    from mimo.model.fp8 import E4M3, E5M2, _emulated_product, rounded

    hidden, weight = torch.randn(6, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    gradient = torch.randn(6, 48)
    output = _emulated_product(Fp8("hybrid", "tensorwise", "--fp8-format"), torch.nn.functional.linear, hidden, weight)
    output.backward(gradient)
    left, right = rounded(hidden.detach(), E4M3, "tensorwise"), rounded(weight.detach(), E4M3, "tensorwise")
    coming = rounded(gradient, E5M2, "tensorwise")
    torch.testing.assert_close(output, left @ right.t())
    torch.testing.assert_close(hidden.grad, coming @ right)
    torch.testing.assert_close(weight.grad, coming.t() @ left)


def rows_are_filled_up(rank: int) -> None:
    from mimo.model.fp8 import _with_whole_rows

    linear = torch.nn.Linear(8, 4)

    def whole(hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert hidden.shape[:-1].numel() % 16 == 0
        return linear(hidden), None

    hidden = torch.randn(5, 3, 8, requires_grad=True)
    gradient, found = torch.randn(5, 3, 4), {}
    fp8 = Fp8("hybrid", "tensorwise", "--fp8-format")
    layer = SimpleNamespace(sequence_parallel=False, _fp8_workspaces={})
    for name, call in (("plain", linear), ("padded", lambda rows: _with_whole_rows(layer, fp8, whole, rows)[0])):
        linear.zero_grad()
        hidden.grad = None
        output = call(hidden)
        output.backward(gradient)
        found[name] = [output.detach(), hidden.grad, linear.weight.grad.clone(), linear.bias.grad.clone()]
    torch.testing.assert_close(found["padded"], found["plain"])
    layer.sequence_parallel = True
    with pytest.raises(ValueError, match="with --sequence-parallel: 15 tokens of a microbatch on a rank are not a"):
        _with_whole_rows(layer, fp8, whole, hidden)


def copies_last(rank: int) -> None:
    """The layers stand for those of Transformer Engine, whose copies can be renewed in place."""
    import torch

    from mimo.model import fp8

    class Copy:
        def __init__(self, values: torch.Tensor) -> None:
            self.values = values.detach().clone()

        def quantize_(self, values: torch.Tensor) -> None:
            self.values.copy_(values)

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for linear in model:
        linear._fp8_workspaces = {}
        fp8._HOLDERS.add(linear)
    first, second, unused = model
    for linear in (first, second):
        linear._fp8_workspaces["weight"] = Copy(linear.weight)
    kept, address = first._fp8_workspaces["weight"], first._fp8_workspaces["weight"].values.data_ptr()
    lasting = fp8.LastingCopies(model.modules())
    for _ in range(2):
        with torch.no_grad():
            first.weight += 1
        fp8.forget_weights()
        assert "weight" not in first._fp8_workspaces, "nothing uses the copy of old weights"
        second._fp8_workspaces["weight"] = Copy(second.weight)  # a pass without graphs has made another one
        lasting.renew()
        assert first._fp8_workspaces["weight"] is kept and kept.values.data_ptr() == address
        assert torch.equal(kept.values, first.weight)
        assert second._fp8_workspaces["weight"] is second._fp8_workspaces["lasting"]
    kept.values.zero_()
    lasting.renew()
    assert not kept.values.any(), "an up-to-date copy is not made again"
    assert not unused._fp8_workspaces, "layers without a copy get none"


@pytest.mark.parametrize("facts", [
    rounding_facts, products_are_those_of_rounded_operands, rows_are_filled_up, copies_last])
def test_products(pool: WorkerPool, facts: Any) -> None:
    pool.run(facts, world_size=1)


def quantised_parts(rank: int, flags: tuple[str, ...]) -> set[str]:
    """Names of the linear parts that multiply in FP8, without layer and expert numbers."""
    from tests.support.steps import trainer_of

    with trainer_of(rank, ("--layout", "colocated", *flags), 1) as (parts, _):
        return {".".join(word for word in name.split(".") if not word.isdigit())
                for name, part in parts.built.model.named_modules() if "_forward_impl" in vars(part)}


def test_linear_parts_of_layers_multiply_in_fp8_and_nothing_else(pool: WorkerPool) -> None:
    (found,) = pool.run(quantised_parts, (*FP8, *MOE), world_size=1)
    ends = {name.split("layers.")[-1] for name in found}
    assert ends == {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2",
                    "mlp.experts.local_experts.linear_fc1", "mlp.experts.local_experts.linear_fc2"}
    assert {"modality_submodules" in name for name in found} == {True, False}
    (found,) = pool.run(quantised_parts, ("--fp8-format", "e4m3", *MOE), world_size=1)
    assert found and not any("modality_submodules" in name for name in found)
    (found,) = pool.run(quantised_parts, (*LOGITS, *MOE), world_size=1)
    assert {name for name in found if "layers." not in name} == {"language_model.module.output_layer"}


LAYOUTS = {"llm-dp2": (3, "--llm-dp 2"), "llm-tp2": (3, "--llm-tp 2 --sequence-parallel"),
           "llm-ep2-overlap": (3, "--llm-dp 2 --llm-ep 2 --overlap-grad-reduce"),
           "windows-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
           "recomputed": (2, "--recompute full --encoder-recompute full")}


@pytest.mark.parametrize("layout", fast_only(("llm-tp2", "windows-pp2"), LAYOUTS))
@pytest.mark.parametrize("flags", [FP8, BLOCKWISE, LOGITS, TIED],
                         ids=["tensorwise", "blockwise", "logits", "tied-logits"])
def test_layouts_train_alike_and_like_float32(pool: WorkerPool, layout: str, flags: tuple[str, ...]) -> None:
    if flags == BLOCKWISE and layout == "llm-tp2":
        flags = (*flags, "--num-attention-heads", "4", "--num-query-groups", "4", "--ffn-hidden-size", "256",
                 "--hidden-size", "256", "--seq-length", "256")
    flags = (*flags, *MOE, "--moe-ffn-hidden-size", "256")
    world_size, more = LAYOUTS[layout]
    alone = pool.run(train, ("--layout", "colocated", *flags), 1, 3, world_size=1)[0]
    exact = pool.run(train, ("--layout", "colocated", *flags, "--fp8-format", "none", "--fp8-recipe", "tensorwise",
                             "--encoder-fp8-format", "none", "--no-fp8-output-proj"), 1, 3, world_size=1)[0]
    found = pool.run(train, (*flags, *more.split()), world_size, 3, world_size=world_size)
    for run in found:
        # A sum in another order rounds some values to the next FP8 number, and parts of a vocabulary have their scales.
        np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-2 if "--fp8-output-proj" in flags else 5e-3)
        np.testing.assert_allclose(run.grad_norms, alone.grad_norms, rtol=5e-2)
    np.testing.assert_allclose(alone.losses, exact.losses, rtol=3e-2)
    np.testing.assert_allclose(alone.grad_norms, exact.grad_norms, rtol=0.1)
    assert alone.losses != exact.losses


def test_checkpoints_hold_the_weights_and_go_on_to_the_bit(pool: WorkerPool, tmp_path: Path) -> None:
    flags = (*FP8, "--llm-dp", "2")
    whole: list[Run] = pool.run(train, (*flags, "--save", str(tmp_path)), 3, world_size=3)
    assert_same_bits(whole, pool.run(train, (*flags, "--load", str(tmp_path)), 3, world_size=3))
    plain = pool.run(train, ("--llm-dp", "2", "--load", str(tmp_path)), 3, world_size=3)
    for ours, theirs in zip(whole, plain, strict=True):
        assert ours.exact.keys() == theirs.exact.keys(), "nothing of FP8 is in a checkpoint"


PRIMARY = {"encoder-dp2-llm-dp2": (4, "--encoder-dp 2 --llm-dp 2"), "llm-tp2": (3, "--llm-tp 2 --sequence-parallel"),
           "llm-ep2-overlap": (3, "--llm-dp 2 --llm-ep 2 --overlap-grad-reduce"),
           "windows-pp2": (2, "--layout colocated --encoder-dp 2 --llm-pp 2"),
           "recomputed": (2, "--recompute full --encoder-recompute full"), "frozen-encoder": (2, "--freeze vision"),
           "tied-logits": (2, " ".join(TIED))}


@pytest.mark.parametrize("layout", fast_only(("llm-ep2-overlap", "windows-pp2"), PRIMARY))
@pytest.mark.parametrize("flags", [FP8, BLOCKWISE], ids=["tensorwise", "blockwise"])
def test_primary_weights_compute_the_same_bits(pool: WorkerPool, tmp_path: Path, layout: str, flags: tuple[str, ...]
                                               ) -> None:
    """With and without --fp8-primary-weights, from the start and from each other's checkpoints."""
    if flags == BLOCKWISE and layout == "llm-tp2":
        flags = (*flags, "--num-attention-heads", "4", "--num-query-groups", "4", "--hidden-size", "256",
                 "--seq-length", "256")
    world_size, more = PRIMARY[layout]
    flags = (*flags, *MOE, "--moe-ffn-hidden-size", "256", "--ffn-hidden-size", "256", "--bf16", *more.split())
    primary = (*flags, "--fp8-primary-weights")
    whole, rest = {}, {}
    for name, chosen in (("bf16", flags), ("fp8", (*primary, "--async-save"))):
        saved = (*chosen, "--save", str(tmp_path / name))
        whole[name] = pool.run(train, saved, world_size, 4, world_size=world_size)
    for rank, (ours, theirs) in enumerate(zip(whole["fp8"], whole["bf16"], strict=True)):
        assert ours.losses == theirs.losses and ours.grad_norms == theirs.grad_norms
        wrong = [name for name, value in theirs.exact.items() if not np.array_equal(value, ours.exact[name])]
        assert ours.exact.keys() == theirs.exact.keys() and not wrong, (rank, wrong)
        assert ours.saved_bytes == theirs.saved_bytes
    for name, chosen in (("bf16", primary), ("fp8", flags)):
        rest[name] = pool.run(train, (*chosen, "--load", str(tmp_path / name)), world_size, 4, world_size=world_size)
        assert_same_bits(whole[name], rest[name])


def weights_between_updates(rank: int, primary: tuple[str, ...]) -> tuple[dict[str, Any], set[str]]:
    """Take steps with evaluations between them, one of which is skipped; return what was computed, and the names of the
    parameters that had no memory then."""
    from mimo.training.evaluate import evaluate
    from mimo.training.step import train_step
    from tests.support.resuming import exact_state
    from tests.support.steps import trainer_of

    found: dict[str, Any] = {}
    with trainer_of(rank, (*FP8, "--bf16", "--llm-dp", "2", *primary), 3) as (parts, loader):
        prepare, spoils = parts.optimizer.prepare, iter((False, True, False))

        def spoil_and_prepare() -> None:
            if next(spoils):
                for wrapped in parts.built.wrapped.values():
                    wrapped.buffers[0].buckets[0].grad_data[0] = float("nan")
            prepare()

        parts.optimizer.prepare = spoil_and_prepare
        for step in range(3):
            microbatches = loader.next_step()
            result = train_step(parts, microbatches)
            assert result.success == (step != 1)
            emptied = {name for name, weight in parts.built.model.named_parameters()
                       if not weight.untyped_storage().nbytes()}
            found[f"step {step}"] = [result.loss, result.grad_norm, evaluate(parts, [microbatches], None)]
            if step != 1:
                parts.built.finish_gathers("the test")
                found[f"weights {step}"] = exact_state(parts)
    return found, emptied


def test_primary_weights_have_no_memory_between_updates(pool: WorkerPool) -> None:
    """Passes of evaluations and skipped updates read the FP8 copies, too."""
    plain, primary = (pool.run(weights_between_updates, flags, world_size=3)
                      for flags in ((), ("--fp8-primary-weights",)))
    for (expected, whole), (found, emptied) in zip(plain, primary, strict=True):
        assert not whole and emptied and {name.split(".")[-2] for name in emptied} == {
            "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
        np.testing.assert_equal(found, expected)


@pytest.mark.parametrize(("flags", "expected"), [
    (("--fp8-format", "hybrid", "--ffn-hidden-size", "40"),
     r"--fp8-format hybrid \(tensorwise\): rows and columns of a rank's weights have to be multiples of 16, and these "
     r"are not: .*linear_fc2.weight \[32, 40\].*Use other widths"),
    (("--encoder-fp8-format", "e4m3", "--encoder-fp8-recipe", "blockwise"),
     r"--encoder-fp8-format e4m3 \(blockwise\): .* multiples of 128.*or tensorwise, which needs multiples of 16"),
    ((*LOGITS, "--make-vocab-size-divisible-by", "1", "--vocab-size", "97"),
     r"--fp8-output-proj: rows and columns of a rank's output layer, \[97, 32\], are not multiples of 16; pad the"),
])
def test_widths_that_do_not_fit_are_named(pool: WorkerPool, flags: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        validate(parse_config("--layout", "colocated", *flags), 1)
    # A model whose provider gives its weights other names is checked once it is built.
    (told,) = pool.run(refusal_of_built, ("--layout", "colocated", *flags), world_size=1)
    with pytest.raises(ValueError, match=expected):
        raise ValueError(told)


def refusal_of_built(rank: int, flags: tuple[str, ...]) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mimo.config.validate.check_fp8", lambda config, layout: None)
        return refusal(rank, flags, 1)


def weights_built_and_planned(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[str, Any, Any]]:
    """Return the linear parts that FP8 products would have on this rank and those that plans know of, by module."""
    from mimo.config.validate_fp8 import weights_of_rank
    from mimo.model.build import named_modules_of
    from mimo.model.fp8 import _linears
    from tests.support.weights import built_model

    with built_model(flags, world_size) as (built, grids, provider, family):
        return [(module, {(name.rsplit(".", 1)[-1], tuple(linear.weight.shape))
                          for name, linear in _linears(part, "local")},
                 {(name.split(".")[-2], shape) for name, shape in weights_of_rank(
                     provider.parameter_shapes(family, module), grids.layout.grids[module], is_local=True)})
                for module, part in named_modules_of(built.model)]


@pytest.mark.parametrize("flags", WIDTHS.values(), ids=WIDTHS)
def test_plans_know_the_widths_of_every_rank(pool: WorkerPool, flags: str) -> None:
    for found in pool.run(weights_built_and_planned, tuple(flags.split()), 2, world_size=2):
        for module, built, planned in found:
            assert built and built == planned, module
