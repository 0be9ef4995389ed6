"""scripts/sbatch: shellcheck, pinned values, layouts that fit, mistakes that are named, how a job ends."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from preflight_checks.job_script import Job, read_job
from preflight_checks.run_plan import plan

from mimo.config.cli import parse
from mimo.config.validate import num_microbatches, train_iterations
from tests.support.launch import ROOT
from tests.support.slurm import end, put_cluster, requeued, run_preflight, stop_training, submit

SBATCH = ROOT / "scripts" / "sbatch"
SHARED = {"common.sh", "node.sh", "nemotron_54l.sh"}
SCRIPTS = sorted(path for path in SBATCH.glob("*.sh") if path.name not in SHARED)

# script: nodes, encoder dp, language dp, ep, global batch, microbatches, train samples, iterations
LAYOUTS = {"homogeneous_8n_gbs192.sh": (8, 32, 32, 16, 192, 6, 36_621_094, 190_735),
           "parity_9n_gbs192.sh": (9, 8, 32, 16, 192, 6, 36_621_094, 190_735),
           "prod_33n_gbs768_ep8.sh": (33, 8, 128, 8, 768, 6, 122_070_313, 158_946),
           "prod_68n_gbs768_ep8.sh": (68, 32, 256, 8, 768, 3, 122_070_313, 158_946),
           "prod_100n_gbs768.sh": (100, 32, 384, 8, 768, 2, 122_070_313, 158_946)}


def preflight(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "preflight.py"), *words], capture_output=True,
                          text=True, timeout=200, check=False)


def test_shellcheck():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    scripts = sorted(map(str, (ROOT / "scripts").rglob("*.sh")))
    command = [str(shellcheck), "-x", "-P", "SCRIPTDIR", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_is_in_the_scripts():
    shared = (SBATCH / "nemotron_54l.sh").read_text()
    directives = set()
    for path in SCRIPTS:
        text = path.read_text()
        # ${NAME:?message} asks for a value, ${NAME:-value} and its like would take one from the environment.
        assert re.findall(r"\$\{\w+:?[-=+][^}]*\}", text + shared) == []
        body = shared[shared.index("    flags=(") :]
        assigned = set(re.findall(r"^ *(?:local )?(\w+)=", text + shared, re.M))
        assert set(re.findall(r"\$\{?(\w+)", body)) - assigned == {"ENCODER_DP", "LLM_DP", "LAYOUT"}
        directives.add(tuple(line for line in text.splitlines()
                             if line.startswith("#SBATCH") and "--job-name=" not in line and "--nodes=" not in line))
        assert f"#SBATCH --job-name={re.search('^RUN_NAME=(.*)$', text, re.M)[1]}\n" in text
    (same,) = directives
    for directive in ("--requeue", "--signal=B:TERM@", "--open-mode=append", "--ntasks-per-node=1"):
        assert any(line.startswith(f"#SBATCH {directive}") for line in same)


def test_no_value_of_a_run_is_in_what_they_share():
    text = (SBATCH / "common.sh").read_text() + (SBATCH / "node.sh").read_text()
    assert set(re.findall(r"\$\{(\w+):?-", text)) == {
        "PRINT_COMMAND", "SLURM_RESTART_COUNT", "CUDA_DEVICE_MAX_CONNECTIONS"}
    assert [flag for flag in ("--lr", "--global-batch-size", "--seq-length", "--model-provider") if flag in text] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_layout_fits_and_is_that_of_the_table(path):
    job = read_job(path)
    config = parse(job.flags)
    topology = plan(config, job.world_size)
    nodes, encoder_dp, llm_dp, ep, global_batch, microbatches, samples, iterations = LAYOUTS[path.name]
    assert (job.nodes, job.gpus_per_node) == (nodes, 8)
    layout = config.layout
    homogeneous = path.name.startswith("homogeneous")
    encoder_tp = 2 if homogeneous else 1
    assert (layout.encoder_tp, layout.encoder_dp, layout.llm_tp, layout.llm_dp, layout.llm_ep) == (
        encoder_tp, encoder_dp, 2, llm_dp, ep)
    assert (config.train.global_batch_size, num_microbatches(config)) == (global_batch, microbatches)
    assert (config.train.train_samples, train_iterations(config)) == (samples, iterations)
    assert f"layout {'colocated' if homogeneous else 'disjoint'}, {nodes * 8} ranks, {llm_dp} lanes" in topology
    assert f"NUM_MICROBATCHES: {microbatches} = GBS {global_batch} / (MBS 1 * LLM_DP {llm_dp})" in job.printed
    assert f"iterations:       {iterations} " in job.printed
    schedule, optim = config.schedule, config.optim
    assert (optim.lr, optim.min_lr, optim.weight_decay, optim.clip_grad) == (1.2e-3, 1.2e-5, 0.1, 1.0)
    assert (schedule.lr_decay_style, schedule.lr_wsd_decay_style) == ("WSD", "minus_sqrt")
    assert schedule.lr_warmup_samples == 1_024_000
    assert schedule.lr_decay_samples == samples - schedule.lr_warmup_samples
    assert schedule.lr_wsd_decay_samples == round(0.15 * samples)
    assert (config.checkpoint.save_interval, config.observe.log_interval, config.train.seed) == (1000, 100, 1234)
    assert config.train.device == "cuda", "a node without a GPU is an error"
    assert config.checkpoint.save == config.checkpoint.load
    row = next(line for line in (SBATCH / "README.md").read_text().splitlines() if line.startswith(f"| `{path.name}`"))
    assert f"| {nodes} = " in row and f"| TP{encoder_tp} DP{encoder_dp} | TP2 DP{llm_dp} EP{ep} |" in row
    assert f"| {global_batch} = {microbatches} x 1 x {llm_dp} |" in row


def test_every_script_is_in_the_tables():
    assert {path.name for path in SCRIPTS} == LAYOUTS.keys()


def test_a_dry_run_prints_the_topology():
    script = SBATCH / "prod_33n_gbs768_ep8.sh"
    done = preflight("--dry-run", str(script))
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("layout disjoint, 264 ranks, 128 lanes", "vision dp 0 -> lanes 0-15", "NUM_MICROBATCHES: 6 ",
                  "checkpoints: about 489.3 GiB each", "to be edited: --data-path /path/to/", "33 nodes x 8 GPUs fit"):
        assert words in done.stdout


def changed(tmp_path: Path, name: str, old: str, new: str) -> Path:
    """Return a script with one change. Without `old`, `new` stands before its last line, where a script sets values."""
    text = (SBATCH / name).read_text()
    old = old or "train_nemotron\n"
    assert old in text
    new = new if old != "train_nemotron\n" or "train" in new else f"{new}\ntrain_nemotron\n"
    (tmp_path / "broken.sh").write_text(text.replace(old, new))
    return tmp_path / "broken.sh"


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("", "GBS=700", ("NUM_MICROBATCHES = GBS 700 / (MBS 1 * LLM_DP 128): 700 is not divisible by 128",)),
    ("", "GBS=", ("GBS is not set",)),
    ("LLM_NODES=32", "LLM_NODES=16", ("--nodes=33", "uses 17")),
    ("#SBATCH --nodes=33", "#SBATCH --nodes=32", ("--nodes=32", "uses 33")),
    ("#SBATCH --nodes=33", "", ("#SBATCH --nodes=N",)),
    ("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks-per-node=8", ("--ntasks-per-node=8",)),
    ("", "unset TOKENIZER", ("TOKENIZER is not set",)),
    ("", "DATA_PATH=", ("DATA_PATH is not set",)),
    ("LLM_EP=8\n", "", ("LLM_EP is not set",)),
    ("RUN_NAME=", "NAME=", ("RUN_NAME",)),
    ("", "LLM_TP=3", ("LLM_DP = ", "256 is not divisible by 3")),
    ("LLM_EP=8", "LLM_EP=7", ("--llm-ep 7",)),
    ("ENCODER_NODES=1\nLLM_NODES=32", "ENCODER_NODES=3\nLLM_NODES=30", ("768 is not divisible by 120",)),
    ("ENCODER_NODES=1", "ENCODER_NODES=0", ("--nodes=33", "uses 32")),
    ("", "MBS=2", ("--micro-batch-size 2 must be 1",)),
    ("", "scontrol requeue 1", ("called scontrol in a dry run",)),
    ("train_nemotron\n", "true # no train\n", ("launch_training",)),
])
def test_a_mistake_in_a_script_is_named(tmp_path, old, new, expected):
    with pytest.raises(ValueError) as found:
        job = read_job(changed(tmp_path, "prod_33n_gbs768_ep8.sh", old, new))
        plan(parse(job.flags), job.world_size)
    assert [words for words in expected if words not in str(found.value)] == [], found.value


def test_flags_that_contradict_each_other_are_named():
    job = read_job(SBATCH / "prod_33n_gbs768_ep8.sh")
    with pytest.raises(ValueError, match="--lr-decay-iters 5"):
        plan(parse([*job.flags, "--lr-decay-iters", "5"]), job.world_size)


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path):
    done = preflight("--dry-run", str(changed(tmp_path, "prod_100n_gbs768.sh", "", "GBS=769")))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "769 is not divisible by 384" in done.stderr
    assert "Traceback" not in done.stderr
    assert preflight("--dry-run", str(tmp_path / "nowhere.sh")).stderr.endswith("No such file or directory\n")


def test_a_script_takes_nothing_from_the_environment(monkeypatch):
    before = read_job(SBATCH / "prod_68n_gbs768_ep8.sh")
    for name in ("GBS", "MBS", "LLM_EP", "LLM_DP", "TRAIN_SAMPLES", "SEQ_LENGTH", "DATA_PATH", "RUN_DIR",
                 "RUNS", "RUN_NAME", "LAYOUT"):
        monkeypatch.setenv(name, "7")
    assert read_job(SBATCH / "prod_68n_gbs768_ep8.sh") == before
    assert isinstance(before, Job)


def test_a_path_may_have_the_home_folder_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    job = read_job(changed(tmp_path, "prod_33n_gbs768_ep8.sh", "", "RUNS=$HOME/runs"))
    assert parse(job.flags).checkpoint.save == "/home/me/runs/nemotron-54l-33n-gbs768-ep8/checkpoints"


# ---- a job: Slurm's commands and the trainer replaced, on two "nodes" of this host ----

PYTHON = r"""
if [[ "$*" == *preflight.py* ]]; then
    echo "$*" >"$STATE/preflight"
    exit "$(<"$STATE/preflight_code")"
