"""Chooses the GPUs and environment variables of the rollout engine, before anything is started."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mimo import registry
from mimo.config.rl import RolloutConfig
from mimo.config.rl_run import RlRunConfig, decoder_part
from mimo.grid.dry_run import grid_parts, logits_lines, total_parameters
from mimo.grid.lanes import sequence_multiple
from mimo.grid.spec import Layout
from mimo.protocols import LANGUAGE, ModelProvider
from mimo.rl.batching import aligned, plan_microbatches
from mimo.text import counted

# Variables of the trainer that an engine on another node gets, by prefix and by name. Variables of a device, process or
# node are not among them: CUDA_VISIBLE_DEVICES is chosen for each actor, and torchrun sets RANK and others.
FORWARDED_PREFIXES = ("HF_", "TRANSFORMERS_", "VLLM_", "NCCL_", "FI_", "GLOO_", "TORCH_", "TORCHDYNAMO_",
                      "TORCHINDUCTOR_", "TRITON_", "UCX_")
# Folders of caches and temporary files are among them, because a home may be too small, or too slow for many nodes.
FORWARDED_NAMES = ("CUDA_CACHE_PATH", "OMP_NUM_THREADS", "PYTHONPATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
                   "TMPDIR", "TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "http_proxy", "https_proxy", "no_proxy")
NOT_FORWARDED = ("VLLM_HOST_IP", "VLLM_PORT", "VLLM_LOOPBACK_IP")
# Ends of folders that the trainer has chosen for its own host (`mimo.platform.cuda`), which are not forwarded either.
TRAINERS_CACHES = ("/mimo-hetero-inductor", "/mimo-hetero-triton")
# Sizes of a latent and of its rotary part that vLLM's kernel for CPUs takes
# (`CPUMLABackend.get_supported_head_sizes`). Its operation for plain rotary positions (`RotaryEmbedding.forward_cpu`)
# is wrong for queries of three dimensions, as those of latent attention are. YaRN is computed by PyTorch.
CPU_LATENTS = (512, 64)
# Symbol of a layer of experts in the configuration of Nemotron-H.
NEMOTRON_EXPERTS = "E"
GIB = 2**30


def forwarded(environment: Mapping[str, str], further: str = "") -> dict[str, str]:
    """Select the variables that every process of an engine gets wherever it runs.

    Args:
        environment: variables of the first rank.
        further: --engine-env.

    Raises:
        ValueError: a variable of --engine-env is not set.
    """
    asked = [name.strip() for name in further.split(",") if name.strip()]
    missing = [name for name in asked if name not in environment]
    if missing:
        raise ValueError(f"--engine-env {further}: {', '.join(missing)} is not set where the first rank runs")
    return {name: value for name, value in sorted(environment.items()) if name in asked or (
        (name.startswith(FORWARDED_PREFIXES) or name in FORWARDED_NAMES) and name not in NOT_FORWARDED
        and not value.endswith(TRAINERS_CACHES))}


def check_placement(config: RlRunConfig, rank: int) -> None:
    """Check what the flags ask for against this machine.

    Args:
        config: the run, `train.device` being `cpu` or `cuda`.
        rank: rank of this process; the first rank starts the engine.

    Raises:
        ValueError: there are too few GPUs, a rank uses a chosen GPU, a flag is for the other device, Ray is missing, a
            variable of --engine-env is not set, or the environment asks for vLLM's own data-parallel engine.
    """
    flags, model = config.rollout, config.model.model_provider
    if flags.uses_ray and importlib.util.find_spec("ray") is None:
        address = f" with --ray-address {flags.ray_address}" if flags.ray_address else ""
        raise ValueError(f"--engine-placement {flags.engine_placement}{address} needs the package ray, which the "
                         "extras rl-cpu and rl-gpu bring")
    if config.train.device == "cpu":
        for name, given in (("--engine-gpus", flags.engine_gpus), ("--engine-memory", flags.engine_memory),
                            ("--engine-enforce-eager", flags.engine_enforce_eager),
                            ("--engine-quantization", flags.engine_quantization)):
            if given and given != "none":
                raise ValueError(f"{name} {given} is for GPUs, and this run is on the CPU (--device cpu)")
        if flags.engine_ep and (flags.engine_tp > 1 or flags.engine_share_experts):
            other = "--engine-share-experts" if flags.engine_share_experts else f"--engine-tp {flags.engine_tp}"
            raise ValueError(f"--engine-ep with {other} is for GPUs: vLLM's experts on CPUs do not know on which "
                             "worker an expert is; leave out --engine-ep")
        described = registry.model_provider(model).hf_config(config.model_family)
        check_cpu_engine(model, described)
        if flags.engine_kv_cache_dtype != "auto":
            _check_cpu_cache(flags.engine_kv_cache_dtype, model, described)
    elif rank == 0:
        replica_gpus(config)
    if rank == 0:
        # Imported here because it imports torch, which a dry run does not need.
        from mimo.rollout.engine import DATA_PARALLEL, refuse_data_parallel

        forwarded(os.environ, flags.engine_env)
        if flags.engine_placement == "colocated" and flags.ray_address:
            local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
            if world % local == 0:  # Otherwise hosts have different numbers of ranks, and `start_engine` checks them.
                colocated_places(flags, [local] * (world // local))
        refuse_data_parallel(os.environ.get(DATA_PARALLEL, 1), f"environment variable {DATA_PARALLEL}")


def check_cpu_engine(name: str, described: Mapping[str, Any]) -> None:
    """Raise ValueError for a model that vLLM does not compute on CPUs, or computes wrongly there.

    `described` is its config.json.
    """
    sizes = described.get("kv_lora_rank"), described.get("qk_rope_head_dim")
    if sizes[0] is not None and sizes != CPU_LATENTS:
        raise ValueError(f"--model-provider {name} --kv-lora-rank {sizes[0]} --qk-pos-emb-head-dim {sizes[1]}: vLLM's "
                         f"kernel of latent attention for CPUs takes {CPU_LATENTS[0]} and {CPU_LATENTS[1]} only")
    if sizes[0] is not None and not described["rope_scaling"]:
        raise ValueError(f"--model-provider {name} --rope-type rope: vLLM on CPUs applies plain rotary positions to "
                         "the wrong numbers of latent attention; give --rope-type yarn, or use GPUs")
    pattern = described.get("llm_config", described).get("hybrid_override_pattern", "")
    if NEMOTRON_EXPERTS in pattern:
        raise ValueError(f"--model-provider {name} --hybrid-layer-pattern {pattern}: vLLM has no kernels for CPUs for "
                         f"layers of experts without a gate ({NEMOTRON_EXPERTS}); give a pattern without them, or use "
                         "GPUs")


def _check_cpu_cache(dtype: str, name: str, described: Mapping[str, Any]) -> None:
    """Raise ValueError for a cache of keys and values that vLLM does not have on CPUs; see `check_cpu_engine`."""
    decoder = decoder_part(described)
    channels = decoder.get("head_dim") or decoder["hidden_size"] // decoder["num_attention_heads"]
    if "kv_lora_rank" in decoder:
        raise ValueError(f"--engine-kv-cache-dtype {dtype} with --model-provider {name}: vLLM on CPUs caches latents "
                         "in the dtype of the weights only; leave it out")
    if channels % 32:
        raise ValueError(f"--engine-kv-cache-dtype {dtype} with heads of {channels} channels (--kv-channels): vLLM on "
                         "CPUs needs a multiple of 32; leave it out")


def replica_gpus(config: RlRunConfig) -> list[list[str]]:
    """Return CUDA's names of the GPUs of each replica; empty on the CPU, and if a Ray cluster starts the engine.

    Raises:
        ValueError: there are too few.
    """
    flags = config.rollout
    if config.train.device != "cuda" or flags.ray_address:
        return []
    import torch

    visible = visible_gpus(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    chosen = choose_gpus(flags, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), len(visible))
    workers = flags.engine_tp * flags.engine_pp
    return [[visible[number] for number in chosen[first:first + workers]] for first in range(0, len(chosen), workers)]


def visible_gpus(count: int, variable: str | None) -> list[str]:
    """Return CUDA's names of the GPUs that a process sees, in its own order.

    Args:
        count: number of GPUs that it sees.
        variable: its `CUDA_VISIBLE_DEVICES`, numbers or names; None if it is not set.
    """
    names = list(map(str, range(count))) if variable is None else [each.strip() for each in variable.split(",")]
    return names[:count]  # CUDA ignores everything after an invalid name


def choose_gpus(flags: RolloutConfig, num_local_ranks: int, num_gpus: int) -> list[int]:
    """Choose the GPUs of all workers, replica by replica, in the first rank's numbering.

    Rank i of the first host has GPU i. The first host has `num_local_ranks` trainer ranks, and the first rank sees
    `num_gpus` GPUs.

    Raises:
        ValueError: there are too few GPUs, or a trainer rank has one of them; the message has the numbers.
    """
    needed = flags.num_engine_workers
    if flags.engine_placement == "colocated":
        if needed > num_local_ranks:
            raise ValueError(f"--engine-placement colocated: {flags.sizes} need {needed} GPUs that trainer ranks have, "
                             f"and the first host has {num_local_ranks} ranks; --ray-address uses those of all hosts")
        return list(range(needed))
    if flags.gpu_numbers:
        missing = [number for number in flags.gpu_numbers if number >= num_gpus]
        if missing:
            raise ValueError(f"--engine-gpus {flags.engine_gpus}: the first rank sees {num_gpus} GPUs, numbered from "
                             f"0; there is no {', '.join(map(str, missing))}")
        taken = [number for number in flags.gpu_numbers if number < num_local_ranks]
        if taken:
            raise ValueError(f"--engine-gpus {flags.engine_gpus}: the {num_local_ranks} trainer ranks of the first "
                             f"host have GPUs 0 to {num_local_ranks - 1}, and with them {', '.join(map(str, taken))}; "
                             "--engine-placement colocated shares GPUs")
        return list(flags.gpu_numbers)
    if num_local_ranks + needed > num_gpus:
        raise ValueError(
            f"--engine-placement {flags.engine_placement}: the first host has {num_gpus} GPUs; its {num_local_ranks} "
            f"trainer ranks and the engine's {needed} workers ({flags.sizes}) need {num_local_ranks + needed}")
    return list(range(num_local_ranks, num_local_ranks + needed))


def colocated_places(flags: RolloutConfig, num_ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Choose the trainer ranks whose GPUs the engine's workers share, on all hosts.

    Replicas fill one host after the other. A replica of several nodes is on as many hosts in a row, and on the same
    local ranks of each of them.

    Args:
        flags: the engine's flags.
        num_ranks: number of trainer ranks on each host.

    Returns:
        For each replica and each of its nodes: the number of the host, and the local rank of the first worker there.
        The other workers are on the following ranks.

    Raises:
        ValueError: there is no room for all replicas.
    """
    nodes = flags.engine_nodes
    each = flags.engine_tp * flags.engine_pp // nodes
    found = [[(host, rank) for host in range(first, first + nodes)]
             for first in range(0, len(num_ranks) - nodes + 1, nodes)
             for rank in range(0, min(num_ranks[first:first + nodes]) - each + 1, each)]
    if len(found) < flags.engine_dp:
        raise ValueError(f"--engine-placement colocated: {flags.sizes} --engine-nodes {nodes} make "
                         f"{counted(flags.engine_dp, 'replica')}, each of which needs {counted(each, 'trainer rank')} "
                         f"on {'one host' if nodes == 1 else f'each of {nodes} hosts'}; there is room for {len(found)} "
                         f"on {counted(len(num_ranks), 'host')} with {', '.join(map(str, sorted(set(num_ranks))))} "
                         "ranks each")
    return found[:flags.engine_dp]


