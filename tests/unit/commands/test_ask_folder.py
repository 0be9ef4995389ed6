"""The folder from which vLLM answers `mimo ask`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mimo.commands.ask import _folder_for_vllm
from mimo.registry import model_provider
from tests.support.stored import save_small_llama


def test_vllm_gets_the_files_that_the_trainer_reads(tmp_path: Path) -> None:
    """Mistral's folders hold the weights twice, and vLLM would take its own form, which nobody has fine-tuned."""
    model = tmp_path / "model"
    save_small_llama(model, {})
    for name in ("consolidated.safetensors", "params.json"):
        (model / name).write_bytes(b"{}")
    asked: Any = SimpleNamespace(is_hf=True, folder=model, provider=model_provider("causal_lm"),
                                 config=SimpleNamespace(model_family=None))
    folder = _folder_for_vllm(asked, tmp_path / "vllm")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
