"""The rollout engine of a run: a folder that describes the model, and the processes that serve it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from mimo.comm import gather
from mimo.config.rl import RolloutConfig
from mimo.config.rl_run import RlRunConfig
from mimo.grid.groups import Grids
from mimo.platform.base import Platform
from mimo.protocols import ImageProcessorProvider, ModelProvider
from mimo.refit.options import TRAINER_SCALES, RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.rl.placement import colocated_places, forwarded, replica_gpus, visible_gpus
from mimo.rl.prompts import ImagePromptSet, VideoPromptSet
from mimo.rollout.engine import EngineOptions
from mimo.rollout.process import EngineLostError, leave_group, leave_launcher, start_processes
from mimo.rollout.replicas import AnsweredError, RolloutClient, one_client
from mimo.visual import Normalisation, VideoProcessorProvider

if TYPE_CHECKING:
    from mimo.rollout.ray_actors import RayEngines

# Seconds that an engine may take to end after an error that its end has caused.
ENDING_S = 5.0
# Seconds that the processes of a replica take to end: 10 after SIGTERM, and the time that its guard needs.
CLOSING_S = 15.0
# Seconds in which an engine has to answer a call that does nothing. When a refit fails, workers give it up in a moment.
ANSWER_S = 10.0
# Files that show whether a folder has an image processor, and one for the videos of prompts.
TOKENIZER = "tokenizer_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"
# File that marks a folder as one that `describe_model` has made and may delete, and all names of files in such folders.
MARKER = ".written-by-train-rl"
DESCRIPTIONS = frozenset({
    MARKER, TOKENIZER, VIDEO_PROCESSOR, "config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.json",
    "chat_template.jinja"})


def write_processor(config: RlRunConfig, provider: ModelProvider, folder: Path, has_videos: bool) -> None:
    """Write the processor of a model with an encoder, for the images and videos of the run's prompts.

    Raises:
        OSError: the folder cannot be written.
        ValueError: videos of prompts need what prompt set or model provider lack, or the prompts' tokenizer has other
            special tokens than the model.
    """
    if not provider.encoders(config.model_family):
        return
    assert isinstance(provider, ImageProcessorProvider), "others are refused at set-up"
    tokens = provider.token_spec(config.model_family)
    prompts = config.find_dataset(config.data.dataset_provider).open(config.dataset, tokens, "train", config.train.seed)
    channels = tokens.num_channels
    # Text prompts have no images, but the engine needs a processor nevertheless.
    chosen = Normalisation((0.5,) * channels, (0.5,) * channels)
    if isinstance(prompts, ImagePromptSet):
        chosen = prompts.normalisation
    provider.write_processor(config.model_family, folder, chosen.mean, chosen.std)
    if not has_videos:
        return
    if not isinstance(prompts, VideoPromptSet) or prompts.video_processing is None:
        raise ValueError(f"--dataset-provider {config.data.dataset_provider}: prompts have videos, and the prompt set "
                         "does not say how they are processed (mimo.rl.prompts.VideoPromptSet)")
    if not isinstance(provider, VideoProcessorProvider):
        raise ValueError(f"--model-provider {config.model.model_provider}: prompts have videos, and the provider has "
                         "no video processor for the rollout engine (mimo.visual.VideoProcessorProvider)")
    # The engine gets sampled frames of the encoder's size. As many as fit --seq-length stay as they are.
    area, videos = tokens.size_multiple**2, prompts.video_processing
    given = replace(videos, fps=0.0, num_frames=0, max_tokens=0, min_pixels=area,
                    max_pixels=config.train.seq_length * area * videos.temporal_patch_size)
    provider.write_video_processor(config.model_family, folder, given, prompts.tokenizer)


def has_processor(folder: Path) -> bool:
    """Whether the folder has an image processor. If so, vLLM has to load a tokenizer, which the processor needs."""
    return (folder / TOKENIZER).is_file()


# Defaults of an engine's environment: it looks nothing up on a hub, does not log the hundreds of lines of its start,
# and on the CPU it compiles nothing and leaves its workers on all cores (vLLM's own choice needs a NUMA node for each).
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
CPU_ENVIRONMENT = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Default of --engine-memory, the fraction of a GPU that an engine fills: on a GPU of its own, and on the trainer's.
SEPARATE_MEMORY = 0.85
COLOCATED_MEMORY = 0.6
# Layers that stay as they are with --engine-quantization, as in published FP8 checkpoints: routers (`mlp.gate` of
# Qwen3-MoE and DeepSeek-V3, `block_sparse_moe.gate` of Mixtral, `mixer.gate` of Nemotron-H) and gates of shared
# experts. A rounded router sends tokens to other experts, and kernels for blocks do not take so few outputs.
UNQUANTIZED_LAYERS = (r"re:.*\.(shared_expert_)?gate$",)
# Encoders and projectors as vLLM names them: `vision_tower` and `multi_modal_projector` of LLaVA and LLaVA-NeXT,
# `visual` with `merger` and `deepstack_merger_list` of the Qwen-VL families. vLLM would quantise them like the decoder,
# but the trainer computes projectors in bfloat16 always, and encoders without --encoder-fp8-format. vLLM itself does
# not quantise the encoder and the projector of the Nemotron VLM.
UNQUANTIZED_PROJECTORS = r"re:(.*\.)?(multi_modal_projector|visual\.(merger|deepstack_merger_list))\."
UNQUANTIZED_ENCODERS = r"re:(.*\.)?(visual|vision_tower)\."


class ChildEngines:
    """Replicas in child processes of this one.

    Attributes:
        client: calls the engine.
        address: address under which the engine's workers reach the first rank.
    """

    def __init__(self, options: Sequence[EngineOptions], flags: RolloutConfig,
                 meanwhile: Callable[[], None] | None = None) -> None:
        self._processes = start_processes(options, flags.engine_start_timeout_s, flags.rollout_timeout_s,
                                          setup=leave_group, meanwhile=meanwhile)
        self.client: RolloutClient = one_client([each.handle for each in self._processes], flags.rollout_timeout_s,
                                                flags.engine_share_experts)
        # Ranks of one node and their engine need no network.
        on_one_node = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
        self.address = "127.0.0.1" if on_one_node else os.environ["MASTER_ADDR"]

    def fault(self) -> str:
        """Say which of the engine's processes has ended; empty if all are there."""
        ended = [f"replica {number}: process {each.process.pid} has ended with code {each.process.exitcode}"
                 for number, each in enumerate(self._processes) if not each.process.is_alive()]
        return "; ".join(ended)

    def silent(self, within_s: float) -> str:
        """Say which replica does not answer within some seconds, because it hangs; empty if all do."""
        deadline = time.monotonic() + within_s
        for number, each in enumerate(self._processes):
            try:
                # Replicas that do not hang answer at once.
                replace(each.handle, timeout_s=max(1.0, deadline - time.monotonic())).call("ping")
            except EngineLostError:
                return f"replica {number}: process {each.process.pid} hangs and does not answer"
            except RefitError:
                continue  # an error of the refit that vLLM still had to report is an answer, too
        return ""

    def close(self) -> None:
        """End the engine's processes, whatever they do."""
        for process in self._processes:
            process.close()


