"""`scripts/preflight.py` part by part: what a host says of itself, what the nodes make of each other's answers."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from preflight_checks import nodes
from preflight_checks.host import (
    Findings,
    check_gpus,
    check_mamba_kernels,
    check_open_files,
    check_read,
    check_space,
    check_transformer_engine,
    check_written,
    format_size,
)
from preflight_checks.job_script import read_directives
from preflight_checks.reach import JobNode, MessageBoard, pairs_of
from preflight_checks.run_plan import Checkpoints, checkpoints, has_mamba_layers, read_paths, written_paths

from mimo.config.cli import parse

MOCK = ["--model-provider", "mock", "--train-iters", "100", "--device", "cpu"]
Usage = namedtuple("Usage", "total used free")


def place(node: int, count: int, port: int = 0) -> JobNode:
    return JobNode(node, tuple(f"host{number}" for number in range(count)), "127.0.0.1", port, gpus_per_node=2)


def test_a_path_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "blend.yaml").write_text("data")
    findings = Findings()
    check_read({"--data-path": tmp_path / "blend.yaml", "--tokenizer": tmp_path}, findings)
    assert findings.problems == [] and len(findings.facts) == 2
    check_read({"--data-path": tmp_path / "nowhere.yaml"}, findings)
    assert findings.problems == [f"--data-path {tmp_path}/nowhere.yaml: cannot be read: No such file or directory"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads and writes everything")
def test_permissions_count(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir(mode=0)
    findings = Findings()
    check_read({"--tokenizer": secret}, findings)
    check_written({"--save": secret / "run"}, findings)
    assert len(findings.problems) == 2 and all("Permission denied" in problem for problem in findings.problems)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    findings = Findings()
    check_written({"--save": tmp_path / "file" / "run", "--run-dir": tmp_path / "new" / "run"}, findings)
    assert findings.problems == [f"--save {tmp_path}/file/run: cannot be written: Not a directory"]
    assert list((tmp_path / "new" / "run").iterdir()) == [], "what was tried is removed"


@pytest.mark.parametrize(("free", "saves", "kept", "problems", "warnings"), [
    (2500, 20, 10, [], ["11 checkpoints to come need"]),
    (2500, 3, 3, [], ["3 checkpoints to come need"]),
    (15000, 20, 10, [], []),
    (1999, 20, 10, ["2.0 GiB free", "2 times a checkpoint of about 1,000.0 MiB need 2.0 GiB"], []),
    # The only one is deleted when the next one is complete.
    (1999, 20, 1, ["2.0 GiB free", "2 times a checkpoint of about 1,000.0 MiB need 2.0 GiB"], []),
    (1999, 1, 1, [], []),
])
def test_space_is_compared_with_the_checkpoints(tmp_path, monkeypatch, free, saves, kept, problems, warnings):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free * 1024**2))
    findings = Findings()
    check_space(tmp_path, Checkpoints(1000 * 1024**2, saves, kept, 50), findings)
    for found, words in ((findings.problems, problems), (findings.warnings, warnings)):
        assert len(found) == bool(words)
        assert [word for word in words if word not in found[0]] == []


def test_checkpoints_that_are_there_need_no_space(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / "metadata.json").write_text("{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 1200 * 1024**2))
    findings = Findings()
    check_space(tmp_path, Checkpoints(1000 * 1024**2, 20, 3, 50), findings)
    assert (findings.problems, findings.warnings) == ([], []), "one is written before the oldest is deleted"


@pytest.mark.parametrize(("hard", "world_size", "refused"), [
    (1024, 256, False), (1024, 264, True), (4096, 1792, False), (4096, 1800, True),
    (resource.RLIM_INFINITY, 100_000, False),
])
def test_the_limit_of_open_files_is_enough_for_all_connections(monkeypatch, hard, world_size, refused):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_NOFILE: (64, hard)}[kind])
    findings = Findings()
    check_open_files(world_size, findings)
    assert len(findings.problems) == refused
    assert not refused or f"is {hard}, and {world_size} ranks need about {2 * world_size + 512}" in findings.problems[0]


def test_sizes_as_text():
    assert [format_size(size) for size in (0, 2048, 3 * 1024**3, 2.5 * 1024**4)] == [
        "0.0 KiB", "2.0 KiB", "3.0 GiB", "2.5 TiB"]


GPU = "NVIDIA H100 80GB HBM3, 81559, {used}, {ecc}"


@pytest.mark.parametrize(("rows", "visible", "expected"), [
    (["0, " + GPU.format(used=4, ecc=0), "1, " + GPU.format(used=500, ecc="[N/A]")], None, []),
    (["0, " + GPU.format(used=4, ecc=0)], None, ["1 visible, 2 are needed"]),
    (["0, " + GPU.format(used=4, ecc=0), "1, " + GPU.format(used=4, ecc=0)], "1", ["(CUDA_VISIBLE_DEVICES=1)"]),
    (["0, " + GPU.format(used=4, ecc=0), "1, " + GPU.format(used=70000, ecc=0)], None, ["GPU 1: 70000 MiB of 81559"]),
    (["0, " + GPU.format(used=4, ecc=3), "1, " + GPU.format(used=4, ecc=0)], None, ["GPU 0", "3 uncorrected ECC"]),
    (["0, " + GPU.format(used=4, ecc=0), "Unable to determine the device handle for GPU 0000:81:00.0: Unknown Error"],
     None, ["GPUs: nvidia-smi: Unable to determine the device handle"]),
])
def test_gpus_are_counted_and_looked_at(tmp_path, monkeypatch, rows, visible, expected):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\ncat <<END\n" + "\n".join(rows) + "\nEND\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    findings = Findings()
    check_gpus(2, findings)
    assert len(findings.problems) == bool(expected)
    assert [words for words in expected if words not in findings.problems[0]] == []


def test_a_host_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = Findings()
    check_gpus(8, findings)
    assert findings.problems == ["GPUs: there is no nvidia-smi; 8 GPUs are needed"]


@pytest.mark.parametrize(("code", "problem"), [
    (None, "cannot be imported by "), ("import sys; assert 'torch' in sys.modules", None),
    ("import time; time.sleep(60)", "was not imported in 2 s"),
    ("raise ImportError('undefined symbol: _ZN3c10')", "ImportError: undefined symbol: _ZN3c10; scripts/setup.sh gpu"),
])
def test_transformer_engine_is_imported_and_not_only_found(tmp_path, monkeypatch, code, problem):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    if code is not None:
        (package / "pytorch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    findings = Findings()
    check_transformer_engine(2.0 if code and "sleep" in code else 60.0, findings)
    assert len(findings.problems) == (problem is not None) and len(findings.facts) == (problem is None)
    assert problem is None or problem in findings.problems[0], findings.problems


def test_mamba_layers_without_their_kernels_are_a_warning(monkeypatch):
    there: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in there else None)
    findings = Findings()
    check_mamba_kernels(findings)
    there.add("mamba_ssm")
    check_mamba_kernels(findings)
    first, second = findings.warnings
    assert "without mamba_ssm and causal_conv1d; " in first and first.endswith(" mamba-ssm causal-conv1d")
    assert "without causal_conv1d; " in second and findings.problems == []
    there.add("causal_conv1d")
    check_mamba_kernels(findings)
    assert len(findings.warnings) == 2 and findings.facts == ["kernels of Mamba-2 layers are installed"]


@pytest.mark.parametrize(("flags", "device", "asked"), [
    (["--transformer-impl", "transformer_engine"], "cuda", {"engine"}), ([], "cuda", set()),
    (["--model-provider", "nemotron-moe-vlm-tiny", "--transformer-impl", "local"], "cuda", {"mamba"}),
    (["--model-provider", "nemotron-moe-vlm-tiny", "--hybrid-layer-pattern", "*E*E"], "cuda", set()),
    (["--model-provider", "nemotron-moe-vlm-tiny"], "cpu", set()),
])
def test_packages_are_asked_for_by_the_flags(monkeypatch, flags, device, asked):
    seen: set[str] = set()
    monkeypatch.setattr(nodes, "check_gpus", lambda *_: None)
    monkeypatch.setattr(nodes, "check_transformer_engine", lambda *_: seen.add("engine"))
    monkeypatch.setattr(nodes, "check_mamba_kernels", lambda *_: seen.add("mamba"))
    monkeypatch.setattr(nodes, "check_written", lambda *_: None)
    config = parse([*MOCK[:-2], *flags])
    nodes.check_host(config, device, 1, 1, 60.0)
    assert seen == asked and has_mamba_layers(config) == ("nemotron" in "".join(flags) and "*E*E" not in flags)


@pytest.mark.parametrize(("flags", "expected"), [(["--device", "cpu"], "gloo in each node"),
                                                 ([], "there is no nvidia-smi; 2 GPUs are needed")])
def test_only_a_run_on_cpus_needs_no_gpus(tmp_path, monkeypatch, capsys, flags, expected):
    """With --device auto, a run on nodes whose GPUs do not work would go on without them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nodes, "run_check", lambda board, topic, group, device, timeout_s: board.post(
        topic, {"failed": {}, "bytes_per_s": 1e9}))
    config = parse([*MOCK[:-2], *flags, "--run-dir", str(tmp_path / "run")])
    code = nodes.check_nodes(MessageBoard(place(0, 1), 5.0), config, 5.0)
    assert expected in capsys.readouterr().out and code == int(not flags)