fi
if [[ "$*" == *stage.py* ]]; then
    printf '%s\n' "$SLURM_NODEID" "$@" >>"$STATE/staged$SLURM_NODEID"
    exit "$(<"$STATE/stage_code")"
fi
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder with commands in place of Slurm's and Python, and a script of two nodes that uses them."""
    put_cluster(tmp_path, PYTHON)
    values = {"PYTHON": tmp_path / "bin" / "python", "DATA_PATH": tmp_path, "TOKENIZER": tmp_path,
              "NEMOTRON_CHECKPOINT": tmp_path, "RUNS": tmp_path, "RUN_NAME": "run", "LLM_NODES": 1}
    shutil.copy(SBATCH / "prod_33n_gbs768_ep8.sh", tmp_path / "job.sh")
    for name, value in values.items():
        set_value(tmp_path, name, value)
    for name, value in (("mode", "finish"), ("preflight_code", "0"), ("stage_code", "0")):
        (tmp_path / name).write_text(value)
    return tmp_path


def set_value(folder: Path, name: str, value: object) -> None:
    """Set a variable in the job's script, after those that are there."""
    job = folder / "job.sh"
    job.write_text(job.read_text().replace("\ntrain_nemotron\n", f"\n{name}={value}\ntrain_nemotron\n"))


