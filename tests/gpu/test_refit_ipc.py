"""Refits on one GPU that trainer and engine share (backend `ipc`): the engine's answers, and the GPU's memory."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import socket
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from mimo.refit.rendezvous import StoreAddress

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
              pytest.mark.timeout(580)]
MIB = 1 << 20
SLACK_BYTES = 8 * MIB
NAMES = ("trainer rank 0", "worker 0")
# Bytes of each chunk's message: the memory holds 80 MiB.
CHUNKS = [48 * MIB, 16 * MIB, 64 * MIB + 16, 1024]
SYNCS = 3
# The embedding and the output layer have 32 MiB each. Weights so large that answers of two models differ.
MODEL: dict[str, Any] = {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 512, "tie_word_embeddings": False, "norm_topk_prob": True,
    "initializer_range": 0.05, "bos_token_id": 0, "eos_token_id": 1}
PROMPTS = [[5, 17, 80, 2, 33, 41, 1000, 16000, 77], [90, 3, 3, 64, 12345]]
# The same kernels on the same bits; and bfloat16 against float32, where a token may go to another expert.
MAX_ERROR, MEDIAN_ERROR, MIN_CHANGE = 1e-3, 0.1, 0.5


def used_bytes() -> int:
    """Return the memory of the GPU that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def message(sync: int, number: int) -> torch.Tensor:
    """Like no other."""
    generator = torch.Generator("cuda").manual_seed(100 * sync + number)
    return torch.randint(256, (CHUNKS[number],), dtype=torch.uint8, device="cuda", generator=generator)


def nothing_failed() -> None:
    """Nobody has said anything."""


def end_of(rank: int, place: StoreAddress | None, connection: Connection) -> tuple[Any, Any]:
    """Return the end of this process, and its rendezvous."""
    from mimo.refit.options import RefitOptions
    from mimo.refit.rendezvous import Rendezvous
    from mimo.refit.transport.base import Opening

    if rank == 0:
        rendezvous, own = Rendezvous.host("127.0.0.1", NAMES[rank], 60.0)
        connection.send(own)
    else:
        assert place is not None
        rendezvous = Rendezvous.join(place, NAMES[rank], 60.0)
    options = RefitOptions(backend="ipc", dtype="bfloat16", timeout_s=10.0)
    incoming = [{0: size} for size in CHUNKS] if rank else ()
    device = torch.device("cuda", torch.cuda.current_device())
    return Opening(rendezvous, "set-up", options, rank, 1, device, NAMES).finish(incoming), rendezvous


def plain_trainer(connection: Connection) -> None:
    """Sync three times and once with a worker that dies; return the memory used before, during and after each.

    Of the last: before, amid, when the worker was dead, after.
    """
    end, _rendezvous = end_of(0, None, connection)
    used = []
    for sync in range(SYNCS + 1):
        torch.cuda.synchronize()
        used.append([used_bytes()])
        try:
            for number in range(len(CHUNKS)):
                end.wait(end.exchange([(1, message(sync, number))], []), nothing_failed)
                if number == 0:
                    torch.cuda.empty_cache()
                    used[-1].append(used_bytes())
            end.release(nothing_failed)
        except RuntimeError as error:
            connection.send(str(error))
            used[-1].append(used_bytes())
            end.close()
            torch.cuda.empty_cache()
        used[-1].append(used_bytes())
    connection.send(used)


def plain_worker(place: StoreAddress, connection: Connection) -> None:
    """Takes three syncs in, and of the fourth a chunk."""
    end, _rendezvous = end_of(1, place, connection)
    right = 0
    for sync in range(SYNCS + 1):
        for number, size in enumerate(CHUNKS):
            into = torch.empty(size, dtype=torch.uint8, device="cuda")
            end.wait(end.exchange([], [(0, into)]), nothing_failed)
            right += torch.equal(into, message(sync, number))
            if sync == SYNCS:
                connection.send(right)
                connection.recv()  # it is killed here
        del into
        end.release(nothing_failed)


def test_messages_of_every_sync_and_memory_that_is_given_back() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    near, far = context.Pipe()
    trainer = context.Process(target=plain_trainer, args=(there,))
    trainer.start()
    assert here.poll(120)
    worker = context.Process(target=plain_worker, args=(here.recv(), far))
    worker.start()
    try:
        assert near.poll(120) and near.recv() == SYNCS * len(CHUNKS) + 1
        worker.kill()
        worker.join()
        assert here.poll(60)
        assert "worker 0" in here.recv()
        assert here.poll(60)
        used = here.recv()
    finally:
        for process in (trainer, worker):
            process.kill()
            process.join()
    for before, amid, after in used[1:-1]:
        assert amid - before >= 64 * MIB and after - before <= SLACK_BYTES, used
    *_, dead, after = used[-1]
    assert dead - after >= 64 * MIB, used