def test_paths_and_sizes_come_from_the_flags_of_the_run(tmp_path):
    config = parse([*MOCK, "--dataset-provider", "energon", "--data-path", "a/blend.yaml", "--tokenizer", "b",
                    "--load", "c", "--save", "d", "--save-interval", "10", "--keep-last", "3"])
    assert read_paths(config) == {"--data-path": Path("a/blend.yaml"), "--tokenizer": Path("b"), "--load": Path("c")}
    assert written_paths(config) == {"--save": Path("d"), "--run-dir": Path("runs")}
    assert "--load" not in read_paths(parse([*MOCK, "--load", "d", "--save", "d"])), "it may be empty still"
    saved = checkpoints(config)
    assert saved is not None and (saved.saves, saved.kept, saved.interval) == (10, 3, 10)
    weights = checkpoints(parse([*MOCK, "--save", "d", "--no-save-optim"]))
    frozen = checkpoints(parse([*MOCK, "--save", "d", "--freeze", "vision,language"]))
    assert weights is not None and frozen is not None
    assert saved.bytes_each == 7 * weights.bytes_each, "2 B of weights, 4 B each for two moments and a copy"
    assert weights.bytes_each == frozen.bytes_each
    assert checkpoints(parse(MOCK)) is None


def test_directives_end_at_the_first_command():
    text = "#!/bin/bash\n#SBATCH --nodes=4 --exclusive\n# more\n\n#SBATCH --time 1:00:00 # an hour\ntrue\n#SBATCH -N 8"
    assert read_directives(text) == {"nodes": "4", "exclusive": "", "time": "1:00:00"}
    assert read_directives("#SBATCH -N 8\n#SBATCH --signal=B:TERM@600\n") == {"nodes": "8", "signal": "B:TERM@600"}


