"""Compare seconds and bytes of a refit with those of vLLM's own packed NCCL broadcast, in one run.

    python scripts/bench/refit.py --device cuda --model qwen3-4b --trainer "--llm-tp 2" --engine-tp 2
    python scripts/bench/refit.py --device cpu

A trainer with random weights in the shape of a real model (without optimizer) uses the first GPUs, and a live vLLM
engine uses the next ones. With --colocated, the engine uses the trainer's GPUs, and weights go through CUDA IPC. Up to
three ways of sending the weights, called arms, take turns, --repeats times after one round that does not count:

    direct     the trainer's own refit (`WeightSender` with its default options)
    delta      as direct, but only blocks that have changed are sent (not with --colocated)
    loader     every tensor goes through the engine's own loading
    broadcast  whole tensors are gathered on the trainer's first rank and sent with vLLM's packed NCCL broadcast (CUDA
               only, not with --colocated)

Before each round, every tenth parameter tensor changes, so that delta sends about a tenth of what direct sends.
`bound_s` is the time that the bytes of the busiest worker of `direct` take at the rate of a plain copy between two
GPUs, or within one with --colocated. The same run measures that rate.

`weights_s` is the time in which the trainer finds its tensors, once for all arms; train_rl.py does so while the engine
starts. The set-up of an arm follows: trainer and engine agree on where each tensor goes. The last line of output is
JSON; above it, a Markdown table shows medians in seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mimo.refit.options import RefitOptions, RefitReport
from mimo.rollout.engine import EngineOptions
from mimo.rollout.process import EngineHandle, EngineProcess
from scripts.bench.broadcast_arm import add_broadcast, broadcast_arm, use
from scripts.bench.harness import argument_parser, free_port, table
from scripts.bench.presets import MODELS

COPY_BYTES = 256 << 20
PARTS = ("pause", "pack", "wire", "install")


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    trainer_gpus = trainer_ranks(chosen)
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[chosen.model] | {"dtype": chosen.dtype, "torch_dtype": chosen.dtype}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        started = time.monotonic()
        first_gpu = 0 if chosen.colocated else trainer_gpus
        engine = EngineProcess(engine_options(chosen, folder, first_gpu), 900, 900, setup=add_broadcast)
        print(f"engine up in {time.monotonic() - started:.0f} s", file=sys.stderr)
        try:
            result = train(chosen, folder, engine.handle, trainer_gpus)
        finally:
            engine.close()
    print(markdown(result))
    print(json.dumps(result))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--trainer", default="", help="the trainer's grid flags, such as '--llm-tp 2'")
    parser.add_argument("--engine-tp", type=int, default=1, help="tensor-parallel workers of the engine")
    parser.add_argument("--engine-pp", type=int, default=1, help="pipeline stages of the engine")
    parser.add_argument("--engine-ep", action="store_true", help="expert parallelism: each worker holds whole experts")
    parser.add_argument("--engine-memory", type=float, default=0.6, help="fraction of GPU memory that vLLM may use")
    parser.add_argument("--engine-extra", type=json.loads, default={}, metavar="JSON",
                        help="""further arguments of vllm.LLM, such as '{"quantization": "fp8_per_block"}'""")
    parser.add_argument("--colocated", action="store_true", help="the engine runs on the trainer's GPUs (CUDA only)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arm", action="append", choices=("direct", "delta", "loader", "broadcast"),
                        help="default: direct, and broadcast or, on a CPU and with --colocated, loader")
    parser.add_argument("--chunk-mib", type=int, default=512, help="size of a chunk of whole tensors")
    chosen = parser.parse_args(arguments)
    can_broadcast = chosen.device == "cuda" and not chosen.colocated
    chosen.arms = chosen.arm or ["direct", "broadcast" if can_broadcast else "loader"]
    if chosen.colocated and chosen.device == "cpu":
        parser.error("--colocated: on a CPU nothing is shared; the argument needs --device cuda")
    workers, ranks = chosen.engine_tp * chosen.engine_pp, trainer_ranks(chosen)
    if chosen.colocated and workers > ranks:
        parser.error(f"--colocated: the engine's {workers} workers need as many GPUs of the trainer, and --trainer "
                     f"'{chosen.trainer}' has {ranks}")
    if chosen.colocated and "delta" in chosen.arms:
        parser.error("--arm delta: an engine on the trainer's GPUs takes no delta refits (--colocated)")
    if chosen.colocated and "broadcast" in chosen.arms:
        parser.error("--arm broadcast: NCCL does not connect two processes on one GPU, as --colocated has them")
    if chosen.device == "cpu" and "broadcast" in chosen.arms:
        parser.error("--arm broadcast: vLLM's broadcast needs CUDA")
    chosen.dtype = "bfloat16" if chosen.device == "cuda" else "float32"
    return chosen


def trainer_ranks(chosen: argparse.Namespace) -> int:
    flags = shlex.split(chosen.trainer)
    sizes = {flag: int(value) for flag, value in zip(flags, flags[1:], strict=False) if flag.startswith("--llm-")}
    return math.prod(sizes.get(f"--llm-{axis}", 1) for axis in ("tp", "cp", "pp", "dp"))


def engine_options(chosen: argparse.Namespace, folder: str, first_gpu: int) -> EngineOptions:
    """Options of the engine, whose first worker has the GPU `first_gpu`."""
    extra: dict[str, Any] = {"enforce_eager": True, "skip_tokenizer_init": True}
    environment = {"VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if chosen.device == "cuda":
        extra |= {"gpu_memory_utilization": chosen.engine_memory, "disable_custom_all_reduce": True}
        workers = chosen.engine_tp * chosen.engine_pp
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(first_gpu + index) for index in range(workers))
    else:
        extra["kv_cache_memory_bytes"] = 64 << 20
    extra |= chosen.engine_extra
    return EngineOptions(folder, chosen.dtype, tensor_parallel_size=chosen.engine_tp,
                         pipeline_parallel_size=chosen.engine_pp, enable_expert_parallel=chosen.engine_ep,
                         max_model_len=256, max_num_seqs=8, extra=extra, environment=environment)


def train(chosen: argparse.Namespace, folder: str, handle: EngineHandle, num_ranks: int) -> dict[str, Any]:
    """Run the trainer's ranks and return what the first one measured."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    port = free_port()
    ranks = [context.Process(target=rank_main, args=(rank, num_ranks, port, chosen, folder, handle, there))
             for rank in range(num_ranks)]
    for each in ranks:
        each.start()
    there.close()
    try:
        result: dict[str, Any] = here.recv()
    except EOFError as error:
        raise SystemExit("the trainer ended without a result; its error is above") from error
    finally:
        for each in ranks:
            each.join(30)
            each.kill()
    return result


