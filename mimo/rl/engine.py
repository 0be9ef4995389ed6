"""The rollout engine of a run: a folder that describes the model, and a child process of the first rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Protocol

from mimo.config.rl_run import RlRunConfig
from mimo.protocols import ModelProvider
from mimo.refit.engine import EngineOptions
from mimo.refit.host import EngineProcess
from mimo.refit.options import RefitOptions
from mimo.refit.replicas import RolloutClient

# What torchrun tells its workers. In an engine's process they would make its own process group join the trainer's.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                      "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIX = "TORCHELASTIC_"
# Of an engine on the CPU, where the environment does not say otherwise: nothing is looked up on a hub or compiled, and
# hundreds of lines of its start are not shown.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_CI_ENV": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


class Engine(Protocol):
    """The rollout engine of a run, whose processes the first rank has started; only that rank has it."""

    @property
    def client(self) -> RolloutClient:
        """Calls it."""
        ...

    @property
    def address(self) -> str:
        """Under which its workers reach the first rank."""
        ...

    def close(self) -> None:
        """End its processes, whatever they do."""
        ...


class ChildEngine:
    """One engine, in a child process.

    Args:
        process: of the engine.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self.client: RolloutClient = process.handle
        self.address = os.environ["MASTER_ADDR"]

    def close(self) -> None:
        """End it."""
        self._process.close()


def engine_dtype(config: RlRunConfig) -> str:
    """Of the engine's weights, and of weights on the wire: the trainer's own."""
    return "bfloat16" if config.model.bf16 else "float32"


def refit_options(config: RlRunConfig) -> RefitOptions:
    """How weights travel to an engine on the CPU."""
    return RefitOptions(backend="gloo", dtype=engine_dtype(config), timeout_s=config.rollout.refit_timeout_s,
                        verify=config.rollout.refit_verify)


def engine_options(config: RlRunConfig, folder: Path) -> EngineOptions:
    """The engine that the flags ask for, on the CPU.

    Args:
        config: the run.
        folder: with config.json.
    """
    flags = config.rollout
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    return EngineOptions(
        str(folder), engine_dtype(config), tensor_parallel_size=flags.engine_tp, pipeline_parallel_size=flags.engine_pp,
        enable_expert_parallel=flags.engine_ep, max_model_len=config.train.seq_length,
        max_num_seqs=flags.engine_max_num_seqs, seed=config.train.seed,
        # Log-probs of the distribution that is sampled from, temperature included.
        extra={"enforce_eager": True, "skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs",
               "kv_cache_memory_bytes": flags.engine_kv_cache_mib << 20},
        environment=environment)


def start_engine(config: RlRunConfig, provider: ModelProvider) -> Engine:
    """Describe the model in the run's folder and start its engine.

    Args:
        config: the run.
        provider: the model family.

    Raises:
        ValueError: the model has no Hugging Face counterpart, or the folder cannot be written.
        RefitError: the engine did not come up, with its own traceback.
    """
    folder = Path(config.observe.run_dir) / "engine"
    description = provider.hf_config(config.model_family)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--run-dir {config.observe.run_dir}: cannot be written: {error}") from error
    flags = config.rollout
    return ChildEngine(EngineProcess(engine_options(config, folder), flags.engine_start_timeout_s,
                                     flags.rollout_timeout_s, setup=leave_launcher))


def leave_launcher() -> None:
    """In the engine's process: it is none of the launcher's workers, and ends with the rank that started it."""
    for name in list(os.environ):
        if name in LAUNCHER_VARIABLES or name.startswith(LAUNCHER_PREFIX):
            del os.environ[name]
    # Ctrl-C reaches every process of the terminal; the trainer finishes its iteration first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