type Engine = ChildEngines | RayEngines
"""The rollout engine of a run. Only the first rank, which has started its processes, has one."""


def lost_by(engine: Engine, error: BaseException) -> str:
    """Say how an error of a call or of a refit shows that the engine is lost; empty if it does not.

    An engine is lost if it did not answer a call in time, if one of its processes ends within `ENDING_S`, or if it
    hangs, so that it does not answer within `ANSWER_S` either. The error says who had waited for what until then.
    """
    cause: BaseException | None = error
    has_answered = False
    while cause is not None:
        if isinstance(cause, EngineLostError):
            return str(cause)
        has_answered = has_answered or isinstance(cause, AnsweredError)
        cause = cause.__cause__
    # A worker's connections may close before its engine ends.
    deadline, fault = time.monotonic() + ENDING_S, engine.fault()
    while not fault and time.monotonic() < deadline:
        time.sleep(0.1)
        fault = engine.fault()
    # While other replicas still work on their parts of a call, they answer nothing else.
    if not fault and not has_answered:
        hanging = engine.silent(ANSWER_S)
        fault = f"{hanging}; {error}" if hanging else ""
    return fault


def engine_dtype(config: RlRunConfig) -> str:
    """Return the dtype of the engine's weights and of weights on the wire: the trainer's own."""
    return "bfloat16" if config.model.bf16 else "float32"


def refit_options(config: RlRunConfig) -> RefitOptions:
    """Select how weights travel to the engine."""
    backend = "nccl" if config.train.device == "cuda" else "gloo"
    if config.rollout.engine_placement == "colocated":
        backend = "ipc"
    return RefitOptions(backend=backend, dtype=engine_dtype(config), timeout_s=config.rollout.refit_timeout_s,
                        delta=config.rollout.refit_delta)


