"""Run vLLM's own packed NCCL broadcast, which refit.py compares with this project's refit in the same engine.

vLLM's workers import this module by its name to run `choose_backend`, so it is not part of the program refit.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mimo.rollout.engine import RolloutEngine
from mimo.rollout.process import EngineHandle
from scripts.bench.harness import free_port


def use(grids: Any, handle: EngineHandle, backend: str) -> None:
    """Let the engine's workers take weights by `nccl` or by one of our arms."""
    import torch.distributed as dist

    if grids.rank == 0:
        handle.call("use_backend", backend)
    dist.barrier(group=grids.host)


def broadcast_arm(built: Any, grids: Any, provider: Any, family_config: Any, handle: EngineHandle,
                  dtype: str) -> Callable[[str], None]:
    """Return vLLM's own packed broadcast from the trainer's first rank, in the form of vLLM 0.32 or 0.26."""
    import torch

    from mimo.comm import broadcast_object
    from mimo.refit.trainer_shards import ModelWeights, WholeTensors
    from scripts.bench.vllm_source import MegatronSource

    held = ModelWeights(built, grids, provider, family_config, dtype).locate()
    source = MegatronSource(WholeTensors(held, torch.device("cuda", torch.cuda.current_device())))
    port = broadcast_object(grids, free_port())
    from vllm.distributed.weight_transfer import nccl_engine

    if "NCCLTrainerInitInfo" in vars(nccl_engine):
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        trainer = WeightTransferTrainerFactory.trainer_init(
            nccl_engine.NCCLTrainerInitInfo("127.0.0.1", port, handle.num_workers + 1, rank=grids.rank),
            client=handle, source=source)
        return lambda version: trainer.send_weights()
    return older_broadcast(grids, handle, source, port)


def older_broadcast(grids: Any, handle: EngineHandle, source: Any, port: int) -> Callable[[str], None]:
    """Broadcast as the examples of vLLM 0.26 do."""
    from concurrent.futures import ThreadPoolExecutor

    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    if grids.rank != 0:
        def follow(version: str) -> None:
            for _ in source:
                pass

        return follow
    threads = ThreadPoolExecutor(1)
    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": handle.num_workers + 1}
    joined = threads.submit(handle.init_weight_transfer_engine, info | {"rank_offset": 1})
    group = NCCLWeightTransferEngine.trainer_init(info)
    joined.result()
    metadata = source.metadata()
    update = {"names": [each.name for each in metadata], "packed": True,
              "dtype_names": [str(each.dtype).removeprefix("torch.") for each in metadata],
              "shapes": [list(each.shape) for each in metadata]}

    def send(version: str) -> None:
        handle.start_weight_update()
        received = threads.submit(handle.update_weights, update)
        NCCLWeightTransferEngine.trainer_send_weights(iter(source), NCCLTrainerSendWeightsArgs(group, packed=True))
        received.result()
        handle.finish_weight_update(version)

    return send


def add_broadcast() -> None:
    """Add a method in the engine's process that chooses the weight-transfer engine of its workers."""
    def use_backend(engine: Any, name: str) -> None:
        engine._llm.llm_engine.collective_rpc(choose_backend, args=(name,))

    RolloutEngine.use_backend = use_backend  # type: ignore[attr-defined]


def choose_backend(worker: Any, name: str) -> None:
    """Set the weight-transfer engine of an arm in a worker. It is made on first use."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    own = vars(worker).get("worker") or worker
    known = vars(own).setdefault("_refit_arms", {"mimo": own.weight_transfer_engine})
    if name not in known:
        known[name] = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="nccl" if name == "nccl" else "mimo"), own.vllm_config, own.device,
            own.model_runner.get_model())
    own.weight_transfer_engine = known[name]