def rank_main(rank: int, world_size: int, port: int, chosen: argparse.Namespace, folder: str, handle: EngineHandle,
              results: Connection) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    from mimo.platform import get_platform

    platform = get_platform(chosen.device)  # before Megatron is imported
    platform.set_device(rank)
    platform.init_process_group(rank, world_size, 600)
    import torch.distributed as dist

    from mimo.config.cli import parse as parse_flags
    from mimo.config.validate import validate
    from mimo.grid.groups import Grids
    from mimo.model.build import build_model
    from mimo.registry import model_provider
    from mimo.watchdog.watchdog import Watchdog

    flags = ["--model-provider", "causal_lm", "--hf-config", folder, "--dataset-provider", "mock", "--device",
             chosen.device, "--transformer-impl", "local", "--seq-length", "64", "--micro-batch-size", "1",
             "--global-batch-size", "8", "--train-iters", "1", "--mock-min-length", "5", "--mock-max-length", "12",
             "--bf16" if chosen.dtype == "bfloat16" else "--no-bf16", *shlex.split(chosen.trainer)]
    config = parse_flags(flags)
    provider = model_provider(config.model.model_provider)
    with Grids(validate(config, world_size), platform.backend) as grids:
        watchdog = Watchdog(1800, grids.describe())
        started = time.monotonic()
        # A frozen model has no gradients and buffers for them, so 30B parameters fit on one GPU.
        frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze="language"))
        built = build_model(frozen, provider, grids, platform, watchdog)
        platform.synchronize()
        if rank == 0:
            print(f"trainer built in {time.monotonic() - started:.0f} s", file=sys.stderr)
        result = measure(chosen, built, grids, provider, config.model_family, handle, platform)
        if rank == 0:
            results.send(result)
        watchdog.close()
    dist.destroy_process_group()