def engine_options(config: RlRunConfig, folder: Path, replica: int = 0, gpus: Sequence[str] = ()) -> EngineOptions:
    """Return the options of one replica of the engine that the flags ask for.

    Args:
        config: the run, `train.device` being `cpu` or `cuda`.
        folder: holds config.json, and an image processor with its tokenizer if the model takes images.
        replica: number of the replica.
        gpus: CUDA's names of the GPUs that its process shall see; empty leaves that to the environment.
    """
    flags, on_cuda = config.rollout, config.train.device == "cuda"
    environment = {name: os.environ.get(name, value)
                   for name, value in (ENVIRONMENT if on_cuda else ENVIRONMENT | CPU_ENVIRONMENT).items()}
    # Blocks and scales of the engine are then those that the trainer multiplies with.
    if flags.engine_quantization == "fp8_per_block" and config.model.fp8_format != "none":
        environment[TRAINER_SCALES] = str(int(config.model.fp8_recipe == "blockwise"))
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    takes_images = has_processor(folder)
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": not takes_images,
        # The update needs log-probs of the distribution that is sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        # Workers are children of the replica's process. vLLM's executor for Ray would place them by itself.
        "distributed_executor_backend": "mp" if flags.engine_tp * flags.engine_pp > 1 else "uni"}
    if flags.engine_kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = flags.engine_kv_cache_dtype
    if takes_images and not (folder / VIDEO_PROCESSOR).is_file():
        # Without videos in prompts, the engine keeps no memory for them.
        arguments["limit_mm_per_prompt"] = {"video": 0}
    if on_cuda:
        arguments |= {"enforce_eager": flags.engine_enforce_eager, "gpu_memory_utilization": engine_memory(flags),
                      "enable_sleep_mode": flags.engine_placement == "colocated", "disable_custom_all_reduce": True}
        if flags.engine_quantization != "none":
            arguments["quantization"] = flags.engine_quantization
            encoders = () if config.model.encoder_fp8_format != "none" else (UNQUANTIZED_ENCODERS,)
            arguments["quantization_config"] = {"ignore": [*UNQUANTIZED_LAYERS, UNQUANTIZED_PROJECTORS, *encoders]}
        if flags.engine_kv_scales == "calibrated":
            # Other backends do not see that the scales change, see `mimo.refit.kv_scales`.
            arguments["attention_config"] = {"backend": "FLASH_ATTN"}
    else:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": flags.engine_kv_cache_mib << 20}
    return EngineOptions(
        str(folder), engine_dtype(config), tensor_parallel_size=flags.engine_tp, pipeline_parallel_size=flags.engine_pp,
        num_nodes=flags.engine_nodes, enable_expert_parallel=flags.engine_ep,
        data_parallel_size=flags.engine_dp if flags.engine_share_experts else 1,
        data_parallel_rank=replica if flags.engine_share_experts else 0, max_model_len=config.train.seq_length,
        # Replicas of one seed would draw the same numbers for different prompts. vLLM seeds NumPy, which takes 32 bits.
        max_num_seqs=flags.engine_max_num_seqs, seed=(config.train.seed + replica) % 2**32,
        extra=arguments, environment=environment)


def engine_memory(flags: RolloutConfig) -> float:
    """Return the fraction of a GPU that an engine fills; see --engine-memory."""
    if flags.engine_memory is not None:
        return flags.engine_memory
    return COLOCATED_MEMORY if flags.engine_placement == "colocated" else SEPARATE_MEMORY


@dataclass(frozen=True)
class Host:
    """A host of the trainer.

    Attributes:
        name: the host and its trainer ranks, in words.
        addresses: its network addresses.
        gpus: CUDA's names of the GPUs of its ranks, rank by rank; empty names on the CPU.
    """

    name: str
    addresses: tuple[str, ...]
    gpus: tuple[str, ...]


def find_hosts(grids: Grids, platform: Platform) -> list[Host]:
    """Find the trainer's hosts. Collective over its world.

    Raises:
        ValueError: on every rank: ranks are not numbered host by host.
    """
    gpu = ""
    if platform.name == "cuda":
        gpu = visible_gpus(torch.cuda.device_count(),
                           os.environ.get("CUDA_VISIBLE_DEVICES"))[torch.cuda.current_device()]
    name = socket.gethostname()
    # Without addresses that are valid on one network interface only, which have its name behind a %.
    addresses = (name, *sorted(each.address for own in psutil.net_if_addrs().values() for each in own
                               if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address))
    first = grids.rank - int(os.environ.get("LOCAL_RANK", "0"))
    hosts: dict[int, list[tuple[int, str, tuple[str, ...], str]]] = {}
    for rank, found in enumerate(gather(grids, (first, name, addresses, gpu))):
        hosts.setdefault(found[0], []).append((rank, *found[1:]))
    result = []
    for own in hosts.values():
        ranks, names = [rank for rank, *_ in own], {name for _, name, *_ in own}
        if len(names) > 1 or ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ValueError(f"--engine-placement colocated with --ray-address: ranks {', '.join(map(str, ranks))} are "
                             f"on {', '.join(sorted(names))}; number the ranks host by host, as torchrun does")
        which = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        result.append(Host(f"{own[0][1]}, the host of trainer {which}", own[0][2], tuple(gpu for *_, gpu in own)))
    return result


