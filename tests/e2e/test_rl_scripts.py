"""scripts/rl/gsm8k_*: commands that the trainer takes, arguments that stay whole, a job's steps and its end."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import train_rl
from mimo import registry
from mimo.config.cli import parse, parse_as
from mimo.config.rl_run import RlRunConfig, validate_rl
from scripts.bench.presets import MODELS
from scripts.rl import hf_model, wait_for_ray
from tests.support.launch import ROOT
from tests.support.slurm import BASH, end, put_cluster, requeued, stop_training, submit
from tests.support.small_tokenizer import write_tokenizer

RL = ROOT / "scripts" / "rl"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
INSTRUCTION = 'Think "twice"; $HOME, then ####'

# The trainer is noted, not started. Its dry run is noted, too, and runs only if plan_code says so. Everything else of
# Python runs.
PYTHON = rf"""
case "$*" in
    *train_rl.py\ *\ --dry-run\ *)
        printf '%s\n' "$@" >"$STATE/planned"
        [[ "$(<"$STATE/plan_code")" != run ]] || exec {sys.executable} "$@"
        exit "$(<"$STATE/plan_code")" ;;
    *preflight.py*) printf '%s\n' "$@" >"$STATE/preflight"; exit "$(<"$STATE/preflight_code")" ;;
    *wait_for_ray.py*) echo "$*" >"$STATE/waited"; exit "$(<"$STATE/ray_code")" ;;
    -m\ torch.distributed.run*) ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
# The first attempt of a node fails.
RAY = 'echo "$*" >>"$STATE/ray"; mkdir "$STATE/tried$SLURM_NODEID-$#" 2>/dev/null && exit 1 || exit 0'