def dry_run_report(config: RlRunConfig, layout: Layout, provider: ModelProvider) -> str:
    """Return the plan that `train_rl.py --dry-run` prints: grids, engine and GPUs, the batch. Needs no torch."""
    # Imported late, as a run does not need it.
    from mimo.planner.memory_lines import state_lines

    parts = [*grid_parts(config, layout, provider), _engine_lines(config, layout, provider),
             [*_batch_lines(config, layout), *logits_lines(config, layout, provider)], state_lines(config, layout)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _engine_lines(config: RlRunConfig, layout: Layout, provider: ModelProvider) -> list[str]:
    """Describe where the engine's workers run and how many GPUs the run needs."""
    flags, ranks = config.rollout, layout.world_size
    workers = flags.num_engine_workers
    lines = [f"engine: {counted(flags.engine_dp, 'replica')} of {counted(workers // flags.engine_dp, 'worker')} "
             f"(--engine-tp {flags.engine_tp} * --engine-pp {flags.engine_pp}), "
             + (f"each on {flags.engine_nodes} nodes, " if flags.engine_nodes > 1 else "")
             + ("which share the experts, " if flags.engine_share_experts else "")
             + f"{flags.engine_placement}, "
             f"--rollout-mode {flags.rollout_mode}"]
    if config.train.device == "cpu":
        lines.append(f"processes: {counted(ranks, 'trainer rank')} and {counted(workers, 'engine worker')}, on CPUs")
    elif flags.engine_placement == "colocated":
        shared = "them" if flags.ray_address else "the first host's"
        lines.append(f"GPUs: {ranks}, one for each trainer rank; the engine shares {workers} of {shared}")
    elif flags.engine_placement == "ray":
        lines.append(f"GPUs: {ranks + workers}, {ranks} for the trainer's ranks and {workers} where Ray places the "
                     "engine")
    else:
        which = f"numbers {flags.engine_gpus}" if flags.engine_gpus else "those after the trainer's"
        lines.append(f"GPUs: {ranks + workers}, {ranks} for the trainer's ranks and {workers} for the engine, all of "
                     f"which are on the first rank's host ({which})")
    own = engine_weight_bytes(config, layout, provider)
    lines.append(f"memory of a worker of the engine: about {own / GIB:.1f} GiB of weights, and the KV cache")
    for package in ("vllm", "ray") if flags.uses_ray else ("vllm",):
        if importlib.util.find_spec(package) is None:
            lines.append(f"  the package {package} is not installed here; the sets rl-cpu and rl-gpu of "
                         "scripts/setup.sh bring it")
    return lines


def engine_weight_bytes(config: RlRunConfig, layout: Layout, provider: ModelProvider) -> float:
    """Estimate the bytes of weights that a worker of the engine holds.

    With --engine-quantization these keep the trainer's dtype: what is outside the layers, which are embeddings, output
    layer and projectors, and encoders without --encoder-fp8-format.
    """
    flags = config.rollout
    copies = flags.engine_dp if flags.engine_share_experts else 1
    whole_bytes, total = 2 if config.model.bf16 else 4, 0.0
    for name in layout.grids:
        quantizes = flags.engine_quantization != "none" and (
            name == LANGUAGE or config.model.encoder_fp8_format != "none")
        for shape in provider.parameter_shapes(config.model_family, name):
            each_bytes = 1 if quantizes and shape.stage == "layer" else whole_bytes
            total += total_parameters([shape]) * each_bytes / (copies if shape.split == "expert" else 1)
    return total / (flags.engine_tp * flags.engine_pp)


def _batch_lines(config: RlRunConfig, layout: Layout) -> list[str]:
    """Describe prompts, completions, updates and microbatches of an iteration."""
    train, rl = config.train, config.rl
    per_update = train.global_batch_size // rl.updates_per_rollout
    # The most there can be, with all sequences at full length. The real number depends on the lengths.
    longest = aligned(train.seq_length, sequence_multiple(layout))
    most = len(plan_microbatches([longest] * per_update, layout.num_lanes, rl.max_tokens_per_microbatch)[0])
    return [
        f"batch: {counted(config.prompts_per_step, 'prompt')} * {counted(rl.completions_per_prompt, 'completion')} "
        f"(--completions-per-prompt) = {counted(train.global_batch_size, 'completion')} of an iteration "
        "(--global-batch-size)" + (f"; up to {rl.max_refills} times, further prompts replace those that teach nothing "
                                   "(--max-refills)" if rl.max_refills else ""),
        f"updates: {counted(rl.updates_per_rollout, 'update')} an iteration (--updates-per-rollout), "
        f"{counted(per_update, 'completion')} each, {per_update // layout.num_lanes} on each of "
        f"{counted(layout.num_lanes, 'lane')} (--llm-dp)",
        f"microbatches: up to {most} of an update on each lane, where all sequences have --seq-length "
        f"{train.seq_length} tokens (--max-tokens-per-microbatch {rl.max_tokens_per_microbatch}); fewer where they are "
        "shorter",
    ]
