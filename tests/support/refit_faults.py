"""The whole protocol of a refit around a model of twelve small tensors: trainer ranks, a client, workers, an engine.

Everything is the real thing but the model and `vllm.LLM`: a plain module in place of vLLM's, driven by vLLM's own
worker methods. So a whole refit takes a fraction of a second, on threads of one process or with the engine in another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from mimo.boxes import Box, contiguous_strides
from mimo.refit.options import RefitOptions
from mimo.refit.rendezvous import RefitError
from mimo.refit.sender import Trainer, WeightSender
from mimo.refit.tensor_slices import Address, Holder, Holders, TensorMeta, TensorSlice

VOCAB, HIDDEN, BLOCKS = 12, 6, 8
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCAB, HIDDEN), "scale.weight": (HIDDEN,),
    **{f"blocks.{block}.weight": (HIDDEN, HIDDEN) for block in range(BLOCKS)}, "scale.bias": (HIDDEN,),
    "head.weight": (VOCAB, HIDDEN)}
NAMES = tuple(SHAPES)
PROMPTS: list[dict[str, Any]] = [{"prompt_token_ids": [1, 5, 7, 2]}, {"prompt_token_ids": [3, 3, 11]}]
# Two blocks, of 144 bytes each, travel together.
OPTIONS = RefitOptions(backend="gloo", dtype="float32", timeout_s=10, chunk_bytes=320)


class Scale(torch.nn.Module):
    """A module that no table knows: its weights take the route of vLLM's own loading, far from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((HIDDEN,), float("nan")))
        self.bias = torch.nn.Parameter(torch.full((HIDDEN,), float("nan")))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight + self.bias