def save(folder: Path, seed: int) -> list[list[float]]:
    """Save a model of a seed, in bfloat16; Hugging Face's log-probs of the prompts' tokens from the second on."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL, dtype="bfloat16")).to(torch.bfloat16)
    model.save_pretrained(folder)
    found = []
    model.float()
    for tokens in PROMPTS:
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist())
    return found


def train(folders: tuple[str, ...], handle: Any, results: Connection) -> None:
    """The only rank of a trainer: gives the engine each folder's weights in turn.

    Sends, of each: the engine's log-probs, bytes that the GPU had in use before and after, and the report.
    """
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1",
                   "LOCAL_RANK": "0"}
    from mimo.platform import get_platform

    platform = get_platform("cuda")  # before Megatron is imported
    platform.set_device(0)
    platform.init_process_group(0, 1, 300)
    from mimo.config.cli import parse
    from mimo.config.validate import validate
    from mimo.grid.groups import Grids
    from mimo.model.build import build_model
    from mimo.refit.options import RefitOptions
    from mimo.refit.sender import connect
    from mimo.registry import model_provider
    from mimo.watchdog.watchdog import Watchdog
    from mimo.weights.load import HfPaths, load_hf

    config = parse(["--model-provider", "causal_lm", "--hf-config", folders[0], "--dataset-provider", "mock",
                    "--device", "cuda", "--transformer-impl", "local", "--seq-length", "64", "--micro-batch-size", "1",
                    "--global-batch-size", "8", "--train-iters", "1", "--mock-min-length", "5", "--mock-max-length",
                    "12", "--bf16"])
    provider = model_provider(config.model.model_provider)
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze="language"))
    options = RefitOptions(backend="ipc", dtype="bfloat16", timeout_s=120, chunk_bytes=16 * MIB, verify=True)
    with Grids(validate(config, 1), platform.backend) as grids:
        watchdog = Watchdog(900, grids.describe())
        built = build_model(frozen, provider, grids, platform, watchdog)
        sender = connect(built, grids, provider, config.model_family, handle, handle.num_workers, options,
                         address="127.0.0.1")
        for number, folder in enumerate(folders):
            load_hf(built, grids, provider, config.model_family, HfPaths(model=folder))
            platform.synchronize()
            torch.cuda.empty_cache()
            before = used_bytes()
            report = sender.send(f"step {number}")
            after = used_bytes()
            answers = handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in PROMPTS])
            results.send((answers, before, after, report))
        sender.close()
        watchdog.close()


def differences(one: list[list[float]], other: list[list[float]]) -> torch.Tensor:
    """Return the differences of all tokens' log-probs."""
    return torch.cat([(torch.tensor(mine) - torch.tensor(theirs)).abs()
                      for mine, theirs in zip(one, other, strict=True)])


def test_the_engine_answers_as_one_that_loaded_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from mimo.rollout.engine import EngineOptions
    from mimo.rollout.process import EngineProcess

    folders = tuple(str(tmp_path / name) for name in ("first", "other"))
    hugging_face = [save(Path(folder), seed) for seed, folder in enumerate(folders)]
    # Alone on the GPU while it measures what it may use.
    engine = EngineProcess(EngineOptions(
        folders[0], "bfloat16", max_model_len=256, max_num_seqs=8, load_format="auto",
        extra={"enforce_eager": True, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.3,
               "disable_custom_all_reduce": True},
        environment={"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}), 400, 120)
    try:
        loaded = engine.handle.prompt_logprobs([{"prompt_token_ids": tokens} for tokens in PROMPTS])
        found = synced((folders[1], folders[0], folders[1], folders[0]), engine.handle)
    finally:
        engine.close()
    assert differences(loaded, hugging_face[0]).median() <= MEDIAN_ERROR
    for number, (answers, before, after, report) in enumerate(found):
        assert report.direct_bytes >= 64 * MIB, report
        if number % 2:
            assert differences(answers, loaded).max() <= MAX_ERROR
        else:
            assert differences(answers, loaded).max() >= MIN_CHANGE
            assert differences(answers, hugging_face[1]).median() <= MEDIAN_ERROR
        # The first sync brings kernels that stay.
        assert number == 0 or after - before <= SLACK_BYTES, [each[1:3] for each in found]


def synced(folders: tuple[str, ...], handle: Any) -> list[Any]:
    """Return what the trainer sent, see `train`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=train, args=(folders, handle, there))
    process.start()
    there.close()
    deadline = time.monotonic() + 240
    try:
        found = []
        for _ in folders:
            assert here.poll(max(0.0, deadline - time.monotonic())), "the trainer hangs"
            found.append(here.recv())
        return found
    finally:
        process.kill()
        process.join()