@pytest.fixture
def place(tmp_path):
    """Commands in place of Python and Slurm's, a small mixture of experts and problems, in folders with spaces."""
    put_cluster(tmp_path, PYTHON, ray=RAY)
    write_tokenizer(tmp_path / "my model", chat_template=TEMPLATE)
    (tmp_path / "my model" / "config.json").write_text(json.dumps(MODELS["tiny"]))
    (tmp_path / "my data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "my data" / f"{split}.jsonl").write_text('{"question": "2+3?", "answer": "#### 5"}\n')
    for name in ("plan_code", "preflight_code", "ray_code"):
        (tmp_path / name).write_text("0")
    return tmp_path


def flags_of(place: Path, monkeypatch) -> tuple[list[str], list[str]]:
    """Return the launcher's words and the trainer's flags of the command that was noted."""
    monkeypatch.chdir(ROOT)
    words = (place / "command").read_text().split("\0")[:-1]
    at = next(number for number, word in enumerate(words) if word.endswith("train_rl.py"))
    return words[:at], words[at + 1:]


def local(place: Path, *arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
    settings = {"PYTHON": python or str(place / "bin" / "python"), "RUNS": str(place / "my runs")}
    return subprocess.run([BASH, str(RL / "gsm8k_qwen3.sh"), *arguments], cwd=place, text=True, check=False,
                          capture_output=True, env=os.environ | settings, timeout=100)


def test_one_node_trains_and_generates_on_the_same_gpus(place, monkeypatch):
    done = local(place, "my model", "my data", "--lr", "2e-6", "--gsm8k-instruction", INSTRUCTION)
    assert done.returncode == 0, done.stderr
    launcher, flags = flags_of(place, monkeypatch)
    assert launcher[-2:] == ["--nproc-per-node", "8"]
    config = parse_as(RlRunConfig, flags, "")
    layout = validate_rl(config, 8)
    assert (layout.language.dp, layout.language.ep, config.rollout.engine_tp, config.rollout.engine_dp) == (8, 8, 4, 2)
    assert config.rollout.engine_placement == "colocated" and config.model.model_provider == "causal_lm"
    assert (config.optim.lr, config.dataset.gsm8k_instruction) == (2e-6, INSTRUCTION)
    assert config.checkpoint.load_hf == config.dataset.tokenizer == str(place / "my model")
    assert config.checkpoint.save == config.checkpoint.load == str(place / "my runs" / "checkpoints")
    assert not config.dataset.gsm8k_thinking and config.rl.eval_prompts and config.train.eval_interval


@pytest.mark.slow
def test_one_node_reads_from_its_own_disk(place, monkeypatch):
    done = local(place, "my model", "my data", "--stage", "my disk", "--nproc", "2", "--no-gsm8k-thinking")
    assert done.returncode == 0, done.stderr
    assert re.search(r"my disk: \d files copied", done.stdout), done.stdout
    launcher, flags = flags_of(place, monkeypatch)
    config = parse_as(RlRunConfig, flags, "")
    validate_rl(config, 2)
    assert config.checkpoint.load_hf == str(place / "my disk" / "my model")
    assert config.dataset.data_path == str(place / "my disk" / "my data") and launcher[-1] == "2"


@pytest.mark.parametrize(("arguments", "expected"), [
    ((), "usage: "), (("my model",), "usage: "),
    (("my model", "my data", "--nproc", "no"), "--nproc no: must be a whole"),
    (("my data", "my data"), "has no config.json"), (("nowhere", "my data"), "nowhere: there is no such folder"),
])
def test_a_script_for_one_node_names_wrong_settings(place, arguments, expected):
    done = local(place, *arguments)
    assert done.returncode == 2 and expected in done.stderr and not (place / "command").exists()


@pytest.mark.slow
def test_one_node_and_several_nodes_show_their_plans_on_a_laptop(place):
    done = local(place, "my model", "my data", "--dry-run", "--nproc", "4", python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "the engine shares 4 of the first host's" in done.stdout and "\n  language: " in done.stdout, done.stdout
    # The plan is of two trainer nodes and two engine nodes, without Slurm and at another place, or of a job whose file
    # Slurm has copied.
    (place / "scripts" / "rl").mkdir(parents=True)
    for name in ("train_rl.py", "scripts/configs", "scripts/rl/hf_model.py"):
        (place / name).symlink_to(ROOT / name)
    (place / "spool").mkdir()
    for folder, submitted in (("scripts/rl", {}), ("spool", {"SLURM_SUBMIT_DIR": str(ROOT)})):
        job = edited(place / folder / "job.sh", place, {"PYTHON": sys.executable, "LLM_PP": "2"})
        done = subprocess.run([BASH, str(job), "--dry-run"], text=True, cwd=place, check=False, capture_output=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)} | submitted, timeout=100)
        assert done.returncode == 0, done.stderr
        assert "GPUs: 32, 16 for the trainer's ranks and 16 where Ray places the engine" in done.stdout, done.stdout
        assert "\n  language stage 1: " in done.stdout


def edited(job: Path, place: Path, values: dict[str, str] | None = None) -> Path:
    """Write the job of several nodes with its variables set."""
    text = (RL / "gsm8k_ray_slurm.sh").read_text()
    paths = {"PYTHON": f"{place}/bin/python", "MODEL": f"{place}/my model", "DATA": f"{place}/my data",
             "RUN_DIR": f"{place}/run"}
    for name, value in (paths | (values or {})).items():
        text = re.sub(rf"^{name}=.*$", f"{name}={value}" if value.startswith("(") else f'{name}="{value}"', text,
                      flags=re.M)
    job.write_text(text)
    return job


def start(place: Path, *arguments: str, values: dict[str, str] | None = None,
          mode: str = "finish") -> subprocess.Popen[str]:
    """Start the job of four nodes with other values of its variables."""
    edited(place / "job.sh", place, values)
    (place / "mode").write_text(mode)
    return submit(place, 4, *arguments)


def test_a_job_has_its_engine_and_its_trainer_on_nodes_of_their_own(place, monkeypatch):
    job = start(place, "--gsm8k-instruction", INSTRUCTION)
    output = end(job)
    assert job.returncode == 0 and "finished: 999999 iterations" in output, output
    started = (place / "ray").read_text().splitlines()
    assert sum("--head --port 6379 --num-cpus 0 --num-gpus 0" in line for line in started) == 2, "twice each"
    assert sum("--address n1:6379 --num-gpus 8" in line for line in started) == 4 and len(started) == 6
    steps = (place / "srun").read_text().splitlines()
    assert any("--nodelist=n3,n4" in step and "ray start" in step for step in steps)
    assert any("--nodelist=n1,n2" in step and "train_rl.py" in step for step in steps)
    assert all("--overlap" in step for step in steps), "steps run beside each other"
    assert "n1:6379 --gpus 16 --nodes 3 --timeout-s 600" in (place / "waited").read_text()
    assert sorted((place / "ranks").read_text().split()) == ["0", "1"]
    launcher, flags = flags_of(place, monkeypatch)
    assert " ".join(launcher).endswith(
        "--nnodes 2 --nproc-per-node 8 --master-addr n1 --master-port 20042 --shutdown-timeout 570")
    config = parse_as(RlRunConfig, flags, "")
    layout = validate_rl(config, 16)
    assert (layout.world_size, config.rollout.engine_tp, config.rollout.engine_dp) == (16, 4, 4)
    assert (config.rollout.engine_placement, config.rollout.ray_address) == ("ray", "n1:6379")
    assert config.dataset.gsm8k_instruction == INSTRUCTION and config.checkpoint.exit_duration_in_mins == 220
    assert config.train.device == "cuda", "a node without a GPU is an error"
    planned = (place / "planned").read_text().splitlines()
    assert planned[1:] == [*flags, "--dry-run", "--world-size", "16"]
    words = (place / "preflight").read_text().splitlines()
    checked = parse(words[words.index("--") + 1:])
    assert (checked.checkpoint.save_interval, checked.checkpoint.load_hf) == (20, f"{place}/my model")
    assert words[:words.index("--")][-4:] == ["--gpus-per-node", "8", "--timeout-s", "300"]


def test_the_engine_of_a_job_may_share_the_nodes_of_its_trainer(place, monkeypatch):
    job = start(place, values={"TRAINER_NODES": "4", "ENGINE_NODES": "0"})
    output = end(job)
    assert job.returncode == 0 and "trainer on n1 n2 n3 n4, engine on the same; " in output, output
    started = (place / "ray").read_text().splitlines()
    assert sum("--head --port 6379 --num-cpus 0 --num-gpus 0" in line for line in started) == 2, "twice each"
    assert sum("--address n1:6379 --num-gpus 0" in line for line in started) == 6 and len(started) == 8
    assert any("--nodelist=n2,n3,n4" in step and "ray start" in step for step in (
        place / "srun").read_text().splitlines())
    assert "n1:6379 --gpus 0 --nodes 4 --timeout-s 600" in (place / "waited").read_text()
    config = parse_as(RlRunConfig, flags_of(place, monkeypatch)[1], "")
    assert (validate_rl(config, 32).world_size, config.rollout.engine_tp, config.rollout.engine_dp) == (32, 4, 8)
    assert (config.rollout.engine_placement, config.rollout.ray_address) == ("colocated", "n1:6379")
    assert not config.rollout.engine_restarts


@pytest.mark.slow
def test_a_job_stages_on_the_nodes_of_its_trainer(place, monkeypatch):
    stage = {"STAGE_FROM": f'("{place}/my model" "{place}/my data")', "STAGE_TO": f"{place}/disk",
             "MODEL": f"{place}/disk/my model", "DATA": f"{place}/disk/my data"}
    job = start(place, values=stage)
    output = end(job)
    assert job.returncode == 0, output
    assert any("--nodelist=n1,n2" in step and "stage.py" in step for step in (
        place / "srun").read_text().splitlines())
    assert parse_as(RlRunConfig, flags_of(place, monkeypatch)[1], "").checkpoint.load_hf == f"{place}/disk/my model"
    assert (place / "disk" / "my data" / "train.jsonl").is_file()


def test_sigterm_reaches_the_trainer_alone_and_requeues_the_job(place):
    job = start(place, mode="train")
    output = stop_training(place, job)
    assert job.returncode == 0, output
    assert (place / "scancel").read_text() == "--signal=TERM 42.7\n"
    assert (place / "saved0").exists() and (place / "saved1").exists()
    assert "requeued: SIGTERM" in output and requeued(place)


@pytest.mark.parametrize(("values", "mode", "expected"), [
    ({"DATA": "/nowhere"}, "finish", "DATA=/nowhere: there is no such file or folder"),
    ({"ENGINE_NODES": "3"}, "finish", "the job has 4 nodes, the script uses TRAINER_NODES 2 + ENGINE_NODES 3"),
    ({}, "crash", "training ended with exit code 1; see"),
])
def test_an_error_of_a_job_is_named_and_not_requeued(place, values, mode, expected):
    job = start(place, values=values, mode=mode)
    output = end(job)
    assert job.returncode == 2 and expected in output and not requeued(place)


@pytest.mark.parametrize(("arguments", "flag", "variable"), [
    (("--train-iters", "100"), "--train-iters", "TRAIN_ITERS"), (("--lr", "2e-6", "--train_iters=400"), "--train-iters",
                                                                "TRAIN_ITERS"),
    (("--save", "/elsewhere"), "--save", "RUN_DIR"), (("--save=/elsewhere",), "--save", "RUN_DIR"),
    (("--run-dir", "/elsewhere"), "--run-dir", "RUN_DIR"),
])
def test_flags_that_requeueing_depends_on_are_refused(place, arguments, flag, variable):
    job = start(place, *arguments)
    output = end(job)
    assert job.returncode == 2 and output.startswith(f"error: {flag}: ") and f"edit {variable} in it" in output
    assert not (place / "srun").exists() and not (place / "scontrol").exists()


@pytest.mark.parametrize(("words", "named"), [
    ("--ckpt-step=40", "--ckpt-step"), ("--no_load_optim", "--no-load-optim"), ("--no-load-data", "--no-load-data"),
    ("--load SAVE --ckpt-step 100", "--ckpt-step"), ("--no-load-optim --load=SAVE/../checkpoints/", "--no-load-optim"),
    ("--load LINK --no-load-rng", "--no-load-rng"), ("--load SAVE/iter_0000100", "--load SAVE/iter_0000100"),
    ("--load=LINK/release", "--load SAVE/release"), ("--load /elsewhere --load SAVE --ckpt-step 3", "--ckpt-step"),
])
def test_flags_that_each_attempt_would_obey_again_are_refused(place, words, named):
    def filled(text: str) -> str:
        return text.replace("SAVE", f"{place}/run/checkpoints").replace("LINK", f"{place}/link")

    (place / "link").symlink_to(place / "run" / "checkpoints")
    job = start(place, *(filled(word) for word in words.split()))
    output = end(job)
    assert job.returncode == 2, output
    assert output.startswith(f"error: {filled(named)}: every attempt of the job would do this again")
    assert not (place / "srun").exists()


@pytest.mark.parametrize("words", ["--load /elsewhere --ckpt-step 40", "--load=/elsewhere/iter_0000040",
                                   "--no-load-optim --load /elsewhere"])
def test_such_flags_are_for_the_first_attempt_where_load_is_another_folder(place, words):
    output = end(start(place, *words.split()))
    assert "finished: " in output, output


def test_the_folder_of_the_checkpoints_may_be_named_again(place):
    output = end(start(place, "--load", f"{place}/run/checkpoints"))
    assert "finished: " in output, output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [
    ("plan_code", "no plan for these flags, exit code 1"), ("preflight_code", "preflight failed with exit code 1"),
    ("ray_code", "Ray did not come up; see"),
])
def test_nothing_is_trained_where_a_step_before_it_failed(place, name, expected):
    (place / name).write_text("1")
    job = start(place)
    output = end(job)
    assert job.returncode == 2 and expected in output and not (place / "command").exists()


