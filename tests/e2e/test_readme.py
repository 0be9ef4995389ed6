"""README.md and docs/: the code runs, the commands are accepted, the output is what is printed, the flags exist."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from data import character_tokenizer
from mimo import registry
from mimo.commands.flags import COMMANDS, parse_command
from mimo.config.cli import FileConfig, parse, parse_as
from mimo.config.rl_run import DESCRIPTION, RlRunConfig, validate_rl
from mimo.config.toml_file import flag_name, typed_fields
from mimo.config.validate import run_world_size, validate
from mimo.grid.dry_run import dry_run_report
from mimo.observability.flops import PEAK_TFLOPS
from mimo.planner.memory_lines import memory_line
from tests.support.digit_shards import write_shards

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = ROOT / "tests" / "support"
# Page with a complete example -> the file of that example.
EXAMPLE_PAGES = {"providers.md": "own_provider.py", "own_data.md": "own_data.py"}
# Flags of other programs in the pages -> a file that shows that they exist; None: not of this repository.
OTHER_FLAGS = {
    "--steps": "scripts/quickstart.sh",
    **dict.fromkeys(("--learning-rate", "--tensor-model-parallel-size")),
    **dict.fromkeys(("--nnodes", "--node-rank", "--master-addr")),
    "--slow": "scripts/test.sh",
    "--head": "scripts/rl/gsm8k_ray_slurm.sh",
    "--prove": "scripts/bench/refit_plan.py",
    **dict.fromkeys(("--slurm", "--gpus-per-node"), "scripts/bench/rl_sweep.py"),
    **dict.fromkeys(("--overlap-moe-expert-parallel-comm", "--fp8-param-gather"), "mimo/config/flag_hints.py"),
    "--out": "scripts/data_stats.py",
    **dict.fromkeys(("--output", "--plan"), "scripts/report.py"),
    **dict.fromkeys(("--image-size", "--llava"), "scripts/prepare_digits.py"),
    "--nproc": "scripts/run_hetero_mock.sh",
    "--run": "scripts/bench/train.py",
    **dict.fromkeys(("--lengths", "--frames", "--part", "--context", "--tensor"), "scripts/bench/long_rows.py"),
    **dict.fromkeys(("--context-recomputed", "--tensor-recomputed")),
    "--repeats": "scripts/bench/startup.py",
    "--warmup-runs": "scripts/bench/startup.py",
    "--case": "scripts/bench/bridge.py",
    "--blocks": "scripts/bench/schedule.py",
    "--warmup-blocks": "scripts/bench/schedule.py",
    "--synthetic": "scripts/bench/schedule.py",
    "--size-mb": "scripts/bench/bridge.py",
    **dict.fromkeys(("--gpus", "--preset", "--candidates", "--rounds", "--loss-steps", "--search-steps",
                     "--loss-tolerance", "--kind", "--list"), "scripts/bench/layouts.py"),
    **dict.fromkeys(("--homogeneous", "--colocated"), "scripts/bench/layouts.py"),
    "--warmup-steps": "scripts/bench/train.py",
    **dict.fromkeys(("--num-samples", "--num-shards", "--slip-fraction"), "scripts/prepare_photos.py"),
    "--model": "scripts/bench/refit.py",
    "--trainer": "scripts/bench/refit.py",
    **dict.fromkeys(("--engine-tp", "--arm"), "scripts/bench/refit.py"),
    **dict.fromkeys(("--flags", "--good"), "scripts/bench/refit_verify.py"),
    "--layout": "scripts/bench/rl_sweep.py",
    "--no-variants": "scripts/bench/layouts.py",
    "--tokens": "scripts/bench/rl_sweep.py",
    "--prompt-length": "scripts/bench/rl_sweep.py",
    "--completion-length": "scripts/bench/rl_sweep.py",
    "--memory-limit-gib": "scripts/bench/rl_sweep.py",
    "--to": "scripts/stage.py",
    "--timeout-s": "scripts/stage.py",
    "--retries": "scripts/stage.py",
    "--verify": "scripts/stage.py",
    "--print-path": "scripts/stage.py",
    "--upgrade-package": "scripts/compile_requirements.sh",
    "--no-deps": "scripts/lib.sh",
    **dict.fromkeys(("--words-fraction", "--model"), "scripts/prepare_digits.py"),
    **dict.fromkeys(("--standalone", "--master-port"), None),
    **dict.fromkeys(("--rm", "--shm-size", "--ipc", "--user", "--nv", "--bind"), None),
    **dict.fromkeys(("--dtype", "--enforce-eager", "--max-model-len", "--port"), None),
    "--nproc-per-node": None,
    "--no-build-isolation": None,
    "--address": None,
    "--num-gpus": None,
    "--shutdown-timeout": None,
    "--requeue": None,
    **dict.fromkeys(("--non-interactive", "--sample-type", "--split-parts"), None),
    "--account": None,
    "--partition": None,
    "--ntasks-per-node": None,
}
# Messages of other programs in the page on troubleshooting.
OTHER_MESSAGES = ("EADDRINUSE", "mimo: command not found", "ModuleNotFoundError: No module named 'numpy'",
                  "Available memory on node 0 (... GiB) on startup is less than desired CPU memory utilization ...")


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Commands of the shell blocks, continued lines joined, comments dropped."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := line.split("#")[0].strip())]


def docstring_examples(script: str) -> list[str]:
    """Commands under `Examples:` in the docstring of a script."""
    text = ast.get_docstring(ast.parse((ROOT / script).read_text())) or ""
    return [line.strip() for line in text.partition("Examples:\n")[2].splitlines()]


def training_commands(script: str = "train_hetero.py") -> list[tuple[int | None, list[str]]]:
    """Processes (None without torchrun) and flags of every command that starts a trainer."""
    found = []
    typed = [*(command for page in PAGES for command in commands(page)), *docstring_examples(script)]
    for command in typed:
        launcher, entry, flags = command.partition(script)
        if entry:
            counts = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", launcher)
            found.append((math.prod(map(int, counts)) if counts else None, shlex.split(flags)))
    return found


def example_commands() -> list[tuple[int | None, list[str]]]:
    return [found for found in training_commands() if any(flag.startswith("own_") for flag in found[1])]


def test_the_pages_show_the_examples_as_they_are() -> None:
    for page, name in EXAMPLE_PAGES.items():
        assert blocks(ROOT / "docs" / page, "python") == [(EXAMPLES / name).read_text()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages have a reader make in datasets."""
    folder = tmp_path_factory.mktemp("data")
    write_shards(folder / "digits8", "--llava")
    (folder / "llava-digits").symlink_to(folder / "digits8")
    (folder / "cats").symlink_to(folder / "digits8" / "llava")
    (folder / "own").symlink_to(folder / "digits8" / "digits")
    character_tokenizer.write(folder / "characters")
    write_shards(folder / "scans", "--digits-max", "2", "--llava", "--model", "--words-fraction", "0.6")
    (folder / "wanted").symlink_to(folder / "scans")
    return folder


