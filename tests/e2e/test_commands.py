"""`mimo inspect`, `mimo export` and `mimo import` as a user types them, on checkpoints of short real runs."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mimo.commands.main import main
from mimo.config.cli import parse, to_toml
from tests.support import hf_families
from tests.support.launch import ROOT, losses, records, torchrun
from tests.support.spawn import WorkerPool
from tests.support.stored import safetensors_of, save_small_llama

MOCK = ("--model-provider", "mock", "--dataset-provider", "mock", "--num-experts", "4", "--num-layers", "2")
BATCH = tuple("--device cpu --seq-length 24 --micro-batch-size 2 --global-batch-size 4 --mock-min-length 5 "
              "--mock-max-length 12 --mock-images-max 2".split())
SETTINGS = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
                         "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
# model of `hf_families` -> processes and flags of a run
JOURNEYS = {"clip-llama": (2, ("--dataset-provider", "mock")),
            "qwen3-moe": (1, ("--llm-only", "--dataset-provider", "mock", "--mock-text-only-fraction", "1")),
            "nemotron-h": (1, ("--llm-only", "--dataset-provider", "mock", "--mock-text-only-fraction", "1"))}


def mimo(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run one command and check its exit code."""
    done = subprocess.run([sys.executable, "-m", "mimo", *map(str, words)], cwd=ROOT, env=SETTINGS, text=True,
                          timeout=200, capture_output=True, check=False)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    return done


