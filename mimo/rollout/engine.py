"""A vLLM engine that takes its weights from a trainer: a thin adapter for vLLM 0.26 (on GPUs) and 0.32.

It has the four calls of vLLM's weight-transfer protocol, so that `WeightSender` can call it directly. It also does what
the protocol leaves to the caller: it empties caches with results of old weights, adds the policy version to every
answer, and refuses to generate while weights are missing.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from mimo.refit.compat import NODE_WORKERS, allocate_stage_inputs, forget_weight_update, worker_processes
from mimo.refit.rendezvous import NO_WEIGHTS, RefitError, without_collections
from mimo.watchdog.process_exit import write_report

# vLLM reads these variables when it is imported or when its engine starts.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
# vLLM reads its own data-parallel size from it if its arguments give none.
DATA_PARALLEL = "VLLM_DP_SIZE"
# Address and first port at which replicas that share experts meet.
MEETING_ADDRESS, MEETING_PORT = "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT"
# vLLM 0.32 normalizes pixels of Qwen-VL on the device by default. It holds mean and deviation as buffers of the model,
# which made-up weights overwrite and no checkpoint restores, so this is off where vLLM knows it.
DEVICE_NORMALIZE = "mm_device_do_normalize"


@dataclass(frozen=True)
class EngineOptions:
    """Configuration of a rollout engine.

    Attributes:
        model: folder with config.json, and with tokenizer and processor if prompts are text or images. Weights in it
            are read only if `load_format` says so.
        dtype: dtype of weights and activations.
        tensor_parallel_size, pipeline_parallel_size: sizes of one replica.
        num_nodes: nodes over which the workers of one replica are divided, in order and in equal parts. More than one
            needs a `NodePlace` on each.
        enable_expert_parallel: distribute whole experts over the workers instead of cutting each.
        data_parallel_size, data_parallel_rank: number of replicas that share the experts and compute every step
            together, and this replica's number among them. `at_meeting_point` adds where they meet.
        max_model_len: most tokens of prompt and answer together.
        max_num_seqs: most sequences at a time.
        load_format: vLLM's load format. `dummy` makes up weights, which are never served.
        seed: seed of vLLM's own generators.
        extra: further arguments of `vllm.LLM`.
        environment: further environment variables of the engine's process.
    """

    model: str
    dtype: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_nodes: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    max_model_len: int = 2048
    max_num_seqs: int = 64
    load_format: str = "dummy"
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """Number of workers that take in weights."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def at_meeting_point(options: EngineOptions, address: str, port: int) -> EngineOptions:
    """Return the options with the address and the first port at which replicas that share experts meet."""
    return replace(options, environment=options.environment | {MEETING_ADDRESS: address, MEETING_PORT: str(port)})


@dataclass(frozen=True)
class NodePlace:
    """Place of a process among those of one engine that spreads over several nodes.

    Attributes:
        number: number of its node; that of 0 has the scheduler and takes all calls.
        address, port: where the first worker waits for the others; the same for all nodes.
    """

    number: int
    address: str
    port: int