@pytest.mark.slow
def test_flags_that_the_trainer_refuses_start_nothing(place):
    (place / "plan_code").write_text("run")
    job = start(place, "--completions-per-prompt", "0")
    output = end(job)
    assert job.returncode == 2 and "--completions-per-prompt 0" in output, output
    assert "no plan for these flags" in output, output
    assert not any((place / name).exists() for name in ("preflight", "ray", "command"))


@pytest.mark.slow
def test_a_job_has_a_plan_before_it_starts(place):
    (place / "plan_code").write_text("run")
    output = end(start(place, "--load-hf", ""))  # the model has no weights
    assert "GPUs: 32, 16 for the trainer's ranks and 16 where Ray places the engine" in output, output
    assert "finished: 999999 iterations" in output, output


def test_a_model_of_any_built_in_family_has_its_flags(tmp_path):
    provider = registry.model_provider("nemotron_h")
    (tmp_path / "config.json").write_text(json.dumps(provider.hf_config(provider.Config())))
    flags = hf_model.flags_of(str(tmp_path), 16, 8)
    assert flags[:2] == ["--model-provider", "nemotron_h"]
    assert flags[-8:] == ["--llm-dp", "16", "--llm-ep", "16", "--engine-tp", "4", "--engine-dp", "2"]
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen3-4b"]))
    assert hf_model.flags_of(str(tmp_path), 3, 3)[-6:] == ["--llm-dp", "3", "--engine-tp", "1", "--engine-dp", "3"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with pytest.raises(ValueError, match="NoSuchModel"):
        hf_model.flags_of(str(tmp_path), 1, 1)


def test_replicas_fit_nodes_of_six_gpus(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["tiny"]))
    flags = hf_model.flags_of(str(tmp_path), 12, 12, hf_model.Sizes(gpus_per_node=6))
    assert flags[-4:] == ["--engine-tp", "2", "--engine-dp", "6"]


