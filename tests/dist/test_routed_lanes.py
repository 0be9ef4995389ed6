"""Lanes read by one rank each and handed to the others: the same batches as where every rank reads for itself."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.support.spawn import WorkerPool

# name -> (ranks, flags)
LAYOUTS = {
    "encoder-dp1-llm-dp2": (3, "--llm-dp 2"),
    "encoder-dp2-llm-dp1": (3, "--encoder-dp 2 --micro-batch-size 3 --global-batch-size 6"),
    "encoder-tp2-llm-tp2": (4, "--encoder-tp 2 --llm-tp 2"),
    "encoder-pp2-llm-pp2": (4, "--encoder-pp 2 --llm-pp 2"),
    "colocated-encoder-tp2-llm-dp2": (2, "--layout colocated --encoder-tp 2 --llm-dp 2"),
    "llm-only": (4, "--llm-only --llm-tp 2 --llm-dp 2 --mock-text-only-fraction 1 --encoder-lr None "
                     "--projector-lr None --encoder-weight-decay None"),
}
STEPS = 3


def batches_of(rank: int, flags: tuple[str, ...], world_size: int, dataset: str, lane_loader: str, *,
               resume_after: int | None = None, steps: int = STEPS) -> tuple[list[list[str]], list[str]]:
    """Return a digest of every microbatch of some steps on this rank, and the keys that it read itself."""
    from mimo import registry
    from mimo.config.validate import num_microbatches, validate
    from mimo.data.loader import open_loader
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from tests.support.equality import parse_config

    config = parse_config("--dataset-provider", dataset, "--lane-loader", lane_loader, *flags)
    layout = validate(config, world_size)
    provider = registry.dataset_provider(dataset)
    digests, keys = [], []
    with Grids(layout, current_platform().backend) as grids:
        def open_one(tag: int) -> Any:
            return open_loader(
                layout, rank, model_provider=registry.model_provider(config.model.model_provider),
                model_config=config.model_family, data_provider=provider, data_config=config.dataset,
                micro_batch_size=config.train.micro_batch_size, num_microbatches=num_microbatches(config),
                seq_length=config.train.seq_length, seed=config.train.seed, lane_loader=lane_loader, host=grids.host,
                tag=tag)

        loader = open_one(1)
        readers = [provider.readers[-1]] if hasattr(provider, "readers") and provider.readers else []
        for step in range(steps):
            digests.append([digest(batch) for batch in loader.next_step()])
            if step + 1 == resume_after:
                state = loader.state_dict()
                loader.close()
                loader = open_one(2)
                loader.load_state_dict(state)
        loader.close()
        keys = [key for reader in readers for key in reader.read_keys]
        if hasattr(provider, "readers"):
            provider.readers.clear()
    return digests, keys


def batches_of_each(rank: int, flags: tuple[str, ...], world_size: int) -> list[tuple[list[list[str]], list[str]]]:
    """Return `batches_of` for streams, for routed lanes and for lanes that every rank reads for itself."""
    single = "tests.support.routed_data:single"
    return [batches_of(rank, flags, world_size, dataset, lane_loader)
            for dataset, lane_loader in (("mock", "routed"), (single, "routed"), (single, "per-lane"))]


def digest(batch: Any) -> str:
    """Everything that a microbatch holds, as a hash."""
    import torch

    from mimo.data.batch import map_tensors

    found = hashlib.sha1()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return torch.zeros(0)

    found.update(repr(map_tensors(batch, note)).encode())
    return found.hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routed_and_own_lanes_give_the_batches_of_streams(pool: WorkerPool, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    words = tuple(flags.split())
    streams, routed, own = zip(*pool.run(batches_of_each, words, world_size, world_size=world_size), strict=True)
    assert [found for found, _ in routed] == [found for found, _ in streams] == [found for found, _ in own]
    read = [key for _, keys in routed for key in keys]
    assert len(read) == len(set(read)), "a sample was read twice"
    # Some ranks share a lane in every layout here, and then each reads it for itself.
    assert len([key for _, keys in own for key in keys]) > len(read)


def test_continues_behind_the_last_step_handed_out(pool: WorkerPool) -> None:
    world_size, flags = LAYOUTS["encoder-dp1-llm-dp2"]
    words, name = tuple(flags.split()), "tests.support.routed_data:single"
    whole = pool.run(batches_of, words, world_size, name, "routed", world_size=world_size)
    for after in (1, 2):
        resumed = pool.run(resumed_batches, words, world_size, name, after, world_size=world_size)
        assert resumed == [found for found, _ in whole]


def resumed_batches(rank: int, flags: tuple[str, ...], world_size: int, dataset: str, after: int) -> list[list[str]]:
    return batches_of(rank, flags, world_size, dataset, "routed", resume_after=after)[0]


def error_of(rank: int, flags: tuple[str, ...], world_size: int) -> tuple[str, str]:
    from mimo.watchdog.process_exit import ReportedElsewhereError

    try:
        batches_of(rank, flags, world_size, "tests.support.routed_data:failing", "routed", steps=20)
    except (ValueError, ReportedElsewhereError) as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def test_an_error_of_a_reader_reaches_every_rank(pool: WorkerPool) -> None:
    world_size, flags = LAYOUTS["encoder-dp1-llm-dp2"]
    found = pool.run(error_of, tuple(flags.split()), world_size, world_size=world_size)
    (kind, message), *others = found
    assert kind == "ValueError" and "shard-7.tar" in message
    for lane, (kind, message) in enumerate(others):
        assert kind == "ReportedElsewhereError", (kind, message)
        assert message.startswith("rank 0 (vision grid, ")
        assert f"), which reads lane {lane}, has stopped: ValueError: shard-7.tar" in message


def test_packed_rows_reach_every_rank(pool: WorkerPool) -> None:
    world_size, flags = LAYOUTS["encoder-tp2-llm-tp2"]
    words = (*flags.split(), "--seq-length", "128")
    found = pool.run(packed_facts, words, world_size, world_size=world_size)
    assert found[0] is None and found[1] is None, "the encoder's ranks hold no text"
    assert found[2] == found[3]
    cu_seqlens, positions, mask, length = found[2]
    assert len(cu_seqlens) == 4 and cu_seqlens[-1] == length, "two samples and the padding"
    for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        assert positions[start:stop] == list(range(stop - start))
        assert not mask[stop - 1]


def packed_facts(rank: int, flags: tuple[str, ...], world_size: int) -> Any:
    from mimo import registry
    from mimo.config.validate import num_microbatches, validate
    from mimo.data.loader import open_loader
    from mimo.grid.groups import Grids
    from mimo.platform import current_platform
    from tests.support.equality import parse_config

    config = parse_config("--dataset-provider", "tests.support.routed_data:packed", *flags)
    layout = validate(config, world_size)
    with Grids(layout, current_platform().backend) as grids:
        loader = open_loader(
            layout, rank, model_provider=registry.model_provider(config.model.model_provider),
            model_config=config.model_family, data_provider=registry.dataset_provider(config.data.dataset_provider),
            data_config=config.dataset, micro_batch_size=1, num_microbatches=num_microbatches(config),
            seq_length=config.train.seq_length, seed=1, host=grids.host, tag=1)
        text = loader.next_step()[0].text
        loader.close()
    if text is None:
        return None
    return (text.packed.cu_seqlens.tolist(), text.position_ids[0].tolist(), text.loss_mask[0].bool().tolist(),
            text.input_ids.shape[1])
