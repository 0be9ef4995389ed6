"""Help, plans, refusals, flags of providers, reports and copies import neither torch nor Megatron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT
from tests.support.report_runs import usual_records, write_run

PLANNING = ("mimo.config.cli", "mimo.config.trainer", "mimo.grid.layout", "mimo.grid.dry_run", "mimo.grid.spec",
            "mimo.protocols", "mimo.registry", "mimo.watchdog.watchdog", "data.energon.provider")
FAKE = ["--model-provider", "tests.unit.config.fake_provider:model",
        "--dataset-provider", "tests.unit.config.fake_provider:dataset"]
MOCK = ["--model-provider", "mock", "--dataset-provider", "mock", "--dry-run"]
ENERGON = [*MOCK, "--dataset-provider", "energon", "--data-path", "gone"]
RL = [word for name in ("rl_arithmetic_model", "rl_arithmetic")
      for word in ("--config", str(ROOT / "scripts" / "configs" / f"{name}.toml"))]
LAST = "a dry run of reinforcement learning"
SCRIPT = ROOT / "scripts" / "sbatch" / "prod_33n_gbs768_ep8.sh"
# Words of `mimo` and the exit code.
COMMANDS: list[tuple[list[str], int]] = [
    ([], 0), (["--help"], 0), (["inspect", "--help"], 0), (["export", "--help"], 0), (["import", "--help"], 0),
    (["inspect", "nowhere"], 2), (["inspect", "nowhere", "--verify"], 2), (["export", "nowhere", "out"], 2),
    (["inspect", ".", "--", "--model-provider", "mock"], 2), (["import", "nowhere", "save"], 2)]
# Does with every built-in family what a plan does.
FAMILIES = """
from mimo.grid.spec import GridSpec, Layout
from mimo.registry import MODEL_PROVIDERS, model_provider
for name in MODEL_PROVIDERS:
    provider = model_provider(name)
    config = provider.Config()
    encoders = tuple(GridSpec(module) for module in provider.encoders(config))
    language = GridSpec("language", offset=len(encoders))
    for module in (*provider.encoders(config), "language"):
        provider.parameter_shapes(config, module)
    provider.flop_components(config)
    provider.validate(config, Layout("disjoint", len(encoders) + 1, encoders, language), 4096)
    if name != "mock":
        provider.hf_config(config)
"""
# Each case runs after those before it in one process, so the first that is named is the culprit.
RUN = """
import contextlib, io, json, sys
found, printed = {}, io.StringIO()
for name, code in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exec(code, {})
        except SystemExit as ended:
            assert not ended.code, name
    found[name] = sorted({"torch", "megatron", "transformers", "vllm", "ray"} & set(sys.modules))
print(json.dumps(found))
"""


@pytest.fixture
def cases(tmp_path: Path) -> dict[str, str]:
    """Name -> code that must import none of them."""
    run = write_run(tmp_path / "run", usual_records())
    scripts = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); "

    def main(module: str, words: list[str], code: int) -> str:
        return f"import {module} as program; assert program.main({words!r}) == {code}"

    return {
        # The first: it does without NumPy, too, which others import.
        "staging": scripts + main("stage", [str(run), "--to", str(tmp_path / "disk")], 0)
        + "; assert not {'numpy', 'huggingface_hub'} & set(sys.modules)",
        **{module: f"import {module}" for module in PLANNING},
        "parsing": f"from mimo.config.cli import parse; import mimo.config.validate; parse({FAKE!r})",
        "families": FAMILIES,
        "a dry run": main("train_hetero", MOCK, 0),
        "a folder that is missing": main("train_hetero", ENERGON, 2),
        "a dry run of a cluster script": scripts + main("preflight", ["--dry-run", str(SCRIPT)], 0),
        **{f"mimo {' '.join(words)}": main("mimo.commands.main", words, code) for words, code in COMMANDS},
        "a report": main("scripts.report", [str(run)], 0),
        # The last: it reads a tokenizer, which transformers does.
        LAST: main("train_rl", [*RL, "--dry-run"], 0),
    }


def imported(cases: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Return the large packages that a process has imported after each case."""
    done = subprocess.run([sys.executable, "-c", RUN], cwd=folder, input=json.dumps(cases), text=True,
                          capture_output=True, timeout=200, check=False,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"})
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_programs_that_people_wait_for_import_no_torch(cases: dict[str, str], tmp_path: Path) -> None:
    assert imported(cases, tmp_path) == dict.fromkeys(cases, []) | {LAST: ["transformers"]}


def test_an_import_of_torch_would_be_seen(tmp_path: Path) -> None:
    assert imported({"a": "import json", "b": "import torch"}, tmp_path) == {"a": [], "b": ["torch"]}


def test_the_process_of_an_engine_imports_no_megatron() -> None:
    # Its imports would take seconds of every start, and print warnings of Megatron Core.
    code = "import sys, mimo.rollout.process; print('megatron' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")
    from mimo.rl.launch_engine import leave_group

    assert leave_group.__module__ == "mimo.rollout.process"


def test_a_python_without_the_packages_says_which_one_has_them() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", "import mimo"], cwd=ROOT, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 1 and "run 'source .venv/bin/activate' in this shell" in done.stderr