class PlainModel(torch.nn.Module):
    """Model of one worker. Rows of the head are spread over the workers.

    Args:
        worker: number of this one.
        workers: how many there are.
    """

    def __init__(self, worker: int, workers: int) -> None:
        super().__init__()
        self.rows = range(worker * VOCAB // workers, (worker + 1) * VOCAB // workers)
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
        self.scale = Scale()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS))
        self.head = torch.nn.Linear(HIDDEN, len(self.rows), bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states of token ids."""
        hidden: torch.Tensor = self.scale(self.embed(tokens))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """This worker's rows."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load each tensor through its parameter's loader, like vLLM's models."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = parameters[name]
            shard = tensor[self.rows.start:self.rows.stop] if name == "head.weight" else tensor
            load = vars(parameter).get("weight_loader", load_plain)
            load(parameter, shard)
        return set(parameters)


def load_plain(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """vLLM's default loader."""
    assert parameter.shape == tensor.shape, f"{list(tensor.shape)} for {list(parameter.shape)}"
    parameter.data.copy_(tensor)


def whole_weights(seed: int) -> dict[str, torch.Tensor]:
    """Return the model of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) / HIDDEN ** 0.5 for name, shape in SHAPES.items()}


def logprobs_of(weights: dict[str, torch.Tensor], tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of a prompt's tokens from the second on."""
    hidden = weights["embed.weight"][list(tokens)] * weights["scale.weight"] + weights["scale.bias"]
    for block in range(BLOCKS):
        hidden = hidden @ weights[f"blocks.{block}.weight"].T
    logprobs = (hidden @ weights["head.weight"].T).double().log_softmax(-1)
    return [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


class PlainWeights:
    """Weights of a trainer's rank: rows of every matrix, vectors as a whole. See `ModelWeights`.

    Args:
        rank: this one.
        world_size: how many.
        seed: seed of the first weights.
        shapes: shapes of its tensors.
        transposed: matrices lie column by column.

    Attributes:
        before_view: called with the name of each tensor before it is packed.
    """

    def __init__(self, rank: int, world_size: int, seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES,
                 transposed: bool = False) -> None:
        self.entries = [TensorMeta(name, "float32", shape) for name, shape in shapes.items()]
        self.schemes = [scheme(tuple(shapes))]
        self.holders = holders_of(self.entries, world_size)
        self.transposed = transposed
        self.slices = [TensorSlice(name, held.box, Address(name, 0, self._strides(held.box.sizes)))
                       for name, boxes in self.holders.items() for held in boxes if rank in held.ranks]
        self.before_view: Callable[[str], None] = lambda name: None
        self.set(seed)

    def _strides(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return contiguous_strides(sizes[::-1])[::-1] if self.transposed else contiguous_strides(sizes)

    def set(self, seed: int) -> None:
        """Other weights, in other memory."""
        whole = whole_weights(seed)
        self.tensors = {}
        for part in self.slices:
            shape = self.entries[[entry.name for entry in self.entries].index(part.name)].shape
            values = whole[part.name] if part.name in whole and whole[part.name].shape == shape else torch.ones(shape)
            own = values[part.box.starts[0]:part.box.stops[0]]
            self.tensors[part.name] = torch.empty_strided(part.box.sizes, self._strides(part.box.sizes)).copy_(own)

    def locate(self) -> None:
        """See the protocol: holders and slices are known already."""

    def prepare(self) -> Mapping[str, torch.Tensor]:
        """See the protocol."""
        return Watched(self.tensors, lambda name: self.before_view(name))


class Watched(dict[str, torch.Tensor]):
    """Tensors by name, and something that is done before each of them is used.

    Args:
        tensors: by name.
        before: called with the name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], before: Callable[[str], None]) -> None:
        super().__init__(tensors)
        self._before = before

    def __getitem__(self, name: str) -> torch.Tensor:
        self._before(name)
        return super().__getitem__(name)


def scheme(names: Sequence[str]) -> dict[str, Any]:
    """Return the naming schemes of one module with one name for each tensor."""
    return {"module": "language", "first": 0, "count": len(names), "styles": {"own": list(names)}}


def holders_of(entries: Sequence[TensorMeta], world_size: int) -> Holders:
    """Rows of matrices are spread over the ranks; every rank has the rest."""
    found: Holders = {}
    for entry in entries:
        if len(entry.shape) == 1:
            found[entry.name] = [Holder(Box.whole(entry.shape), tuple(range(world_size)))]
            continue
        rows, columns = entry.shape
        cuts = [rank * rows // world_size for rank in range(world_size + 1)]
        found[entry.name] = [Holder(Box((start, 0), (stop, columns)), (rank,))
                             for rank, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False))]
    return found


class PlainLLM:
    """Stand-in for `vllm.LLM` with as many workers and vLLM's own methods for weight updates.

    Attributes:
        emptied: caches that were, in order.
    """

    def __init__(self, model: str, *, tensor_parallel_size: int, load_format: str, weight_transfer_config: Any,
                 **others: Any) -> None:
        self.emptied: list[str] = []
        self.others = others
        self.workers = [plain_worker(worker, tensor_parallel_size, load_format, weight_transfer_config)
                        for worker in range(tensor_parallel_size)]
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(), collective_rpc=self._rpc,
            reset_mm_cache=lambda: self.emptied.append("mm"),
            reset_encoder_cache=lambda: self.emptied.append("encoder"),
            engine_core=SimpleNamespace(shutdown=lambda: self.emptied.append("all")))

    def reset_prefix_cache(self) -> None:
        self.emptied.append("prefix")

    def generate(self, prompts: Sequence[dict[str, Any]], params: Any, use_tqdm: bool) -> list[Any]:
        """Prompts' log-probs, and as an answer the likeliest next token, once."""
        return [self._answer(prompt["prompt_token_ids"]) for prompt in prompts]

    def _answer(self, tokens: Sequence[int]) -> Any:
        model = self.workers[0].model
        with torch.no_grad():
            hidden = model(torch.tensor(list(tokens)))
            shards = [worker.model.compute_logits(hidden) for worker in self.workers]
        logprobs = torch.cat(shards, -1).double().log_softmax(-1)
        chosen = int(logprobs[-1].argmax())
        told: list[Any] = [{token: SimpleNamespace(logprob=float(logprobs[place, token]))}
                           for place, token in enumerate(tokens[1:])]
        answer = SimpleNamespace(token_ids=[chosen], finish_reason="length",
                                 logprobs=[{chosen: SimpleNamespace(logprob=float(logprobs[-1, chosen]))}])
        return SimpleNamespace(prompt_token_ids=list(tokens), prompt_logprobs=[None, *told], outputs=[answer])

    def _rpc(self, method: Any, kwargs: dict[str, Any]) -> list[Any]:
        from vllm.v1.serial_utils import run_method

        if len(self.workers) == 1:
            return [run_method(self.workers[0], method, (), kwargs)]
        with ThreadPoolExecutor(len(self.workers)) as threads:
            running = [threads.submit(run_method, worker, method, (), kwargs) for worker in self.workers]
        return [each.result() for each in running]


def plain_worker(worker: int, workers: int, load_format: str, transfer: Any) -> Any:
    """vLLM's worker as far as weight updates go."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.v1.worker.gpu_worker import Worker

    from mimo.refit.receiver import MimoWeightTransferEngine

    class PlainWorker:
        """Borrows the methods."""

        init_weight_transfer_engine = Worker.init_weight_transfer_engine
        _check_weight_transfer_engine = Worker._check_weight_transfer_engine
        start_weight_update = Worker.start_weight_update
        _start_weight_update = Worker._start_weight_update
        update_weights = Worker.update_weights
        finish_weight_update = Worker.finish_weight_update

        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(
                load_config=SimpleNamespace(load_format=load_format), model_config=None,
                parallel_config=SimpleNamespace(data_parallel_index=0, world_size=workers, rank=worker))
            self.model = PlainModel(worker, workers)
            record_metadata_for_reloading(self.model)
            self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
            self._weight_update_active = self._weight_update_is_draft = False
            self.weight_transfer_engine = MimoWeightTransferEngine(
                transfer, self.vllm_config, torch.device("cpu"), self.model)

    return PlainWorker()


def use_plain_engine() -> None:
    """Put `PlainLLM` in place of vLLM's, in an engine's process before the engine is made."""
    import vllm
    from vllm.v1.worker import gpu_worker

    torch.set_num_threads(1)
    torch.accelerator.synchronize = lambda *device: None  # as vLLM's own CPU runner does
    vllm.LLM = PlainLLM  # type: ignore[assignment,misc]
    gpu_worker.set_current_vllm_config = lambda config: contextlib.nullcontext()  # type: ignore[assignment]


@dataclass
class Ranks:
    """A trainer's ranks, each on a thread of this process.

    Attributes:
        weights: weights of each rank.
        senders: senders of each rank, once connected.
    """

    weights: list[PlainWeights]
    senders: list[WeightSender] = field(default_factory=list)

    @classmethod
    def of(cls, world_size: int, seed: int = 0, **weights: Any) -> Ranks:
        """Make ranks with the weights of a seed."""
        return cls([PlainWeights(rank, world_size, seed, **weights) for rank in range(world_size)])

    def together(self, part: Callable[[int], Any]) -> list[Any]:
        """Run something on every rank at once; of each what it returned or raised."""
        def run(rank: int) -> Any:
            try:
                return part(rank)
            except Exception as error:  # of any kind: the test looks at it
                return error

        with ThreadPoolExecutor(len(self.weights)) as threads:
            return list(threads.map(run, range(len(self.weights))))

    def connect(self, client: Any, num_workers: int, options: RefitOptions = OPTIONS) -> list[Any]:
        """Make the senders; of each rank None or what it raised."""
        world_size = len(self.weights)
        everybody, told = threading.Barrier(world_size), [None]

        def broadcast(rank: int, value: Any) -> Any:
            if rank == 0:
                told[0] = value
            everybody.wait(2 * options.timeout_s)  # the first rank may wait as long for others before it calls this
            return told[0]

        made = self.together(lambda rank: WeightSender(
            self.weights[rank], Trainer(rank, world_size, lambda value: broadcast(rank, value), "127.0.0.1",
                                        torch.device("cpu")), client, num_workers, options))
        self.senders = [each for each in made if isinstance(each, WeightSender)]
        return [None if isinstance(each, WeightSender) else each for each in made]

    def set(self, seed: int) -> None:
        """Other weights on every rank."""
        for each in self.weights:
            each.set(seed)

    def send(self, version: str) -> list[Any]:
        """Sync once and return the report or the error of each rank."""
        return self.together(lambda rank: self.senders[rank].send(version))


def is_right(engine: Any, seed: int) -> bool:
    """Return whether an engine or a handle serves the weights of a seed."""
    return serves(engine, whole_weights(seed))


def serves(engine: Any, whole: dict[str, torch.Tensor]) -> bool:
    """Return whether an engine or a handle serves these weights."""
    pairs = zip(engine.prompt_logprobs(PROMPTS), (logprobs_of(whole, prompt["prompt_token_ids"]) for prompt in PROMPTS),
                strict=True)
    return all(abs(theirs - ours) < 1e-5 for answer, own in pairs for theirs, ours in zip(answer, own, strict=True))


def refuses(engine: Any) -> bool:
    """Return whether an engine or a handle says that it has no complete weights."""
    try:
        engine.prompt_logprobs(PROMPTS)
    except RefitError as error:
        return "no complete weights" in str(error)
    return False