def test_a_run_that_comes_to_its_end_is_not_requeued(cluster):
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 0, output
    assert "finished: 999999 iterations" in output and not requeued(cluster)
    assert sorted((cluster / "ranks").read_text().split()) == ["0", "1"]
    command = (cluster / "command").read_text().replace("\0", " ")
    assert "--nnodes 2 --nproc-per-node 8 --master-addr n1 --master-port 20042 " in command
    assert f"{ROOT}/train_hetero.py --layout disjoint" in command and "--llm-dp 4 " in command
    checked = (cluster / "preflight").read_text()
    assert "--gpus-per-node 8 --timeout-s 300 -- --layout disjoint" in checked
    assert f"--save {cluster}/run/checkpoints" in checked


def test_ranks_may_open_as_many_files_as_the_hard_limit_allows(cluster):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fewer = 256
    assert fewer < hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (fewer, hard))
    try:
        output = end(submit(cluster, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = str(1048576 if hard == resource.RLIM_INFINITY else hard)
    assert (cluster / "open_files").read_text().split() == [allowed, allowed], output


def test_a_run_that_stops_by_the_clock_is_requeued_and_goes_on_in_logs_of_its_own(cluster):
    (cluster / "mode").write_text("duration")
    output = end(submit(cluster, 2))
    assert "requeued: --exit-duration-in-mins, at iteration 500 of 158946" in output and requeued(cluster)
    (cluster / "mode").write_text("finish")
    output = end(submit(cluster, 2, SLURM_RESTART_COUNT="1"))
    assert "attempt 1 " in output and "from iteration 500 of 158946" in output
    assert sorted(path.name for path in (cluster / "run" / "logs").iterdir()) == ["42-attempt-000", "42-attempt-001"]


@pytest.mark.parametrize(("summary", "samples", "ends"), [
    ("finished iteration 999/999", 122_070_313, True),
    ("stopped by --exit-duration-in-mins after iteration 999/2000", 768 * 900, False),
])
def test_the_trainer_says_whether_a_run_is_at_its_end(cluster, summary, samples, ends):
    """A run that goes on with another global batch size has other iterations than TRAIN_SAMPLES / GBS."""
    set_value(cluster, "TRAIN_SAMPLES", samples)
    set_value(cluster, "LR_WARMUP_SAMPLES", 768)
    (cluster / "mode").write_text(f"says {summary}\n")
    output = end(submit(cluster, 2))
    assert ("finished: 999 iterations" in output, requeued(cluster)) == (ends, not ends), output


def test_flags_do_not_change_between_the_attempts_of_a_job(cluster):
    """Slurm runs its copy of the script again, but what the script sources is that of the checkout."""
    (cluster / "mode").write_text("duration")
    end(submit(cluster, 2))
    set_value(cluster, "GBS", 1536)
    job = submit(cluster, 2, SLURM_RESTART_COUNT="1")
    output = end(job)
    assert job.returncode == 2 and "the flags (>) are not those of the job's first attempt (<)" in output
    assert "< 768" in output and "> 1536" in output
    assert len((cluster / "ranks").read_text().split()) == 2, "one for each node of the first attempt"


@pytest.mark.parametrize("whom", ["the job's script", "the steps"])
def test_sigterm_lets_the_run_save_and_requeues_it(cluster, whom):
    (cluster / "mode").write_text("train")
    job = submit(cluster, 2)
    # The script: --signal=B:TERM@600. The steps: a preemption with grace time.
    output = stop_training(cluster, job, steps=whom == "the steps")
    assert job.returncode == 0, output
    assert (cluster / "saved0").exists() and (cluster / "saved1").exists()
    assert "requeued: SIGTERM" in output and requeued(cluster)


def test_a_run_that_has_saved_before_scancel_returns_is_requeued(cluster):
    with (cluster / "bin" / "scancel").open("a") as scancel:
        scancel.write('while kill -0 "${pids[@]}" 2>/dev/null; do sleep 0.1; done; sleep 1\n')
    (cluster / "mode").write_text("train")
    job = submit(cluster, 2)
    output = stop_training(cluster, job)
    assert job.returncode == 0 and "requeued: SIGTERM" in output and requeued(cluster), output


def test_a_controller_that_is_busy_for_a_moment_does_not_end_a_run(cluster):
    fails = 'if [[ "$1" != show ]] && mkdir "$STATE/failed_${0##*/}" 2>/dev/null; then exit 1; fi'
    for name in ("squeue", "scontrol"):
        command = cluster / "bin" / name
        shell, state, body = command.read_text().split("\n", 2)
        command.write_text("\n".join([shell, state, fails, body]))
    (cluster / "mode").write_text("duration")
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 0 and requeued(cluster), output
    assert (cluster / "failed_squeue").exists() and (cluster / "failed_scontrol").exists()


def test_a_job_that_exports_nothing_gives_its_steps_what_they_need(cluster):
    python = cluster / "bin" / "python"
    python.write_text(python.read_text().replace('echo "$*" >"$STATE/preflight"',
                                                 'echo "$JOB_HOSTS $MASTER_PORT $OMP_NUM_THREADS" >"$STATE/preflight"'))
    output = end(submit(cluster, 2, SLURM_EXPORT_ENV="NONE"))
    assert "finished: " in output, output
    assert (cluster / "preflight").read_text() == "n1 n2 20042 1\n"


def test_a_job_that_was_cancelled_is_not_requeued(cluster):
    (cluster / "mode").write_text("train")
    job = submit(cluster, 2)
    (cluster / "job_state").write_text("COMPLETING")
    output = stop_training(cluster, job)
    assert "not requeued from here: the job is COMPLETING" in output and not requeued(cluster)


def test_a_crash_is_not_requeued_even_where_slurm_then_stops_the_other_nodes(cluster):
    (cluster / "mode").write_text("crash")
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 2 and "training ended with exit code 1; see" in output and not requeued(cluster)


def test_a_stop_while_the_step_starts_requeues_a_job_that_did_not_train(cluster):
    (cluster / "stop_at_start").touch()
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 0 and "requeued: SIGTERM" in output and requeued(cluster), output
    assert not (cluster / "ranks").exists()


@pytest.mark.parametrize(("code", "told", "log", "expected"), [
    (0, "script", "", "requeued SIGTERM"), (0, "nodes", "", "requeued SIGTERM"),
    (0, "nodes", "stopped by SIGTERM after iteration 5/9 | samples 7\n", "requeued SIGTERM"),
    (0, "nodes", "error on rank 3: lost\nstopped by SIGTERM after iteration 5/9 | samples 7\n", "requeued SIGTERM"),
    (0, "nodes", "error on rank 3: No space left on device\n", "an error ended it before it had saved; see logs"),
    (0, "script", "error on rank 3: No space left on device\n", "an error ended it before it had saved; see logs"),
    (143, "script", "", "requeued SIGTERM"), (143, "script", "error on rank 3: lost\n", "exit code 143; see logs"),
    (143, "", "", "exit code 143; see logs"), (1, "script", "", "exit code 1; see logs"),
])
def test_how_a_step_ended_decides_whether_the_job_is_requeued(tmp_path, code, told, log, expected):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "n1.log").write_text(f"training\n{log}")
    if told == "nodes":
        (tmp_path / "logs" / "stopped").touch()
    program = f"""source "$SLURM_SUBMIT_DIR/scripts/sbatch/common.sh"
        requeue() {{ say "requeued $1"; }}
        stopped={"SIGTERM" if told == "script" else ""} RUN_DIR=run TRAIN_ITERS=9
        conclude {code} logs"""
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", program], cwd=tmp_path, text=True, check=False,
                          capture_output=True, env={"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(ROOT)})
    assert expected in done.stdout + done.stderr, done
    assert done.returncode == (0 if expected.startswith("requeued") else 2)


def test_nothing_starts_after_a_preflight_that_failed(cluster):
    (cluster / "preflight_code").write_text("1")
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 2 and "preflight failed with exit code 1; nothing was started" in output
    assert not (cluster / "command").exists() and not requeued(cluster)


def stage_first(folder: Path) -> None:
    """Have the job copy two sources, one of them with a space in its name, and read its data from the copy."""
    for name, value in (("STAGE_FROM", f'("{folder}/all data" "{folder}/bin")'), ("STAGE_TO", "/nowhere/disk"),
                        ("DATA_PATH", '"/nowhere/disk/all data/blend.yaml"')):
        set_value(folder, name, value)


def test_files_are_staged_on_every_node_before_the_preflight(cluster):
    stage_first(cluster)
    output = end(submit(cluster, 2))
    assert "finished: " in output, output
    for node in "01":
        assert (cluster / f"staged{node}").read_text().splitlines() == [
            node, f"{ROOT}/scripts/stage.py", f"{cluster}/all data", f"{cluster}/bin", "--to", "/nowhere/disk"]
    assert "--data-path /nowhere/disk/all data/blend.yaml" in (cluster / "preflight").read_text()


@pytest.mark.parametrize(("source", "folder", "path", "there"), [
    ("/shared/data/", "/nowhere/disk/", "/nowhere/disk/data/blend.yaml", True),
    ("/shared/data/", "/nowhere/disk", "/nowhere/disk/other/blend.yaml", False),
    ("hf://organisation/data@refs/pr/1", "/nowhere/disk", "/nowhere/disk/data", True),
])
def test_a_path_is_where_its_source_is_staged(cluster, source, folder, path, there):
    for name, value in (("STAGE_FROM", f"({source})"), ("STAGE_TO", folder), ("DATA_PATH", path)):
        set_value(cluster, name, value)
    job = submit(cluster, 2)
    output = end(job)
    assert ("finished: " in output) == there and ("there is no such file or folder" in output) != there, output


def test_nothing_starts_where_staging_failed(cluster):
    stage_first(cluster)
    (cluster / "stage_code").write_text("1")
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 2 and "staging to /nowhere/disk failed with exit code 1; nothing was started" in output
    assert not (cluster / "preflight").exists() and not requeued(cluster)


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("STAGE_FROM", "(/data)", "STAGE_TO=/path/to/local-disk: must be a folder on every node's own disk"),
    ("DATA_PATH", "/nowhere/blend.yaml", "DATA_PATH=/nowhere/blend.yaml: there is no such file or folder"),
    ("TOKENIZER", "/path/to/tokenizer", "TOKENIZER=/path/to/tokenizer: edit this path"),
    ("RUNS", "runs", "RUN_DIR=runs/run: must be an absolute path"),
    ("LLM_NODES", "2", "the job has 2 nodes, the layout needs ENCODER_NODES 1 + LLM_NODES 2 = 3"),
])
def test_a_job_checks_its_paths_and_nodes_first(cluster, name, value, expected):
    set_value(cluster, name, value)
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 2 and expected in output
    assert not (cluster / "preflight").exists()


