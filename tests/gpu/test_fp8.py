"""FP8 products of Transformer Engine on one GPU: against bfloat16, against the emulation, with rows that do not fit."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mimo.protocols import Fp8
from tests.support.launch import losses, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")]
SHARED = """--device cuda --transformer-impl transformer_engine --llm-dp 1 --vocab-size 512 --hidden-size 256
--num-layers 2 --num-attention-heads 4 --num-query-groups 2 --max-position-embeddings 256 --dataset-provider mock
--mock-min-length 100 --mock-max-length 250 --seq-length 256 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3
--lr-decay-style constant --train-iters 6 --num-generations 0 --log-interval 1 --watchdog-timeout-s 200""".split()
DENSE = "--model-provider causal_lm --mock-text-only-fraction 1 --qk-layernorm".split()
EXPERTS = [*DENSE, *"--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 128".split()]
IMAGES = """--model-provider mock --layout colocated --ffn-hidden-size 512 --vision-num-layers 2
--vision-hidden-size 128 --vision-num-attention-heads 2 --vision-ffn-hidden-size 256 --vision-image-size 24
--vision-patch-size 8 --image-token-id 511 --mock-image-size 24 --mock-max-length 200""".split()


def run(folder: Path, *flags: str, gpus: int = 1) -> list[float]:
    done = torchrun(gpus, *SHARED, *flags, "--run-dir", str(folder))
    assert done.returncode == 0, done.stdout[-3000:]
    assert ("multiply in FP8" in done.stdout) == ("--fp8-format" in flags), done.stdout[-3000:]
    print(folder.name, losses(folder))
    return losses(folder)


def test_experts_train_like_bfloat16(tmp_path: Path) -> None:
    exact = run(tmp_path / "bf16", *EXPERTS)
    for recipe in ("tensorwise", "blockwise"):
        found = run(tmp_path / recipe, *EXPERTS, "--fp8-format", "hybrid", "--fp8-recipe", recipe)
        assert found != exact
        np.testing.assert_allclose(found, exact, rtol=3e-2)


@pytest.mark.parametrize("flags", [(), ("--fp8-recipe", "blockwise"), ("--recompute", "full")], ids=" ".join)
def test_packed_experts_agree_with_separate_ones(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Weights change in each step, so that an old FP8 copy would show."""
    exact = run(tmp_path / "bf16", *EXPERTS, "--moe-gemm", "packed")
    separate, packed = (run(tmp_path / gemm, *EXPERTS, "--fp8-format", "hybrid", *flags, "--moe-gemm", gemm)
                        for gemm in ("separate", "packed"))
    assert packed != exact
    np.testing.assert_allclose(packed, separate, rtol=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts_over_two_gpus_agree_with_one(tmp_path: Path, recipe: str) -> None:
    """Rows are filled up to whole blocks after the exchange; a scale comes from the rows of its own GPU alone."""
    flags = (*EXPERTS, "--fp8-format", "hybrid", "--fp8-recipe", recipe)
    one = run(tmp_path / "one", *flags)
    for gemm in ("separate", "packed"):
        two = run(tmp_path / gemm, *flags, "--llm-dp", "2", "--llm-ep", "2", "--moe-gemm", gemm, gpus=2)
        np.testing.assert_allclose(two, one, rtol=1e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_packed_products_have_their_values(recipe: str) -> None:
    """Weights lie in memory in another order than their experts, as data-parallel training lays them; some experts have
    no rows. `blockwise` products are compared with separate ones, `tensorwise` ones with the emulation, for any number
    of rows: their gradients of weights are not rounded."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Format

    from mimo.model.fp8 import E4M3, E5M2, rounded
    from mimo.model.packed_experts import PackedLinear

    torch.manual_seed(0)
    fp8 = Fp8("hybrid", recipe, "--fp8-format")
    chosen = {"tensorwise": Float8CurrentScaling, "blockwise": Float8BlockScaling}[recipe](fp8_format=Format.HYBRID)
    experts, rows, columns = 80, 384, 256
    linear = te.GroupedLinear(experts, columns, rows, bias=False, params_dtype=torch.bfloat16, device="cuda")
    memory = torch.randn(experts, rows, columns, device="cuda", dtype=torch.bfloat16)
    gradients = torch.zeros(experts, rows, columns, device="cuda")
    for index in range(experts):
        weight = getattr(linear, f"weight{index}")
        weight.data, weight.main_grad = memory[-1 - index], gradients[-1 - index]
        weight.data *= 1 + index
    wrapper = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=False))
    sizes = torch.randint(0, 4, (experts,)) * 128 if recipe == "blockwise" else torch.randint(0, 300, (experts,))
    sizes[5] = 0
    hidden = torch.randn(int(sizes.sum()) + 128, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    active, out_gradient = int(sizes.sum()), torch.randn(len(hidden), rows, device="cuda", dtype=torch.bfloat16)
    packed = PackedLinear(linear, wrapper, fp8)
    assert packed.can_run

    def passes(layer: Any) -> list[torch.Tensor]:
        with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
            output = layer()
        output.backward(out_gradient[:active])
        return [output.detach().float(), hidden.grad[:active].float()]

    found = [[*passes(lambda: packed(hidden, sizes.cuda())[0][:active]), gradients.flip(0).clone()]]
    hidden.grad = None
    if recipe == "blockwise":
        found.append(passes(lambda: linear(hidden[:active], sizes.tolist())))
        found[1].append(torch.stack([getattr(linear, f"weight{index}").grad for index in range(experts)]).float())
    else:
        parts: list[list[torch.Tensor]] = [[], [], []]
        for weight, inputs, grads in zip(memory.flip(0), hidden.detach()[:active].split(sizes.tolist()),
                                         out_gradient[:active].split(sizes.tolist()), strict=True):
            matrix = rounded(weight, E4M3, recipe).float()
            parts[0].append(rounded(inputs, E4M3, recipe).float() @ matrix.T)
            parts[1].append(rounded(grads, E5M2, recipe).float() @ matrix)
            parts[2].append((grads.float().T @ inputs.float())[None])
        found.append([torch.cat(part) for part in parts])
    for name, theirs, ours in zip(("output", "gradient of rows", "gradient of weights"), *reversed(found), strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        print(recipe, name, error)
        assert error < 5e-3, name


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_products_of_output_layers_have_their_values(recipe: str) -> None:
    """Gradients of weights are added to `main_grad`; a number of tokens that does not fit is filled up."""
    from megatron.core.transformer import TransformerConfig

    from mimo.model.fp8 import _borrowing_linear, _emulated_product, _logits

    torch.manual_seed(0)
    fp8 = Fp8("hybrid", recipe, "--fp8-format", output_proj=True)
    config = TransformerConfig(num_layers=1, hidden_size=256, num_attention_heads=2, fp8="hybrid", fp8_recipe=recipe,
                               bf16=True, params_dtype=torch.bfloat16)
    layer: Any = SimpleNamespace(input_size=256, output_size=1024, sequence_parallel=False, tp_group=None,
                                 config=config)
    linear = _borrowing_linear(layer)
    weight = torch.nn.Parameter(torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(1024, 256, device="cuda")
    copy = weight.detach().clone().requires_grad_()
    for step in range(2):
        hidden, theirs = (torch.randn(100, 3, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
                          for _ in range(2))
        theirs.data.copy_(hidden.data)
        gradient = torch.randn(100, 3, 1024, device="cuda", dtype=torch.bfloat16)
        logits = _logits(linear, fp8, torch.nn.functional.linear, hidden, weight, gradient_accumulation_fusion=True)
        expected = _emulated_product(fp8, torch.nn.functional.linear, theirs, copy)
        logits.backward(gradient)
        expected.backward(gradient)
        for name, ours, right in (("logits", logits, expected), ("gradient of rows", hidden.grad, theirs.grad),
                                  ("gradient of the weight", weight.main_grad, copy.grad)):
            error = ((ours.float() - right.float()).norm() / right.float().norm()).item()
            print(recipe, step, name, error)
            assert error < 2e-2, name


@pytest.mark.parametrize("flags", ["", "--fp8-recipe blockwise", "--no-untie-embeddings-and-output-weights",
                                   "--llm-tp 2", "--llm-tp 2 --sequence-parallel"])
def test_logits_train_like_bfloat16(tmp_path: Path, flags: str) -> None:
    gpus = 2 if "--llm-tp 2" in flags else 1
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    model = DENSE if flags == "--llm-tp 2" else EXPERTS  # Megatron Core's experts need sequence parallelism
    exact = run(tmp_path / "bf16", *model, *flags.replace("--fp8-recipe blockwise", "").split(), gpus=gpus)
    layers, found = (run(tmp_path / name, *model, "--fp8-format", "hybrid", *flags.split(), *more, gpus=gpus)
                     for name, more in (("layers", ()), ("logits", ("--fp8-output-proj",))))
    assert found != layers
    np.testing.assert_allclose(found, exact, rtol=3e-2)


@pytest.mark.parametrize("flags", ["", "--fp8-recipe blockwise", "--fp8-output-proj", "--recompute full"])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_primary_weights_train_alike(tmp_path: Path, model: list[str], flags: str) -> None:
    """Copies that were not renewed would show, as weights change in each step; so would weights that are read without
    having memory. Kernels of experts add up in any order, so their losses differ between runs, too."""
    flags = f"{flags} --fp8-format hybrid --save-interval 3 --eval-interval 2 --eval-iters 1".split()
    more = ["--moe-gemm", "packed", "--async-save"] if model is EXPERTS else ["--deterministic-mode"]
    plain, primary = (run(tmp_path / name, *model, *flags, *more, *chosen, "--save", str(tmp_path / f"{name} saved"))
                      for name, chosen in (("bf16", ()), ("primary", ("--fp8-primary-weights",))))
    resumed = run(tmp_path / "resumed", *model, *flags, *more, "--fp8-primary-weights", "--load",
                  str(tmp_path / "bf16 saved"), "--ckpt-step", "3", "--save", str(tmp_path / "resumed saved"))
    tolerance = 5e-4 if model is EXPERTS else 0
    np.testing.assert_allclose(primary, plain, rtol=tolerance)
    np.testing.assert_allclose(resumed, plain[3:], rtol=tolerance)


def test_images_whose_rows_do_not_fit(tmp_path: Path) -> None:
    """An image has 9 patches."""
    exact = run(tmp_path / "bf16", *IMAGES)
    found = run(tmp_path / "fp8", *IMAGES, "--fp8-format", "hybrid", "--encoder-fp8-format", "e4m3")
    assert found != exact
    np.testing.assert_allclose(found, exact, rtol=3e-2)


def test_blocks_of_weights_are_those_of_the_emulation_and_of_an_engine() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from mimo.model.fp8 import E4M3, quantised

    torch.manual_seed(0)
    weight = (torch.randn(384, 512) * torch.logspace(-2, 2, 512)).to("cuda", torch.bfloat16)
    quantizer = Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False)
    kernel = quantizer(weight)
    ours, scales = quantised(weight, E4M3, "blockwise", is_weight=True)
    numbers, expected = ours.reshape(weight.shape), scales.reshape(3, 4)
    assert torch.equal(kernel._rowwise_data, numbers.view(torch.uint8))
    assert torch.equal(kernel._rowwise_scale_inv[:3, :4], expected)
    if find_spec("vllm") is not None:  # an engine's loader on this GPU
        from vllm.utils import deep_gemm

        from mimo.refit.compat import use_trainer_scales

        use_trainer_scales()
        engine, engine_scales = deep_gemm.per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
        assert torch.equal(engine.view(torch.uint8), numbers.view(torch.uint8))
        assert torch.equal(engine_scales, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_kernels_round_like_the_emulation(recipe: str) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Format

    from mimo.model.fp8 import _emulated_product, _with_whole_rows

    torch.manual_seed(0)
    fp8 = Fp8("hybrid", recipe, "--fp8-format")
    kind = {"tensorwise": Float8CurrentScaling, "blockwise": Float8BlockScaling}[recipe]
    linear = te.Linear(256, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    whole = partial(_with_whole_rows, linear, fp8, lambda rows: (linear(rows), None))
    hidden = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient, ends = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16), []
    for emulated in (False, True):
        hidden.grad = linear.weight.grad = None
        if emulated:
            output = _emulated_product(fp8, torch.nn.functional.linear, hidden, linear.weight)
        else:
            with te.fp8_autocast(enabled=True, fp8_recipe=kind(fp8_format=Format.HYBRID)):
                output, _ = whole(hidden)
        output.backward(gradient)
        ends.append([output.detach().float(), hidden.grad.float(), linear.weight.grad.float()])
    exact = (hidden.detach() @ linear.weight.detach().t()).float()
    assert (ends[0][0] - exact).norm() > 1e-2 * exact.norm(), "the product was in FP8"
    for name, ours, theirs in zip(("output", "input gradient", "weight gradient"), *ends, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        print(recipe, name, error)
        # Blocks of the kernels' weight gradient lie along the tokens.
        assert error < (0.08 if recipe == "blockwise" else 1e-2), name
