"""The gated norm of Mamba-2 layers, and what is put into Megatron Core's mixer."""

import importlib.util
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch


def norm_against_formula(rank, before, group_size):
    from mimo.model.torch_layers.mamba import GatedRMSNorm

    torch.manual_seed(0)
    eps = 0.1  # large enough that a misplaced one shows
    norm = GatedRMSNorm(12, eps=eps, group_size=group_size, norm_before_gate=before, dtype=torch.float64)
    assert torch.equal(norm.weight, torch.ones(12, dtype=torch.float64))
    with torch.no_grad():
        norm.weight.copy_(torch.randn(12, dtype=torch.float64))
    x, z = (torch.randn(3, 2, 12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gradient = torch.randn(3, 2, 12, dtype=torch.float64)

    def formula(values, gate):
        if not before:
            values = values * gate
        normed = [part / (part.square().mean(-1, keepdim=True) + eps).sqrt()
                  for part in values.split(group_size or 12, -1)]
        out = torch.cat(normed, -1) * norm.weight
        return out * gate if before else out

    expected = formula(x, z * torch.sigmoid(z))
    torch.testing.assert_close(norm(x, z), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm(x), formula(x, 1.0), rtol=1e-12, atol=1e-12)
    leaves = [x, z, norm.weight]
    torch.testing.assert_close(torch.autograd.grad(norm(x, z), leaves, gradient),
                               torch.autograd.grad(expected, leaves, gradient), rtol=1e-12, atol=1e-12)
    half = norm.to(torch.bfloat16)(x.bfloat16(), z.bfloat16())
    assert half.dtype == torch.bfloat16


def norm_against_every_formula(rank):
    for before in (False, True):
        for group_size in (None, 4):
            norm_against_formula(rank, before, group_size)


def test_norm_equals_its_formula(pool):
    pool.run(norm_against_every_formula, world_size=1)


def what_the_mixer_uses(rank):
    from megatron.core.ssm import mamba_mixer

    from mimo.model.torch_layers.mamba import split_conv1d_scan, ssd_scan, use_torch_mamba
    from mimo.platform import current_platform

    assert not current_platform().has_mamba_kernels()
    use_torch_mamba()
    once = dict(vars(mamba_mixer))
    use_torch_mamba()
    combined = mamba_mixer.mamba_split_conv1d_scan_combined
    assert (combined.func, combined.keywords) == (split_conv1d_scan, {"scan": ssd_scan})
    once["mamba_split_conv1d_scan_combined"] = combined
    assert once == vars(mamba_mixer)
    check = mamba_mixer._check_mamba_sequence_packing_support
    assert check(for_inference_not_training=False) == (True, None)
    return check()


def test_put_into_the_mixer_twice_is_once(pool):
    ((packs, reason),) = pool.run(what_the_mixer_uses, world_size=1)
    assert not packs and "packed inference needs the kernels" in reason


def test_kernels_of_a_gpu_are_those_of_both_packages(monkeypatch):
    from mimo.platform.cuda import CudaPlatform

    installed = {"mamba_ssm": object()}
    monkeypatch.setattr(importlib.util, "find_spec", installed.get)
    assert not CudaPlatform().has_mamba_kernels()
    installed["causal_conv1d"] = object()
    assert CudaPlatform().has_mamba_kernels()


def what_is_logged(rank, platform, installed):
    import mimo.model.torch_layers.mamba
    from providers.common.hybrid import HybridConfig
    from providers.common.hybrid_build import hybrid_spec

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("mimo.model.torch_layers.mamba")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = importlib.util.find_spec
    with (mock.patch.object(mimo.model.torch_layers.mamba, "current_platform", lambda: SimpleNamespace(name=platform)),
          mock.patch.object(importlib.util, "find_spec", lambda name, *rest: name in installed or (
              None if name in ("mamba_ssm", "causal_conv1d") else found(name, *rest)))):
        hybrid_spec(HybridConfig(hybrid_layer_pattern="MEM*"), None)
        hybrid_spec(HybridConfig(hybrid_layer_pattern="*-*-"), None)  # has none of these layers
    logger.removeHandler(handler)
    return lines


@pytest.mark.parametrize(("platform", "installed", "level", "said"), [
    ("cpu", ("mamba_ssm", "causal_conv1d"), "INFO", ["scan and convolution run in plain PyTorch"]),
    ("cuda", ("mamba_ssm", "causal_conv1d"), "INFO", ["scan and convolution run in the kernels of mamba_ssm"]),
    ("cuda", ("mamba_ssm",), "WARNING", ["the convolution runs in plain PyTorch", "; pip install causal-conv1d"]),
    ("cuda", ("causal_conv1d",), "WARNING", ["scan and convolution run in plain PyTorch", "; pip install mamba-ssm"]),
    ("cuda", (), "WARNING", ["scan and convolution run in plain", "; pip install mamba-ssm causal-conv1d"]),
])
def test_the_implementation_of_mamba_layers_is_logged_once(pool, platform, installed, level, said):
    first, other = pool.run(what_is_logged, platform, installed, world_size=2)
    ((found, line),) = first
    assert found == level and all(part in line for part in said), line
    assert not other, "the first rank speaks for all"