def placed(flags: list[str], data: Path) -> list[str]:
    """Return flags with the folder `data` in place of those that the pages have a reader make."""
    return [re.sub("^datasets", str(data), flag).replace("qa/tokenizer", f"{data}/characters") for flag in flags]


@pytest.mark.parametrize(("processes", "flags"), training_commands(),
                         ids=[str(place) for place in range(len(training_commands()))])
def test_every_command_is_accepted(processes, flags, tmp_path, data, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    # models/NAME stands for a folder that a reader has: one of a LLaVA.
    llava = registry.model_provider("llava")
    (tmp_path / "config.json").write_text(json.dumps(llava.hf_config(llava.Config())))
    character_tokenizer.write(tmp_path)
    template = "{% for each in messages %}{{ each.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    flags = [str(tmp_path) if flag.startswith("models/") else flag for flag in flags]
    flags = placed(flags, data)
    if "--print-config" in flags:
        with pytest.raises(SystemExit) as ended:
            parse(flags)
        assert ended.value.code == 0
        return
    config = parse(flags)
    layout = validate(config, run_world_size(config, {} if processes is None else {"WORLD_SIZE": str(processes)}))
    # As with --dry-run.
    assert dry_run_report(config, layout, registry.model_provider(config.model.model_provider)).startswith("layout ")


@pytest.mark.parametrize(("processes", "flags"), training_commands("train_rl.py"))
def test_every_command_of_reinforcement_learning_is_accepted(processes, flags, tmp_path, data, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "valid.jsonl").touch()
    flags = placed(flags, data)
    flags = [*flags, "--qa-folder", str(tmp_path)] if "own_prompts:provider" in flags else flags
    config = parse_as(RlRunConfig, flags, DESCRIPTION)
    validate_rl(config, run_world_size(config, {} if processes is None else {"WORLD_SIZE": str(processes)}))


def mimo_commands() -> list[list[str]]:
    return [shlex.split(command)[1:] for page in PAGES for command in commands(page) if command.startswith("mimo ")]


@pytest.mark.parametrize("words", mimo_commands(), ids=[" ".join(words) for words in mimo_commands()])
def test_every_mimo_command_is_accepted(words: list[str], data: Path) -> None:
    _, run_flags = parse_command(placed(words, data))
    parse(run_flags)


def test_every_flag_exists() -> None:
    configs = [FileConfig, *COMMANDS.values()]
    configs += [*(type(section) for section in vars(RlRunConfig()).values() if section is not None)]
    configs += [
        registry.model_provider(name).Config
        for name in (*registry.MODEL_PROVIDERS, "tests.support.own_provider:provider")
    ]
    configs += [
        registry.dataset_provider(name).Config
        for name in ("conversations", "digits", "energon", "mock", "tests.support.own_data:provider")
    ]
    configs += [registry.prompt_provider(name).Config for name in ("arithmetic", "gsm8k")]
    types = {name: kind for config in configs for name, kind in typed_fields(config).items()}
    known = {flag_name(name) for name in types} | {
        flag_name(f"no_{name}") for name, kind in types.items() if kind is bool
    }
    known |= {"--help", *OTHER_FLAGS}
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", page.read_text()))
        assert named <= known, f"{page.name}: {sorted(named - known)}"
    for flag, script in OTHER_FLAGS.items():
        assert script is None or flag in (ROOT / script).read_text(), f"{script} has no {flag}"


def test_lists_of_what_is_built_in_are_complete() -> None:
    def missing(names: Iterable[str], path: str, form: str = "`{}`") -> list[str]:
        text = (ROOT / path).read_text()
        return [f"{path}: {name}" for name in names if form.format(name) not in text]

    architectures = [name for provider in registry.MODEL_PROVIDERS
                     for name in getattr(registry.model_provider(provider), "hf_architectures", ())]
    assert not [*missing(registry.MODEL_PROVIDERS, "docs/providers.md"),
                *missing(registry.DATASET_PROVIDERS, "docs/data.md"), *missing(registry.REWARDS, "docs/rl_engine.md"),
                *missing(architectures, "docs/weights.md"),
                *missing([", ".join(sorted(registry.DATASET_PROVIDERS))], "mimo/config/trainer.py", "({})"),
                *missing([", ".join(sorted(registry.PROMPT_PROVIDERS))], "mimo/config/rl_run.py", "({})"),
                *missing([", ".join(sorted(registry.REWARDS))], "mimo/config/rl.py", "({})"),
                *missing({name.split()[0] for name, _ in PEAK_TFLOPS}, "mimo/config/trainer.py", " {}")]


def test_links_lead_somewhere() -> None:
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    named = [
        f"{page.name}: {path}"
        for page in PAGES
        for path in re.findall(r"`((?:tests|scripts|mimo|docs)/[\w./-]+)`", page.read_text())
        if not (ROOT / path).exists()
    ]
    assert missing + named == []


def shown_outputs() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            command, _, output = block.removeprefix("$ ").partition("\n")
            found.append((command, output))
    return found


@pytest.mark.parametrize(("command", "output"), shown_outputs(), ids=["refused", "fastest", "dry-run"])
def test_outputs_are_what_is_printed(command: str, output: str) -> None:
    python, *arguments = shlex.split(command)
    assert python == "python"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=kept, text=True, capture_output=True, timeout=120, check=False
    )
    assert done.stdout + done.stderr == output


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "flags"), example_commands(), ids=["own_data", "own_provider"])
def test_the_examples_train(processes: int, flags: list[str], tmp_path: Path) -> None:
    for page, name in EXAMPLE_PAGES.items():
        (code,) = blocks(ROOT / "docs" / page, "python")
        (tmp_path / name).write_text(code)
    subprocess.run([sys.executable, "own_data.py"], cwd=tmp_path, check=True,
                   env=os.environ | {"PYTHONPATH": str(ROOT)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               str(ROOT / "train_hetero.py"), *flags, "--device", "cpu", "--run-dir", "run"]
    settings = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Warning" not in done.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "lm loss" in record]
    assert len(steps) == 2
    assert all(math.isfinite(step["lm loss"]) and step["grad-norm"] > 0 and step["image-tokens"] > 0 for step in steps)
    if "--eval-iters" in flags:
        assert records[-1]["samples validation"] == 8
        assert re.search(r"valid/1: read '.*', is 'yes'", done.stdout)


def memory_rows() -> list[tuple[str, int, str]]:
    page = (ROOT / "docs" / "memory.md").read_text()
    return [(flags, int(gpus), gib) for flags, gpus, gib in
            re.findall(r"^\| `(--model-provider [^`]+)` \| (\d+) \| ([\d.]+) \|$", page, re.M)]


@pytest.mark.parametrize(("flags", "gpus", "gib"), memory_rows())
def test_memory_is_what_is_predicted(flags: str, gpus: int, gib: str) -> None:
    base = "--dry-run --dataset-provider mock --global-batch-size 64".split()
    config = parse([*base, *flags.split()])
    layout = validate(config, run_world_size(config, {}))
    assert (layout.world_size, memory_line(config, layout).split(" GiB")[0]) == (gpus, f"memory: about {gib}")


def test_quoted_messages_are_in_the_source() -> None:
    sources = [path for folder in ("mimo", "data", "providers") for path in (ROOT / folder).rglob("*.py")]
    literals = "\n".join(node.value for path in sources for node in ast.walk(ast.parse(path.read_text()))
                         if isinstance(node, ast.Constant) and isinstance(node.value, str))
    quoted = [line for block in blocks(ROOT / "docs" / "troubleshooting.md", "text") for line in block.splitlines()]
    assert len(quoted) > 10
    missing = [part for line in quoted if line not in OTHER_MESSAGES for part in line.split("...")
               if part.strip(" ,;:") and part.strip() not in literals]
    assert missing == []