@pytest.mark.parametrize("count", range(2, 8))
def test_every_node_has_two_neighbours(count):
    pairs = [pair for turn in (0, 1) for pair in pairs_of(place(0, count), turn)]
    for turn in (0, 1):
        busy = [node for pair in pairs_of(place(0, count), turn) for node in pair]
        assert len(busy) == len(set(busy)), "a node is in one pair at a time"
    partners = {node: [pair for pair in pairs if node in pair] for node in range(count)}
    ends = {0, count - 1} if count % 2 or count == 2 else set()
    assert {node: len(found) for node, found in partners.items()} == {
        node: 1 if node in ends else 2 for node in range(count)}


def run_nodes(monkeypatch, capsys, count: int, *, silent: int | None = None, cut_off: frozenset[int] = frozenset(),
              problems: dict[int, list[str]] | None = None) -> tuple[list[int | None], str]:
    """Run the nodes of a job as threads, with the processes of a check replaced; gives exit codes and the report."""
    def pretend(board, topic, group, device, timeout_s):
        bad = len(group) > 1 and bool(cut_off & set(group))
        board.post(topic, {"failed": {"0": "connection refused"} if bad else {}, "bytes_per_s": 1e9 * len(group)})

    found = dict(problems or {})
    here = threading.local()
    monkeypatch.setattr(nodes, "run_check", pretend)
    monkeypatch.setattr(nodes, "check_host", lambda *_: Findings(problems=found.get(here.node, [])))
    config, codes = parse(MOCK), [None] * count
    first = MessageBoard(place(0, count), 5.0)

    def one(node: int) -> None:
        here.node = node
        board = first if node == 0 else MessageBoard(place(node, count, first.port), 5.0)
        codes[node] = nodes.check_nodes(board, config, 0.5 if silent is not None else 5.0)

    threads = [threading.Thread(target=one, args=(node,)) for node in range(count) if node != silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes, capsys.readouterr().out


def test_all_is_well(monkeypatch, capsys):
    codes, report = run_nodes(monkeypatch, capsys, 3)
    assert codes == [0, 0, 0]
    assert "gloo over all nodes: 3.0 GB/s" in report and report.endswith("preflight: ready\n")


def test_a_node_that_does_not_appear_is_named(monkeypatch, capsys):
    codes, report = run_nodes(monkeypatch, capsys, 3, silent=1)
    assert codes == [1, None, 1]
    assert "PROBLEM host1: has not answered in 0.5 s" in report and report.endswith("preflight: not ready\n")


def test_a_line_of_all_nodes_is_reported_once(monkeypatch, capsys):
    missing, used = "--tokenizer /nowhere: cannot be read", "GPU 3: 70000 MiB are in use"
    codes, report = run_nodes(monkeypatch, capsys, 3, problems={0: [missing], 1: [missing, used], 2: [missing]})
    assert codes == [1, 1, 1]
    lines = [line.strip() for line in report.splitlines() if "PROBLEM" in line]
    assert lines == [f"PROBLEM {missing}", f"PROBLEM host1: {used}"]
    assert "over all" not in report, "nothing is started on nodes that are not ready"


@pytest.mark.parametrize(("count", "cut_off", "expected"), [(4, {2}, "suspected: host2 "),
                                                            (5, {0}, "suspected: host0 "), (5, {1, 4}, "host1, "),
                                                            (3, {0, 1, 2}, "no node reaches a neighbour")])
def test_the_node_behind_a_broken_network_is_named(monkeypatch, capsys, count, cut_off, expected):
    codes, report = run_nodes(monkeypatch, capsys, count, cut_off=frozenset(cut_off))
    assert codes == [1] * count
    assert report.count("connection refused") == 1, "a reason is said once, with its nodes"
    first = next(line for line in report.splitlines() if "PROBLEM" in line)
    assert expected in first