def measure(chosen: argparse.Namespace, built: Any, grids: Any, provider: Any, family_config: Any,
            handle: EngineHandle, platform: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from mimo.refit.trainer_shards import ModelWeights

    started = time.monotonic()
    weights = ModelWeights(built, grids, provider, family_config, chosen.dtype).locate()
    weights_s = time.monotonic() - started
    backend = "ipc" if chosen.colocated else "nccl" if chosen.device == "cuda" else "gloo"
    arms: dict[str, Callable[[str], RefitReport | None]] = {}
    plan_s: dict[str, float] = {}
    for name in chosen.arms:
        started = time.monotonic()
        if name == "broadcast":
            use(grids, handle, "nccl")
            arms[name] = broadcast_arm(built, grids, provider, family_config, handle, chosen.dtype)
        else:
            use(grids, handle, "mimo")
            arms[name] = direct_arm(name, chosen, built, grids, provider, family_config, handle, backend, weights)
        plan_s[name] = time.monotonic() - started
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    reports: dict[str, list[RefitReport]] = {name: [] for name in arms}
    for repeat in range(chosen.repeats + 1):
        with torch.no_grad():
            for parameter in list(built.model.parameters())[::10]:
                parameter.neg_()
        for name, run in arms.items():
            use(grids, handle, "nccl" if name == "broadcast" else name)
            platform.synchronize()
            dist.barrier(group=grids.host)
            started = time.monotonic()
            report = run(f"{name} {repeat}")
            platform.synchronize()
            dist.barrier(group=grids.host)
            if repeat:
                seconds[name].append(time.monotonic() - started)
                if report is not None:
                    reports[name].append(report)
    answers = agreement(chosen, built, grids, handle, arms)
    copy_rate = rate_of_copies(chosen.colocated) if chosen.device == "cuda" and grids.rank == 0 else None
    parameters = sum(parameter.numel() for parameter in built.model.parameters())
    total = torch.tensor([parameters], dtype=torch.int64)
    dist.all_reduce(total, group=grids.host)
    if grids.rank != 0:
        return {}
    result = summary(chosen, grids, seconds, reports, plan_s, copy_rate, int(total))
    return result | {"weights_s": weights_s, "largest_difference_between_arms": answers}


def agreement(chosen: argparse.Namespace, built: Any, grids: Any, handle: EngineHandle,
              arms: dict[str, Callable[[str], RefitReport | None]]) -> float:
    """Return the largest difference between arms in a prompt's log-probs after a sync of the same new weights.

    Between two arms, the engine gets other weights, so that a tensor that an arm leaves out would show.
    """
    import torch

    prompt = {"prompt_token_ids": list(range(2, 2 + 64))}
    answers = []
    for number, (name, run) in enumerate(arms.items()):
        for factor in (2.0, 0.5) if number else (1.0,):  # exact in every dtype
            with torch.no_grad():
                for parameter in built.model.parameters():
                    parameter.mul_(factor)
            use(grids, handle, "nccl" if name == "broadcast" else name)
            run(f"{name} agreement")
        if grids.rank == 0:
            answers.append(torch.tensor(handle.prompt_logprobs([prompt])[0]))
    if len(answers) < 2:
        return 0.0
    return max(float((one - answers[0]).abs().max()) for one in answers[1:])


def direct_arm(name: str, chosen: argparse.Namespace, built: Any, grids: Any, provider: Any, family_config: Any,
               handle: EngineHandle, backend: str, weights: Any) -> Callable[[str], RefitReport]:
    """Connect an arm of this project. Each arm has a weight-transfer engine of its own in the workers."""
    from mimo.refit.sender import connect

    use(grids, handle, name)
    options = RefitOptions(backend, chosen.dtype, route="loader" if name == "loader" else "auto",
                           chunk_bytes=chosen.chunk_mib << 20, delta=name == "delta")
    sender = connect(built, grids, provider, family_config, handle, handle.num_workers, options, "127.0.0.1",
                     weights)
    return sender.send


def rate_of_copies(within: bool) -> float | None:
    """Bytes per second of a plain copy from this GPU to the next, or within this one. None if there is no next one."""
    import torch

    if torch.cuda.device_count() < 2 and not within:
        return None
    other = 0 if within else 1
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(other)
        started = time.monotonic()
        there.copy_(here)
        torch.cuda.synchronize(other)
        torch.cuda.synchronize(0)
        best = min(best, time.monotonic() - started)
    return COPY_BYTES / best


def summary(chosen: argparse.Namespace, grids: Any, seconds: dict[str, list[float]],
            reports: dict[str, list[RefitReport]], plan_s: dict[str, float], copy_rate: float | None,
            parameters: int) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for name, measured in seconds.items():
        arms[name] = {"seconds": statistics.median(measured), "all_seconds": measured, "setup_s": plan_s[name]}
        if reports[name]:
            last = reports[name][-1]
            arms[name] |= {"wire_bytes": last.wire_bytes, "direct_bytes": last.direct_bytes,
                           "sent_bytes_first_rank": last.sent_bytes}
            arms[name] |= {f"{part}_s": statistics.median(report.seconds[part] for report in reports[name])
                           for part in PARTS}
    result = {"model": chosen.model, "device": chosen.device, "dtype": chosen.dtype, "trainer": chosen.trainer,
              "trainer_ranks": grids.layout.world_size, "engine_tp": chosen.engine_tp,
              "engine_pp": chosen.engine_pp, "engine_ep": chosen.engine_ep, "engine_extra": chosen.engine_extra,
              "colocated": chosen.colocated,
              "copy_gb_s": None, "rank_parameters_summed": parameters, "arms": arms}
    ours = arms.get("direct")
    if ours and copy_rate:
        result["copy_gb_s"] = copy_rate / 1e9
        result["bound_s"] = ours["wire_bytes"] / (chosen.engine_tp * chosen.engine_pp) / copy_rate
    if ours and "broadcast" in arms:
        result["speedup"] = arms["broadcast"]["seconds"] / ours["seconds"]
    return result


def markdown(result: dict[str, Any]) -> str:
    rows = [["arm", "seconds", "set-up", *PARTS, "GB on the wire", "of it direct"]]
    for name, arm in result["arms"].items():
        parts = [f"{arm[f'{part}_s']:.3f}" if f"{part}_s" in arm else "" for part in PARTS]
        wire = [f"{arm[key] / 1e9:.2f}" if key in arm else "" for key in ("wire_bytes", "direct_bytes")]
        rows.append([name, f"{arm['seconds']:.3f}", f"{arm['setup_s']:.1f}", *parts, *wire])
    return table(rows)


if __name__ == "__main__":
    sys.exit(main())
