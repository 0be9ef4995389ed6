"""The model that a checkpoint holds, from what the checkpoint says."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from mimo import registry
from mimo.checkpoint.differences import model_fields
from mimo.commands.compare import StoredInfo, rows_of
from mimo.commands.convert import config_of_checkpoint, named_providers, refuse_named_code
from mimo.config.cli import parse, parse_as, to_toml
from mimo.config.rl_run import DESCRIPTION, RlRunConfig

PROVIDER = """
from pathlib import Path
Path("ran").touch()
from providers.causal_lm import CausalLmProvider, Config
provider = CausalLmProvider()
"""
FLAGS = ("--model-provider", "causal_lm", "--rotary-base", "5e5", "--num-layers", "2")


def common_of(*flags: str) -> dict[str, Any]:
    """Return what a checkpoint of a run says about its model."""
    config = parse([*FLAGS, *flags])
    return {"config": to_toml(config),
            "model": model_fields(registry.model_provider(config.model.model_provider), config.model_family)}


def test_code_that_a_checkpoint_names_is_run_only_where_a_person_types_its_name(tmp_path, monkeypatch):
    (tmp_path / "somebody.py").write_text(PROVIDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "somebody", raising=False)
    common = common_of()
    common["config"] = common["config"].replace('"causal_lm"', '"somebody:provider"')
    own_data = to_toml(parse(FLAGS)).replace('"digits"', '"somebody:provider"')
    with pytest.raises(ValueError, match="--model-provider somebody:provider, which is not built in.*type its name"):
        config_of_checkpoint(common, tmp_path, ["--num-layers", "2"])
    with pytest.raises(ValueError, match="type its name: -- --model-provider somebody:provider"):
        config_of_checkpoint(common, tmp_path, [])
    assert config_of_checkpoint(common_of() | {"config": own_data}, tmp_path, []).dataset is None
    for field, text in (("model_provider", common["config"]), ("dataset_provider", own_data)):
        (tmp_path / "run_config.toml").write_text(text)
        for files, typed in ((["run_config.toml"], []), ([], ["--config", "run_config.toml"])):
            with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} somebody:provider, which is not built"):
                refuse_named_code(named_providers(files, typed), "--config", typed)
    assert not (tmp_path / "ran").exists()
    config = config_of_checkpoint(common, tmp_path, ["--model-provider", "somebody:provider"])
    assert (tmp_path / "ran").exists() and config.model_family.rotary_base == 5e5


def test_an_export_knows_the_data_of_the_run(tmp_path: Path) -> None:
    common = common_of("--dataset-provider", "mock", "--mock-max-length", "7")
    config = config_of_checkpoint(common, tmp_path, [])
    assert (config.data.dataset_provider, config.dataset.mock_max_length) == ("mock", 7)
    rl = parse_as(RlRunConfig, [*FLAGS, "--dataset-provider", "gsm8k"], DESCRIPTION)
    assert config_of_checkpoint(common | {"config": to_toml(rl)}, tmp_path, []).dataset is None
    conversations = parse_as(RlRunConfig, [
        *FLAGS, "--dataset-provider", "conversations", "--tokenizer", "there", "--image-tiling", "pad", "--image-mean",
        "0.5", "--image-std", "0.5", "--image-resample", "bilinear"], DESCRIPTION)
    config = config_of_checkpoint(common | {"config": to_toml(conversations)}, tmp_path, [])
    assert (config.data.dataset_provider, config.dataset.tokenizer, config.dataset.image_tiling) == (
        "conversations", "there", "pad")


def test_an_export_takes_the_stored_sizes_and_no_others(tmp_path: Path) -> None:
    common = common_of()
    # Neither a config.json that has changed since nor one that is gone matters.
    common["config"] = common["config"].replace("hf-config = \"\"", "hf-config = \"gone\"").replace(
        "rotary-base = 500000.0", "rotary-base = 7.0")
    config = config_of_checkpoint(common, tmp_path, [])
    assert (config.model_family.rotary_base, config.model_family.hf_config) == (5e5, "")
    typed = ["--rotary-base", "10000"]
    with pytest.raises(ValueError, match=r"--rotary-base 10000.0 \(checkpoint: 500000.0\)"):
        config_of_checkpoint(common, tmp_path, typed)
    allowed = config_of_checkpoint(common, tmp_path, [*typed, "--allow-difference", "rotary-base"])
    assert allowed.model_family.rotary_base == 1e4
    del common["model"]
    old = config_of_checkpoint(common, tmp_path, [])
    assert dataclasses.replace(old.model_family, hf_config="").rotary_base == 7.0


def stored(name: str, *shape: int, dtype: str = "bfloat16") -> StoredInfo:
    return StoredInfo(f"language.{name}", "language", "weights", name, shape, dtype, 1, 2)


def test_stacked_axes_become_ranges():
    rows = rows_of([stored("decoder.layers.mlp.experts.experts.linear_fc1.weight", 4, 8, 64, 32),
                    stored("decoder.layers.mlp.router.weight", 4, 8, 32), stored("decoder.final_layernorm.weight", 32)])
    assert [(row.name, row.count, row.shape) for row in rows] == [
        ("decoder.layers.{0-3}.mlp.experts.{0-7}.linear_fc1.weight", 32, (64, 32)),
        ("decoder.layers.{0-3}.mlp.router.weight", 4, (8, 32)),
        ("decoder.final_layernorm.weight", 1, (32,)),
    ]
    assert [row.numel for row in rows] == [32 * 64 * 32, 4 * 8 * 32, 32]


def test_single_layers_are_put_together_where_they_are_equal():
    """A block with dense and mixture-of-experts layers is not stacked."""
    names = {0: "mlp.linear_fc1.weight", 1: "mlp.experts.experts.linear_fc1.weight",
             2: "mlp.experts.experts.linear_fc1.weight", 4: "mlp.experts.experts.linear_fc1.weight"}
    tensors = [stored(f"decoder.layers.{number}.{name}", *((64, 32) if number == 0 else (2, 16, 32)))
               for number, name in names.items()]
    tensors.append(stored("decoder.layers.5.mlp.experts.experts.linear_fc1.weight", 2, 16, 32, dtype="float32"))
    assert [(row.name, row.count, row.dtype, row.num_bytes) for row in rows_of(tensors)] == [
        ("decoder.layers.0.mlp.linear_fc1.weight", 1, "bfloat16", 2),
        ("decoder.layers.{1-2,4}.mlp.experts.{0-1}.linear_fc1.weight", 6, "bfloat16", 6),
        ("decoder.layers.5.mlp.experts.{0-1}.linear_fc1.weight", 2, "float32", 2),
    ]