def test_a_hybrid_has_tensor_pipeline_and_expert_parallelism_and_a_replica_over_nodes(tmp_path):
    provider = registry.model_provider("nemotron_h")
    (tmp_path / "config.json").write_text(json.dumps(provider.hf_config(provider.Config())))
    sizes = hf_model.Sizes(tp=2, pp=2, engine_tp=8, engine_pp=2)
    flags = hf_model.flags_of(str(tmp_path), 16, 32, sizes)
    assert flags[8:] == ["--llm-dp", "4", "--llm-tp", "2", "--sequence-parallel", "--llm-pp", "2", "--llm-ep", "8",
                         "--engine-tp", "8", "--engine-pp", "2", "--engine-nodes", "2", "--engine-dp", "2"]
    for ranks, gpus, wrong, expected in (
            (6, 32, sizes, r"--ranks 6 is not divisible by --tp 2 \* --pp 2"),
            (16, 24, sizes, r"--engine-gpus 24 is not divisible by --engine-tp 8 \* --engine-pp 2"),
            (16, 12, hf_model.Sizes(engine_tp=12), "is 12 GPUs of a replica, no multiple of --gpus-per-node 8"),
            (16, 24, hf_model.Sizes(engine_tp=6), "4 replicas do not fit whole nodes")):
        with pytest.raises(ValueError, match=expected):
            hf_model.flags_of(str(tmp_path), ranks, gpus, wrong)