def test_paths_of_a_container_are_left_to_the_preflight(cluster):
    for name, value in (("SRUN_FLAGS", "(--container-image=mimo.sqsh)"), ("PYTHON", "/nowhere/in/image/python")):
        set_value(cluster, name, value)
    job = submit(cluster, 2)
    output = end(job)
    assert job.returncode == 2 and "preflight failed with exit code 127" in output, output


def test_flags_behind_a_name_that_nothing_would_read_are_refused(cluster):
    job = submit(cluster, 2, "--lr", "1e-4")
    output = end(job)
    assert job.returncode == 2 and output == "error: --lr 1e-4: this script takes no flags; edit those in it\n"


@pytest.mark.slow
def test_the_preflight_of_two_nodes(tmp_path):
    (first, report), (second, silence) = run_preflight(tmp_path, "--device", "cpu")
    assert (first, second, silence) == (0, 0, ""), report
    assert report.endswith("preflight: ready\n")
    for words in ("2 nodes, 2 processes each", "gloo in each node: ", "gloo over all nodes: ", "a checkpoint of about"):
        assert words in report


@pytest.mark.slow
def test_the_preflight_names_the_node_that_cannot_connect(tmp_path):
    (first, report), (second, silence) = run_preflight(tmp_path, "--device", "cpu",
                                                       second={"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert (first, second, silence) == (1, 1, ""), report
    assert report.endswith("preflight: not ready\n")
    assert "PROBLEM n2: gloo in each node: " in report and "nowhere0" in report
    assert "PROBLEM n1" not in report and "over all nodes" not in report