@dataclass(frozen=True)
class Rollout:
    """One generated answer.

    Attributes:
        token_ids: tokens of the answer.
        logprobs: natural logarithm of each token's probability under the weights that generated it.
        version: policy version of those weights.
        finish_reason: `stop`, or `length` if the limit cut it off.
        prompt_length: number of tokens that the engine made of the prompt and its images; None if it is not known.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish_reason: str
    prompt_length: int | None = None


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling answers.

    Attributes:
        max_tokens: most tokens of an answer.
        temperature: divisor of the logits; 0 always chooses the likeliest token.
        top_p, top_k: sample only from the likeliest tokens, up to this total probability and this number. 1 and 0
            sample from all.
        n: number of answers to each prompt.
        stop_token_ids: tokens that end an answer.
        ignore_eos: go on after the model's own end token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


def refuse_data_parallel(size: str | int, name: str) -> None:
    """Refuse vLLM's own data-parallel size, which the engine's options give. Raises ValueError.

    The ranks of such an engine compute every step together. A call of one replica alone would wait for the others.
    """
    if int(size or 1) > 1:
        raise ValueError(f"{name} {size}: the size of vLLM's data-parallel engine is not taken from there; remove it, "
                         f"and use replicas (--engine-dp {size}), which --engine-share-experts makes such an engine")


def prepare_vllm(options: EngineOptions, place: NodePlace | None) -> dict[str, Any]:
    """Set this process's environment, register the refit's backend, and return the arguments of `vllm.LLM`.

    Raises:
        ValueError: `extra` or the environment asks for vLLM's own data-parallel engine.
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    os.environ.update(options.environment)
    refuse_data_parallel(os.environ.get(DATA_PARALLEL, 1), f"environment variable {DATA_PARALLEL}")
    refuse_data_parallel(options.extra.get("data_parallel_size", 1), "data_parallel_size")
    if options.data_parallel_size > 1:
        # `vllm.LLM` takes these from the environment alone. The local rank is 0, because the process sees no other
        # replica's GPUs.
        os.environ |= {DATA_PARALLEL: str(options.data_parallel_size),
                       "VLLM_DP_RANK": str(options.data_parallel_rank), "VLLM_DP_RANK_LOCAL": "0"}
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from mimo.refit.options import BACKEND, register
    from mimo.rollout import vllm_models

    register()
    vllm_models.register()
    arguments: dict[str, Any] = {
        "model": options.model, "dtype": options.dtype, "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "enable_expert_parallel": options.enable_expert_parallel, "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs, "load_format": options.load_format, "seed": options.seed,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND)}
    # What config.json says of the decoder. If there is none, vLLM says so.
    path = Path(options.model) / "config.json"
    described: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    decoder: dict[str, Any] = described.get("llm_config", described)
    if options.pipeline_parallel_size > 1 and {"hybrid_override_pattern", "layers_block_type"} & decoder.keys():
        # vLLM's prefix cache asserts that every stage has a Mamba-2 layer.
        arguments["enable_prefix_caching"] = False
    if current_platform.is_cpu() and "kv_lora_rank" in decoder and options.dtype == "float32":
        # On CPUs with AMX, vLLM would choose a backend of latent attention that computes in bfloat16 alone.
        arguments["attention_config"] = {"backend": "CPU_MLA"}
    if any(each.name == DEVICE_NORMALIZE for each in fields(EngineArgs)):
        arguments[DEVICE_NORMALIZE] = False
    arguments |= options.extra
    if place is not None:
        os.environ[NODE_WORKERS] = str(options.num_workers // options.num_nodes)
        arguments |= {"distributed_executor_backend": "mp", "nnodes": options.num_nodes, "node_rank": place.number,
                      "master_addr": place.address, "master_port": place.port}
    return arguments


def start_engine_node(options: EngineOptions, place: NodePlace) -> Any:
    """Start the workers of an engine on a node other than its first, as children of this process.

    They take their orders from the `RolloutEngine` on the first node. Both have to start at the same time.

    Returns:
        vLLM's executor, which has to be kept.
    """
    arguments = prepare_vllm(options, place)
    from mimo.refit.compat import start_node_workers

    executor = start_node_workers(arguments)
    _end_with_workers(worker_processes(executor))
    return executor


class RolloutEngine:
    """A vLLM engine in this process. Its workers may be other processes.

    `place` is the first node of an engine of several nodes; None for an engine of one.
    """

    def __init__(self, options: EngineOptions, place: NodePlace | None = None) -> None:
        with without_collections():
            arguments = prepare_vllm(options, place)
            from vllm import LLM
        # vLLM collects garbage several times while it starts. It would visit half a million objects of modules each
        # time, for a fifth of the start of a small model.
        gc.freeze()

        self.options = options
        # A trainer may give up a call and begin another while the first still runs.
        self._turn = threading.Lock()
        self.version: str | None = None if options.load_format == "dummy" else "initial"
        self._llm: Any = LLM(**arguments)
        _end_with_workers(worker_processes(self._llm.llm_engine.model_executor))
        if options.pipeline_parallel_size > 1:
            self._rpc(allocate_stage_inputs)

    @property
    def num_workers(self) -> int:
        """Number of workers that take in weights."""
        return self.options.num_workers

    def ping(self) -> None:
        """Have every worker answer. There is no answer while the engine or one of its workers hangs.

        If several workers refused the call before, vLLM has raised the first error and still has those of the others.
        Each of them makes one call fail.
        """
        for left in reversed(range(self.num_workers)):
            try:
                self._rpc("check_health")
            except RefitError:
                if not left:
                    raise
            else:
                return

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect with the trainer and agree on a plan. Raises RefitError if the two do not fit."""
        self._rpc("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        """Stop serving until the update is finished. An earlier update that was interrupted is forgotten."""
        self.version = None
        # Keys and values computed with old weights must not be used with new ones, even if the update fails.
        self._reset_caches()
        self._rpc(forget_weight_update)
        self._rpc("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive weights. After a RefitError the engine refuses to generate."""
        self._rpc("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve the new weights under a version."""
        self._rpc("finish_weight_update")
        self._reset_caches()
        self.version = weight_version or "unnamed"

    def load_from_disk(self, folder: str, version: str | None = None, timeout_s: float = 600.0) -> str:
        """Take in weights that `mimo.refit.transport.disk.DiskWriter` has written to a folder.

        It waits up to `timeout_s` for this policy version; None stands for the newest.

        Returns:
            The version that is served now.

        Raises:
            RefitError: there are no complete weights in time, or they do not belong to this model; then the engine
                keeps its weights. Or loading failed; then it refuses to generate until a refit succeeds.
        """
        from mimo.refit.transport import disk_worker
        from mimo.refit.transport.disk import read_manifest, wait_for_weights

        found = wait_for_weights(Path(folder), version, timeout_s)
        probes = self._rpc(disk_worker.probe_weights, folder=str(found))
        taken = self._rpc(disk_worker.plan_weights, folder=str(found), probes=probes)
        disk_worker.check_all_taken(found, taken)
        loaded = read_manifest(found).version
        self.version = None
        self._reset_caches()
        self._rpc(forget_weight_update)
        self._rpc(disk_worker.load_weights, folder=str(found))
        self._reset_caches()
        self.version = loaded
        return loaded

    def generate(self, prompts: Sequence[dict[str, Any]], sampling: Sampling,
                 seeds: Sequence[int] = ()) -> list[list[Rollout]]:
        """Generate completions of each prompt.

        A replica that shares experts takes part in the steps of the others, even without prompts of its own.

        Args:
            prompts: prompts in vLLM's form: `{"prompt_token_ids": [...]}` or `{"prompt": text}`, with
                `multi_modal_data` for images.
            sampling: parameters of sampling.
            seeds: a seed for each prompt. If empty, the engine's own generator is used.

        Raises:
            RefitError: the engine has no complete weights.
        """
        version = self._require_version()
        from vllm import SamplingParams

        given: Sequence[int | None] = seeds or [None] * len(prompts)
        drawn = [SamplingParams(
            n=sampling.n, max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k, seed=seed,
            stop_token_ids=list(sampling.stop_token_ids) or None, ignore_eos=sampling.ignore_eos, logprobs=0,
            detokenize=False) for seed in given]
        with self._turn:
            outputs = self._llm.generate(list(prompts), drawn, use_tqdm=False)
        return [[Rollout(tuple(answer.token_ids), tuple(
                    float(each[token].logprob) for token, each in zip(answer.token_ids, answer.logprobs, strict=True)),
                         version, str(answer.finish_reason), len(output.prompt_token_ids))
                 for answer in output.outputs] for output in outputs]

    def prompt_logprobs(self, prompts: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Return log-probs of each prompt's tokens from the second on, given those before.

        Raises:
            RefitError: the engine has no complete weights.
        """
        self._require_version()
        from vllm import SamplingParams

        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        with self._turn:
            outputs = self._llm.generate(list(prompts), asked, use_tqdm=False)
        return [[float(each[token].logprob)
                 for token, each in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]]
                for output in outputs]

    def sleep(self) -> None:
        """Free the device's memory. This needs `enable_sleep_mode`. Weights are lost until the next refit."""
        self.version = None
        self._reset_caches()
        with self._turn:
            self._llm.sleep(level=2)

    def wake_up(self, *tags: str) -> None:
        """Allocate memory for `weights`, for `kv_cache`, or for both, again. A refit needs memory for weights."""
        with self._turn:
            self._llm.wake_up(tags=list(tags) or None)

    def _require_version(self) -> str:
        if self.version is None:
            raise RefitError(NO_WEIGHTS)
        return self.version

    def _rpc(self, method: str | Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call a function in every worker and return the results."""
        try:
            with self._turn:
                returned: list[Any] = self._llm.llm_engine.collective_rpc(method, kwargs=arguments)
                return returned
        except RefitError:
            raise
        except Exception as error:  # A worker may raise anything, in its own process or in this one.
            raise RefitError(f"{method if isinstance(method, str) else method.__name__}: {error}") from error

    def _reset_caches(self) -> None:
        """Empty the caches of keys and values, of preprocessed images, and of encoder outputs."""
        if self._llm.reset_prefix_cache() is False:
            raise RefitError("the engine did not empty its cache of keys and values: requests still hold blocks")
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()


def _end_with_workers(workers: Sequence[BaseProcess]) -> None:
    """End this process when one of the engine's workers ends, because vLLM would wait for its answers for ever."""
    def watch() -> None:
        ended = wait([worker.sentinel for worker in workers])
        named = ", ".join(f"{worker.name} (process {worker.pid})" for worker in workers if worker.sentinel in ended)
        write_report(f"the engine ends because its {named} has ended\n")
        os._exit(1)

    if workers:  # an engine of one worker has it in this process
        threading.Thread(target=watch, name="engine-workers", daemon=True).start()