@pytest.mark.parametrize(("name", "world_size", "expected"), [
    ("nemotron_nano", 16, ["language stage 1: 35.5 GiB", "engine: 4 replicas of 2 workers"]),
    ("nemotron_ultra", 64, ["575,481,425,920", "language stage 0: 115 GiB", "about 33.5 GiB of weights",
                            "engine: 1 replica of 32 workers (--engine-tp 8 * --engine-pp 4), each on 4 nodes, ray"]),
    ("deepseek_v3", 256, ["language stage 7: ", "engine: 8 replicas of 32 workers", "about 39.1 GiB of weights"]),
])
def test_a_large_shape_is_planned_on_a_laptop(name, world_size, expected, capsys):
    assert train_rl.main(["--config", str(ROOT / "scripts" / "configs" / f"rl_{name}.toml"), "--world-size",
                          str(world_size), "--device", "cuda", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert [each for each in expected if each not in plan] == []


def test_waiting_for_ray_ends_with_the_number_of_its_gpus(monkeypatch, capsys):
    counts = iter([(1, 0.0), (2, 8.0), (2, 16.0)])
    monkeypatch.setattr(wait_for_ray, "POLL_S", 0.01)
    monkeypatch.setattr(wait_for_ray, "answers", lambda *_: True)
    monkeypatch.setattr(wait_for_ray, "count", lambda _: (*next(counts, (3, 16.0)), ""))
    assert wait_for_ray.main(["head:6379", "--gpus", "16"]) == 0
    assert capsys.readouterr().out == "Ray at head:6379: 16 GPUs, 2 nodes\n"
    assert wait_for_ray.main(["head:6379", "--gpus", "0", "--nodes", "3"]) == 0
    for asked, expected in (("--gpus 24", "has 16 GPUs (24 wanted) on 3 nodes (1 wanted) after 0.05 s"),
                            ("--gpus 16 --nodes 4", "has 16 GPUs (16 wanted) on 3 nodes (4 wanted) after 0.05 s")):
        assert wait_for_ray.main(["head:6379", *asked.split(), "--timeout-s", "0.05"]) == 1
        assert expected in capsys.readouterr().err


def test_nobody_answers_at_a_closed_port():
    assert not wait_for_ray.answers("127.0.0.1:9", 1.0)


@pytest.mark.parametrize("name", ["arithmetic_cpu", "arithmetic_gpu", "digits_cpu", "digits_gpu", "qwen3_vl_gpu"])
def test_help_of_a_recipe_sets_nothing_up(name, tmp_path):
    done = subprocess.run([BASH, RL / f"{name}.sh", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          env={"PATH": os.environ["PATH"], "RUNS": str(tmp_path / "runs"), "PYTHON": "/nowhere/python"})
    assert done.returncode == 0 and f"scripts/rl/{name}.sh" in done.stdout and "\n#" not in done.stdout
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["arithmetic_gpu", "digits_gpu"])
def test_a_recipe_on_gpus_trains_and_goes_on_from_there(name, tmp_path):
    """The flags of both stages are those that the trainers take."""
    noted = tmp_path / "noted"
    python = tmp_path / "python"
    python.write_text(f'#!{BASH}\n[[ "$1" == -c ]] || printf "%s\\n" "$*" >>"{noted}"\n')
    python.chmod(0o755)
    (tmp_path / "supervised").mkdir()
    done = subprocess.run([BASH, RL / f"{name}.sh", "separate", "--train-iters", "3"], capture_output=True, text=True,
                          timeout=60, env=os.environ | {"PYTHON": str(python), "RUNS": str(tmp_path)}, check=False)
    assert done.returncode == 0, done.stderr
    supervised, reinforced = (line.split(".py ", 1) for line in noted.read_text().splitlines())
    assert supervised[0].endswith("--nproc-per-node 1 train_hetero") and reinforced[0].endswith(" train_rl")
    config = parse(supervised[1].split())
    assert config.checkpoint.save == f"{tmp_path}/checkpoints"
    policy = parse_as(RlRunConfig, reinforced[1].split(), "")
    assert policy.train.train_iters == 3 and policy.observe.run_dir == f"{tmp_path}/separate"


def test_runs_of_a_recipe_are_in_the_folder_in_which_it_was_called(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!{BASH}\n[[ "$1" == -c ]] || printf "%s\\n" "$@" >"{tmp_path}/noted"\n')
    python.chmod(0o755)
    (tmp_path / "my runs" / "supervised").mkdir(parents=True)
    (tmp_path / "my runs" / "supervised" / "done").touch()
    done = subprocess.run([BASH, RL / "arithmetic_gpu.sh", "separate"], capture_output=True, text=True, timeout=60,
                          cwd=tmp_path, env=os.environ | {"PYTHON": str(python), "RUNS": "my runs"}, check=False)
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "noted").read_text().splitlines()
    assert words[words.index("--load") + 1] == f"{tmp_path}/my runs/checkpoints"


def test_a_qwen3_vl_on_gpus_shows_its_plan_and_trains(tmp_path):
    script, environment = [BASH, RL / "qwen3_vl_gpu.sh"], os.environ | {"RUNS": str(tmp_path)}
    done = subprocess.run([*script, "--nproc", "4", "--dry-run"], capture_output=True, text=True, timeout=100,
                          env=environment | {"PYTHON": sys.executable}, check=False)
    assert done.returncode == 0, done.stderr
    assert "language    8,190,735,360" in done.stdout and "language and vision: " in done.stdout
    noted, python = tmp_path / "noted", tmp_path / "python"
    python.write_text(f'#!{BASH}\n[[ "$1" == -c ]] || printf "%s\n" "$*" >"{noted}"\n')
    python.chmod(0o755)
    done = subprocess.run([*script, "--nproc", "2", "--train-iters", "3"], capture_output=True, text=True, timeout=60,
                          env=environment | {"PYTHON": str(python)}, check=False)
    assert done.returncode == 0, done.stderr
    launcher, flags = noted.read_text().split(".py ", 1)
    config = parse_as(RlRunConfig, flags.split(), "")
    assert launcher.endswith("--nproc-per-node 2 train_rl") and config.train.train_iters == 3
    assert validate_rl(config, 2).language.dp == config.rollout.engine_dp == 2


def test_a_recipe_names_the_families_that_it_knows(tmp_path):
    done = subprocess.run([BASH, RL / "digits_cpu.sh", "gpt"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "digits_cpu.sh gpt: the families are llava, qwen3_vl and nemotron" in done.stderr


RECIPES = {"arithmetic_cpu": "rl-cpu", "digits_cpu": "rl-cpu", "arithmetic_gpu": "rl-gpu", "digits_gpu": "rl-gpu"}


def recipe_command(name: str, folder: Path) -> list[str | Path]:
    """Return the command of a recipe, with a placement on GPUs."""
    return [BASH, folder / f"{name}.sh", *(["colocated"] if name.endswith("gpu") else [])]


@pytest.mark.parametrize(("name", "extra"), RECIPES.items())
def test_a_recipe_wants_vllm_before_its_supervised_run(name, extra, tmp_path):
    python = tmp_path / "python"
    # Without the packages of this environment.
    python.write_text(f'#!{BASH}\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    for given in (python, tmp_path / "nowhere"):
        done = subprocess.run(recipe_command(name, RL), capture_output=True, text=True, timeout=60, check=False,
                              env=os.environ | {"PYTHON": str(given), "RUNS": str(tmp_path / "runs")})
        assert done.returncode == 2 and f"PYTHON={given} lacks the extra {extra} (" in done.stderr
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("name", "extra"), RECIPES.items())
def test_a_recipe_sets_up_what_it_needs(name, extra, tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    with (tmp_path / "scripts" / "lib.sh").open("a") as library:
        library.write('setup_venv() { say "setting up $1"; return 1; }\n')
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
    done = subprocess.run(recipe_command(name, tmp_path / "scripts" / "rl"), capture_output=True, text=True, timeout=60,
                          check=False, env=environment)
    assert (done.returncode, done.stderr) == (1, f"setting up {extra}\n")
