"""The update in one kernel against Transformer Engine's Adam, alone and in a run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.test_precision_aware import SHARED
from tests.support.launch import records, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine")]


def test_updates_are_those_of_fused_adam_with_clipped_gradients() -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    from mimo.training.fused_adam import CHUNK, FusedUpdate

    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [5 * CHUNK, 3 * CHUNK + 1, 768, 1]

    def draw(begin: int) -> list[torch.Tensor]:
        return [torch.randn(begin + size, generator=generator, device="cuda")[begin:] for size in sizes]

    for begin in (0, 1):
        starts = draw(begin)
        ours, theirs = ([start.clone().requires_grad_() for start in starts] for _ in range(2))
        optimizers = [FusedAdam([{"params": mains[:2], "lr": 1e-2, "weight_decay": 0.1},
                                 {"params": mains[2:], "lr": 3e-3, "weight_decay": 0.0}], betas=(0.9, 0.95))
                      for mains in (ours, theirs)]
        update = FusedUpdate(optimizers[0])
        update.weights = {main: torch.zeros(main.numel(), dtype=torch.bfloat16, device="cuda") for main in ours[:3]}
        for scale in (1.0, 0.125, 1.0):
            gradients = draw(begin)
            for mains, factor in ((ours, 1.0), (theirs, scale)):
                for main, gradient in zip(mains, gradients, strict=True):
                    main.grad = gradient * factor
            update.gradient_scale = scale
            update.find_tensors()
            update.step()
            optimizers[1].step()
        for main, other in zip(ours, theirs, strict=True):
            # The compilers choose different pairs of operations to fuse.
            torch.testing.assert_close(main, other, rtol=1e-6, atol=1e-7)
            for kind in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(optimizers[0].state[main][kind], optimizers[1].state[other][kind],
                                           rtol=1e-6, atol=1e-7)
        for main, weight in update.weights.items():
            assert torch.equal(weight, main.detach().bfloat16())
        assert [group["step"] for group in optimizers[0].param_groups] == [3, 3]


def test_a_run_agrees_with_three_passes_and_resumes_to_the_bit(tmp_path: Path) -> None:
    found = {}
    for name, flags in {"fused": ["--save", str(tmp_path / "saved"), "--save-interval", "4"],
                        "separate": ["--no-fused-optimizer-update"],
                        "resumed": ["--load", str(tmp_path / "saved"), "--ckpt-step", "4"]}.items():
        done = torchrun(1, *SHARED, *flags, "--run-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stdout[-3000:]
        found[name] = [(record["lm loss"], record["grad-norm"]) for record in records(tmp_path / name)]
    assert all(norm > 0.5 for _, norm in found["fused"]), "no step was clipped"
    np.testing.assert_allclose(found["fused"], found["separate"], rtol=5e-3)
    assert found["resumed"] == found["fused"][4:]
