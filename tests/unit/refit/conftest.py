"""The engine that tests of the refit share."""

from __future__ import annotations

import pytest

from tests.support.refit_faults import use_plain_engine


@pytest.fixture
def plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `PlainLLM` in place of vLLM's, in this process, until the test ends."""
    import torch
    import vllm
    from vllm.v1.worker import gpu_worker

    from mimo.rollout.engine import ENVIRONMENT

    for owner, name in ((torch.accelerator, "synchronize"), (vllm, "LLM"), (gpu_worker, "set_current_vllm_config")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what follows is undone
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, ENVIRONMENT[name])
    use_plain_engine()