def start_engine(config: RlRunConfig, provider: ModelProvider, has_videos: bool,
                 meanwhile: Callable[[], None] | None = None, hosts: Sequence[Host] = ()) -> Engine:
    """Describe the model in the run's folder and start its engine where `--engine-placement` says; on the first rank.

    `meanwhile` is called once in this process while the engine's processes start. They end if it raises an error.
    `hosts` are those of the trainer, whose GPUs the engine shares if Ray starts it there.

    Raises:
        ValueError: the model has no Hugging Face counterpart, the folder cannot be written, there are too few GPUs, or
            nobody answers at `--ray-address`, or that cluster has no node on one of the hosts.
        RefitError: the engine did not come up, with its own traceback.
    """
    folder = describe_model(config, provider, has_videos)
    flags, gpus = config.rollout, replica_gpus(config)
    if not flags.uses_ray:
        return ChildEngines([engine_options(config, folder, replica, gpus[replica] if gpus else ())
                             for replica in range(flags.engine_dp)], flags, meanwhile)
    # Imported here because other placements work without Ray.
    from mimo.rollout.ray_actors import RayCluster, RayEngines, Seat

    seats = []
    if flags.engine_placement == "colocated":
        each = flags.engine_tp * flags.engine_pp // flags.engine_nodes
        seats = [[Seat(number, hosts[number].name, hosts[number].addresses,
                       tuple(filter(None, hosts[number].gpus[rank:rank + each]))) for number, rank in places]
                 for places in colocated_places(flags, [len(host.gpus) for host in hosts])]
    cluster = RayCluster(flags.ray_address, [gpu for each in gpus for gpu in each])
    return RayEngines([engine_options(config, folder, replica) for replica in range(flags.engine_dp)], cluster,
                      resource="GPU" if config.train.device == "cuda" else "CPU",
                      start_timeout_s=flags.engine_start_timeout_s, call_timeout_s=flags.rollout_timeout_s,
                      environment=forwarded(os.environ, flags.engine_env), setup=leave_launcher,
                      trainer_address=os.environ["MASTER_ADDR"], meanwhile=meanwhile, seats=seats)


def describe_model(config: RlRunConfig, provider: ModelProvider, has_videos: bool) -> Path:
    """Write what vLLM must know of the model, except its weights, to a folder of the run.

    Raises:
        ValueError: the folder cannot be written, another one is in its place, or the model has no Hugging Face
            counterpart.
    """
    description = provider.hf_config(config.model_family)
    try:
        folder = engine_folder(config)
        if folder.exists():
            shutil.rmtree(folder)  # nothing of an earlier run with another model
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        write_processor(config, provider, folder, has_videos)
    except OSError as error:
        raise ValueError(f"--run-dir {config.observe.run_dir}: cannot be written: {error}") from error
    return folder


def engine_folder(config: RlRunConfig) -> Path:
    """Return the folder of a run that describes its model, which a later start deletes.

    Raises:
        ValueError: something else of this name is there, such as a folder of the user's, or one that cannot be read.
    """
    folder = Path(config.observe.run_dir).resolve() / "engine"
    is_own = not folder.is_symlink() and not folder.exists()
    if not is_own and folder.is_dir() and not folder.is_symlink():
        try:
            found = list(folder.iterdir())
        except OSError as problem:
            raise ValueError(f"--run-dir {config.observe.run_dir}: {problem}") from problem
        names = {each.name for each in found if each.is_file() and not each.is_symlink()}
        # Folders of older versions have no marker.
        is_own = MARKER in names or len(names) == len(found) and names <= DESCRIPTIONS
    if not is_own:
        raise ValueError(f"--run-dir {config.observe.run_dir}: train_rl.py writes the description of the model for "
                         f"vLLM to {folder}, which is there already and was not written by it. Give another --run-dir, "
                         "or move it away")
    return folder