def different(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> list[str]:
    """Return names of one and not of the other, and of tensors that are not bit-equal."""
    same = [name for name, tensor in theirs.items()
            if name in ours and tensor.dtype == ours[name].dtype and tensor.equal(ours[name])]
    return sorted((theirs.keys() | ours.keys()) - set(same))


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two checkpoints of a small mixture of experts; the projector did not train."""
    folder = tmp_path_factory.mktemp("run")
    done = torchrun(2, *MOCK, "--device", "cpu", "--seq-length", "128", "--train-iters", "2", "--freeze", "projector",
                    "--save-interval", "1", "--save", str(folder / "save"), "--run-dir", str(folder / "metrics"))
    assert done.returncode == 0, done.stdout[-3000:]
    return folder / "save"


@pytest.mark.slow
def test_the_run_tells_how_long_it_stood_still_for_checkpoints(save: Path) -> None:
    first, second = records(save.parent / "metrics")
    assert "checkpoint-s" not in first, "the first one was saved after it"
    assert 0 < second["checkpoint-s"] < second["wall_time"] - first["wall_time"]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerPool]:
    """A process that may import transformers and Megatron."""
    pool = WorkerPool(1)
    yield pool
    pool.close()


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, attribute = scripts["mimo"].partition(":")
    assert callable(vars(importlib.import_module(module))[attribute])


@pytest.mark.parametrize(("words", "expected"), [
    ([], ("inspect", "export", "import")),
    (["--help"], ("inspect", "export", "import")),
    (["inspect", "--help"], ("CHECKPOINT", "--ckpt-step", "--config", "--tensors", "--verify", "--json")),
    (["export", "--help"], ("CHECKPOINT", "OUT", "--hf-base", "--dtype", "--max-shard-size", "--force")),
    (["import", "--help"], ("HF_PATH", "SAVE", "--model-provider", "--dtype")),
])
def test_help_names_the_flags(words: list[str], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(words)
    printed = capsys.readouterr().out
    assert [word for word in expected if word not in printed] == []


@pytest.mark.parametrize("words", [["inspect", "nowhere"], ["inspect", "nowhere", "--verify"],
                                   ["inspect", ".", "--", "--model-provider", "mock"],
                                   ["export", "nowhere", "out"], ["import", "nowhere", "save"]])
def test_a_folder_that_is_not_there_is_one_error(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("save", "where"), [
    ((), "it saved none; --save FOLDER saves them"), (("--save", "mine"), "its checkpoints are in mine (--save)")])
def test_the_folder_of_a_run_s_records_tells_where_its_checkpoints_are(save, where, tmp_path, capsys):
    (tmp_path / "run_config.toml").write_text(to_toml(parse([*MOCK, *save])))
    (tmp_path / "metrics.jsonl").touch()
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"error: mimo inspect {tmp_path}: no checkpoint: this is the folder of a run's "
                                       f"records (--run-dir), and {where}\n")


def test_a_hugging_face_folder_is_no_checkpoint_and_the_base_of_an_export_has_to_exist(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"error: mimo inspect {tmp_path}: no checkpoint: this is a Hugging Face folder; "
                                       f"mimo import {tmp_path} SAVE makes a checkpoint of it\n")
    (tmp_path / "metadata.json").write_text("{}")
    assert main(["export", str(tmp_path), "out", "--hf-base", f"{tmp_path}/gone"]) == 2
    assert f"error: --hf-base {tmp_path}/gone: there is no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_mistakes_are_one_message_and_exit_code_2(save: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    named = shutil.copytree(save, tmp_path / "named") / "iter_0000002"
    common = torch.load(named / "common.pt", weights_only=True)
    torch.save(common | {"config": common["config"].replace('"mock"', '"os:system"')}, named / "common.pt")
    checksums = json.loads((named / "checksums.json").read_text())
    checksums["common.pt"] = {"0": zlib.crc32((named / "common.pt").read_bytes())}
    (named / "checksums.json").write_text(json.dumps(checksums))
    cases: dict[str, tuple[list[str], str]] = {
        "code that a checkpoint names": (["export", str(named), str(tmp_path / "out")],
                                         "--model-provider os:system, which is not built in"),
        "no folder": (["inspect", str(tmp_path / "nowhere")], "no such folder"),
        "no checkpoint": (["inspect", str(tmp_path)], "no checkpoint"),
        "a run's records": (["inspect", str(save.parent / "metrics")], f"its checkpoints are in {save} (--save)"),
        "no such step": (["inspect", str(save), "--ckpt-step", "7"], "complete: 1, 2"),
        "no such file": (["inspect", str(save), "--config", "nowhere.toml"], "--config nowhere.toml"),
        "unknown run flag file": (["inspect", str(save), "--", "--model-provider", "nowhere:model"], "nowhere:model"),
        "folder with files": (["export", str(save), str(tmp_path / "full")], "notes.txt"),
        "size": (["export", str(save), str(tmp_path / "out"), "--max-shard-size", "5 apples"], "size 5 apples"),
        "no weights": (["import", str(tmp_path / "nowhere"), str(tmp_path / "save")], "no such folder"),
        "architecture": (["import", str(tmp_path / "hf"), str(tmp_path / "save")], "BertForMaskedLM"),
        "no config.json": (["import", str(tmp_path / "full"), str(tmp_path / "save")], "--model-provider"),
    }
    check_messages(cases)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "out").exists() and not (tmp_path / "save").exists()


def check_messages(cases: dict[str, tuple[list[str], str]], accepted: tuple[str, ...] = (),
                   disk_is_full: tuple[str, ...] = ()) -> None:
    """Run the commands in order, in one process because each start takes seconds, and check what each one says.

    Args:
        cases: Name -> command and what its message is to contain. Each has to end with exit code 2.
        accepted: Those that succeed instead.
        disk_is_full: Those that may only write small files, which is an error of the disk as a full one is. The limit
            stays once it is set, so they come last.
    """
    code = ("import contextlib, io, json, resource, sys\nfrom mimo.commands.main import main\nfound = {}\n"
            "for name, words, small in json.load(sys.stdin):\n    error = io.StringIO()\n"
            "    if small:\n        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
            "    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):\n"
            "        code = main(words)\n"
            "    found[name] = code, error.getvalue()\nprint(json.dumps(found))")
    typed = json.dumps([(name, words, name in disk_is_full) for name, (words, _) in cases.items()])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=SETTINGS, text=True, input=typed,
                          timeout=200, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, (exit_code, message) in found.items():
        if name in accepted:
            assert exit_code == 0, f"{name}: {message}"
        else:
            assert exit_code == 2 and message.startswith("error: "), f"{name}: {message}"
            assert cases[name][1] in message, f"{name}: {message}"


def test_models_that_a_run_refuses_are_neither_imported_nor_exported(tmp_path: Path) -> None:
    cases: dict[str, tuple[list[str], str]] = {}

    def expect(name: str, words: str, changes: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
        save_small_llama(tmp_path / name, changes or {}, **config)
        cases[name] = ["import", str(tmp_path / name), str(tmp_path / f"{name}-save")], words
        return tmp_path / name

    expect("nan", "values: model.norm.weight holds NaN", {"model.norm.weight": torch.tensor([1.0, torch.nan] * 4)})
    expect("infinite", "values: model.layers.0.mlp.up_proj.weight holds -inf",
           {"model.layers.0.mlp.up_proj.weight": torch.full((12, 8), -torch.inf)})
    expect("large", "values: lm_head.weight holds 3.4e+38, and bfloat16 ends at 3.38953e+38",
           {"lm_head.weight": torch.full((20, 8), 3.4e38)})
    expect("tied", "values: lm_head.weight differs from model.embed_tokens.weight: the output layer is tied",
           tie_word_embeddings=True)
    expect("quantized", "quantization_config.quant_method = 'fp8'", quantization_config={"quant_method": "fp8"})
    expect("odd", "--num-attention-heads 2 is not divisible by --num-query-groups 3", num_key_value_heads=3)
    expect("rope", "rope_theta = 10000.0 and rope_parameters.rope_theta = 500000.0 contradict each other",
           rope_theta=1e4, rope_parameters={"rope_theta": 5e5})
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2}
    expect("mixtral", "--moe-router-topk 1 needs --moe-router-pre-softmax", **mixtral, num_experts_per_tok=1)
    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 4}
    expect("deepseek", "--moe-router-topk 1 must lie between 2 and ", **deepseek, num_experts_per_tok=1)
    expect("groups", "--moe-router-topk 5 and --moe-router-group-topk 4: a group is scored", **deepseek,
           num_experts_per_tok=5)
    expect("image", "--vision-image-size 7 is smaller than a patch, --vision-patch-size 8", model_type="llava",
           architectures=["LlavaForConditionalGeneration"], vision_config={
               "model_type": "clip_vision_model", "image_size": 7, "patch_size": 8})
    expect("nemotron", "norm_topk_prob = True with num_experts_per_tok = 1", model_type="nemotron_h",
           architectures=["NemotronHForCausalLM"], layers_block_type=["moe"], num_experts_per_tok=1)
    two = expect("two", "has model.safetensors and model.safetensors.index.json, which does not name it")
    shutil.copyfile(two / "model.safetensors", two / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(safetensors_of(two), "model-00001-of-00001.safetensors")
    (two / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (expect("adapter", "has adapter_config.json: transformers would add an adapter") / "adapter_config.json").touch()
    parts = expect("parts", "has model.safetensors and parts of other weights (model-00002-of-00003.safetensors)")
    shutil.copyfile(parts / "model.safetensors", parts / "model-00002-of-00003.safetensors")
    refused = list(cases)
    large = {"lm_head.weight": torch.full((2000, 8), 1e6), "model.embed_tokens.weight": torch.ones(2000, 8)}
    expect("fits", "", large, vocab_size=2000)
    export = ["export", str(tmp_path / "fits-save"), str(tmp_path / "out")]
    cases["float16"] = [*export, "--dtype", "float16"], (
        "with --dtype float16 (bfloat16 has the range of float32) (1 problem):\n"
        "  values: lm_head.weight holds 999424, and float16 ends at 65504\n")
    expect("full", f"error: {tmp_path}/full-save cannot be written: File too large\n", large, vocab_size=2000)
    cases["full out"] = export, f"error: {tmp_path}/out cannot be written: File too large\n"
    check_messages(cases, accepted=("fits",), disk_is_full=("full", "full out"))
    for name in refused:
        assert not (tmp_path / f"{name}-save" / "release").exists(), name
    assert list((tmp_path / "full-save").iterdir()) == []
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.slow
def test_inspect_tells_what_a_checkpoint_holds(save: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in save.rglob("*"))
    text = mimo("inspect", save, "--config", save / "iter_0000002" / "run_config.toml").stdout
    assert f"{save}/iter_0000002" in text
    assert "iteration 2, 16 consumed samples" in text and "frozen: projector" in text
    assert "no flag differs" in text and "no tensor differs" in text
    row = next(line.split() for line in text.splitlines() if "mlp.experts.{0-3}.linear_fc2.weight" in line)
    assert row == ["decoder.layers.{0-1}.mlp.experts.{0-3}.linear_fc2.weight", "8", "128", "x", "64", "bfloat16",
                   "65,536", "131,072"]
    report: dict[str, Any] = json.loads(mimo("inspect", save, "--ckpt-step", "1", "--verify", "--json").stdout)
    assert (report["iteration"], report["consumed_samples"], report["damage"]) == (1, 8, [])
    assert report["optimizer_steps"] == {"vision": {"vision": 1}, "language": {"language": 1}}
    assert report["grids"]["language"]["offset"] == 1
    assert report["rng"] == {"vision": [1, 1, 1], "language": [1, 1, 1]}
    assert report["streams"] == ["language/0", "vision/0"]
    for module in ("vision", "language"):
        totals, tensors = report["modules"][module]["totals"], report["modules"][module]["tensors"]
        weights = [tensor for tensor in tensors if tensor["kind"] == "weights"]
        assert totals["weights"]["parameters"] == sum(math.prod(tensor["shape"]) for tensor in weights)
        assert totals["weights"]["bytes"] == 2 * totals["weights"]["parameters"]
        trained = [tensor for tensor in weights if "input_projections" not in tensor["name"]]
        assert len(trained) < len(weights) or module == "language"
        for kind in ("exp_avg", "exp_avg_sq", "fp32_param"):
            assert totals[kind]["parameters"] == sum(tensor["parameters"] for tensor in trained)
    assert sorted(path.stat().st_mtime_ns for path in save.rglob("*")) == before


@pytest.mark.slow
def test_inspect_names_what_differs_from_a_run(save: Path) -> None:
    flags = (*MOCK[:4], "--num-experts", "8", "--num-layers", "2", "--ffn-hidden-size", "64", "--vision-patch-bias",
             "--no-vision-pre-layernorm", "--no-bf16", "--vocab-size", "512")
    report = json.loads(mimo("inspect", save, "--json", "--", *flags).stdout)
    flags_that_differ = " ".join(report["differences"]["flags"])
    for words in ("--num-experts 8 (checkpoint: 4)", "--bf16 False", "--vision-patch-bias True"):
        assert words in flags_that_differ
    found = report["differences"]["tensors"]
    expected = {"missing: vision.encoders.vit.conv1.bias": "not in the checkpoint",
                "not used: vision.encoders.vit.ln_pre.weight": "[64]",
                "shape: language.decoder.layers.mlp.experts.experts.linear_fc1.weight": "[2, 4]",
                "shape: language.decoder.layers.{0-1}.mlp.router.weight": "[8, 128]",
                "dtype: weights of vision": "--no-bf16"}
    for start, part in expected.items():
        assert [line for line in found if line.startswith(start) and part in line], f"{start}: {found}"
    assert not [line for line in found if "linear_proj" in line]


@pytest.mark.slow
def test_verify_names_what_is_damaged(save: Path, tmp_path: Path) -> None:
    copy = tmp_path / "iter_0000002"
    shutil.copytree(save / "iter_0000002", copy)
    files = sorted(copy.glob("*.distcp"))
    data = bytearray(files[0].read_bytes())
    data[len(data) // 2] ^= 1
    files[0].write_bytes(data)
    files[1].unlink()
    files[2].write_bytes(files[2].read_bytes()[:-100])
    done = mimo("inspect", copy, "--verify", "--json", code=1)
    damage = json.loads(done.stdout)["damage"]
    for name, words in zip(files, ("(checksum)", "is missing; it holds", "ends 100 bytes early"), strict=False):
        lines = [line for line in damage if name.name in line]
        assert len(lines) == 1 and words in lines[0], f"{name.name}: {damage}"
        assert "vision." in lines[0] or "language." in lines[0]
    (copy / "checksums.json").unlink()
    (copy / ".metadata").write_bytes(b"cposix\nsystem\n.")
    assert "posix.system, which is not data" in mimo("inspect", copy, code=2).stderr
    assert "damaged" in mimo("inspect", copy, "--verify", code=1).stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOURNEYS)
def test_from_hugging_face_to_training_and_back(worker: WorkerPool, tmp_path: Path, name: str) -> None:
    source, save, out = tmp_path / "hf", tmp_path / "save", tmp_path / "out"
    before = worker.run(hf_families.save_hf, name, str(source))[0]
    (source / "tokenizer.json").write_text("{}")
    told = mimo("import", source, tmp_path / "imported", "--dtype", "float32").stdout
    shown = told.splitlines()[-1].split("train_hetero.py ")[1].split()
    assert shown[-2:] == ["--load", str(tmp_path / "imported")]
    mimo("export", tmp_path / "imported", tmp_path / "same", "--hf-base", source, "--max-shard-size", "100KB")
    assert len(list((tmp_path / "same").glob("*.safetensors"))) > 1
    assert different(safetensors_of(source), safetensors_of(tmp_path / "same")) == []
    processes, layout = JOURNEYS[name]
    flags = (*shown[:-2], *BATCH, *layout)
    runs = {"direct": ("--load-hf", str(source), "--train-iters", "2", "--lr", "1e-2", "--save", str(save))}
    if name == "clip-llama":
        runs["imported"] = (*shown[-2:], "--train-iters", "1")
    for run, more in runs.items():
        done = torchrun(processes, *flags, *more, "--run-dir", str(tmp_path / run))
        assert done.returncode == 0, done.stdout[-3000:]
    if "imported" in runs:
        assert losses(tmp_path / "imported") == losses(tmp_path / "direct")[:1], "both start from the same weights"
    assert "iteration 2, 8 consumed samples" in mimo("inspect", save).stdout
    told = mimo("export", save, out, "--hf-base", source).stdout
    assert f"from_pretrained({str(out)!r})" in told and f"vllm.entrypoints.openai.api_server --model {out}" in told
    assert (out / "tokenizer.json").is_file()
    after = worker.run(hf_families.reloaded_logits, name, str(out), str(source))[0]
    assert after.keys() == before.keys()
    for key, logits in after.items():
        assert torch.isfinite(logits).all()
        assert (logits - before[key]).abs().max() > 1e-3, "training changed nothing"


@pytest.mark.slow
def test_export_of_a_model_that_moved_into_a_folder_with_weights(worker: WorkerPool, tmp_path: Path) -> None:
    source, save, out = tmp_path / "hf", tmp_path / "save", tmp_path / "out"
    worker.run(hf_families.save_hf, "clip-llama", str(source))
    mimo("import", source, save)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "release"
    out.mkdir()
    (out / "model-00001-of-00002.safetensors").write_bytes(b"another model's")
    (out / "adapter_config.json").write_text("{}")  # transformers would look for an adapter's weights
    (out / "notes.txt").write_text("mine")
    moved = source.rename(tmp_path / "moved")
    said = mimo("export", save, out, "--force", "--", "--rotary-base", "7", code=2).stderr
    assert "--rotary-base 7.0 (checkpoint: 10000.0)" in said
    assert (out / "model-00001-of-00002.safetensors").exists(), "a failure leaves what was there"
    mimo("export", save, out, "--force", "--dtype", "float16", "--hf-base", moved)
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors",
                                                     "notes.txt"}
    smaller = safetensors_of(out)
    assert smaller.keys() == safetensors_of(moved).keys()
    assert {tensor.dtype for tensor in smaller.values()} == {torch.float16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
