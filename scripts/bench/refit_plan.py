"""Measure what planning a refit of a large model costs each rank: 512 ranks of a trainer, 512 workers of an engine.

    python scripts/bench/refit_plan.py
    python scripts/bench/refit_plan.py --model deepseek-v3 --planned 512
    python scripts/bench/refit_plan.py --model qwen3-235b-a22b --engine tp=16,replicas=32
    python scripts/bench/refit_plan.py --model nemotron-ultra-550b --prove
    python scripts/bench/refit_plan.py --model deepseek-v3 --engine tp=32,replicas=8 --prove

Every rank plans its own share from three tables that are exchanged once: the entries of the chunk plan, the ranks of
the trainer that hold each box, and the needs of each kind of worker. Shapes are those of the published models without
multi-token prediction; no tensor is made. --trainer is a Megatron grid of tp * pp * dp ranks, of which the experts use
etp * ep * pp times the rest. --engine stands for `replicas` engines of vLLM with dp * pp * tp workers each. With ep=1,
each worker of a stage has whole experts; with ep=0, slices of all.

The benchmark plans --planned evenly spaced ranks of each side; totals for all ranks follow from their mean. Seconds are
those of one core. For a rank of the trainer, they include `read_s`, the time to read the tables of the workers' needs.
`check_s` is the time to prove that a worker gets all that it needs and nothing else. `table_bytes` are the exchanged
bytes of all tables of needs and of holders. The last line of output is JSON.

With --prove, all ranks of both sides are planned as well. Workers of equal needs get the same boxes at the same
addresses, so this plan is checked once for each kind of worker: it brings every element that the worker needs once.
Then the sender of each box is chosen for every worker, every rank of the trainer plans what it sends, and the boxes of
every pair of rank and worker have to be the same on both sides, in the same order. As no rank sends anything else,
every element arrives once. `proof_s` is the time of all this on one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dataclasses import asdict, dataclass

from mimo.boxes import Box, contiguous_strides
from mimo.refit.plan import (
    Piece,
    Share,
    assigned,
    bytes_moved,
    bytes_needed,
    check_holders,
    check_plan,
    check_recv_spec,
    needed_pieces,
    receive_plan,
    send_plan,
    senders,
    shares,
)
from mimo.refit.tensor_slices import (
    Address,
    Holder,
    Holders,
    RecvSpec,
    TensorMeta,
    TensorSlice,
    holders_table,
    recv_spec_from_table,
    recv_spec_table,
)
from scripts.bench.harness import argument_parser, check_least, table

# Shapes of large mixtures of experts, and where each tensor belongs.


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model.

    Attributes:
        name: its name in Hugging Face's checkpoint.
        shape: shape of the whole tensor.
        layer: number of its layer; -1 before the first layer, the number of layers after the last.
        fused: the engine's tensor into which it is stacked.
        axis: the axis that tensor parallelism divides, or None.
        expert: number of its expert, or None.
        part: q, k or v of grouped-query attention, else empty.
        sections: rows of parts that tensor parallelism divides one by one, such as Mamba's z, x, B, C and dt; empty
            for a tensor of one part.
    """

    name: str
    shape: tuple[int, ...]
    layer: int
    fused: str
    axis: int | None = None
    expert: int | None = None
    part: str = ""
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Model:
    """Tensors in the order of the chunk plan."""

    tensors: tuple[Tensor, ...]
    layers: int
    experts: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def entries(self) -> list[TensorMeta]:
        """Entries of the chunk plan. Biases of the router stay float32."""
        return [TensorMeta(each.name, "float32" if each.name.endswith("_bias") else "bfloat16", each.shape,
                           each.name.endswith("_bias")) for each in self.tensors]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor in the chunk plan."""
        return {each.name: number for number, each in enumerate(self.tensors)}


@cache
def by_stage(model: Model, stages: int) -> dict[tuple[int, int | None], list[Tensor]]:
    """Group tensors by pipeline stage and expert. Stages differ by at most one layer."""
    ends = [model.layers * (stage + 1) // stages for stage in range(stages)]
    found: dict[tuple[int, int | None], list[Tensor]] = {}
    for tensor in model.tensors:
        stage = bisect_right(ends, min(max(tensor.layer, 0), model.layers - 1))
        found.setdefault((stage, tensor.expert), []).append(tensor)
    return found


def mlp(at: str, layer: int, hidden: int, inner: int, expert: int | None = None) -> list[Tensor]:
    """Return gate, up and down projection of a layer or of one of its experts."""
    fused = at if expert is None else at.rpartition(".")[0]
    return [Tensor(f"{at}.gate_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.up_proj.weight", (inner, hidden), layer, f"{fused}.w13", 0, expert),
            Tensor(f"{at}.down_proj.weight", (hidden, inner), layer, f"{fused}.w2", 1, expert)]


def alone(name: str, shape: tuple[int, ...], layer: int, axis: int | None = None) -> Tensor:
    """Return a tensor that is not fused."""
    return Tensor(name, shape, layer, name, axis)


def around(layers: Iterable[Tensor], count: int, vocabulary: int, hidden: int) -> tuple[Tensor, ...]:
    """Put the embeddings before the layers, and the output layer after them."""
    return (alone("model.embed_tokens.weight", (vocabulary, hidden), -1, 0), *layers,
            alone("model.norm.weight", (hidden,), count), alone("lm_head.weight", (vocabulary, hidden), count, 0))


def qwen3_235b_a22b() -> Model:
    """Qwen3-235B-A22B: 94 layers of 128 experts, 64 heads with 4 of keys and values."""
    hidden, tensors = 4096, []
    for layer in range(94):
        at = f"model.layers.{layer}"
        tensors += [alone(f"{at}.{norm}_layernorm.weight", (hidden,), layer) for norm in ("input", "post_attention")]
        tensors += [Tensor(f"{at}.self_attn.{part}_proj.weight", (heads * 128, hidden), layer, f"{at}.qkv_proj", 0,
                           None, part) for part, heads in (("q", 64), ("k", 4), ("v", 4))]
        tensors += [alone(f"{at}.self_attn.{part}_norm.weight", (128,), layer) for part in "qk"]
        tensors += [alone(f"{at}.self_attn.o_proj.weight", (hidden, 64 * 128), layer, 1),
                    alone(f"{at}.mlp.gate.weight", (128, hidden), layer)]
        tensors += [each for expert in range(128)
                    for each in mlp(f"{at}.mlp.experts.{expert}", layer, hidden, 1536, expert)]
    return Model(around(tensors, 94, 151936, hidden), 94, 128, 64, 4, 128)


def deepseek_v3() -> Model:
    """DeepSeek-V3: 3 dense layers, 58 layers of 256 experts and a shared one, latent attention."""
    hidden, tensors = 7168, []
    for layer in range(61):
        at = f"model.layers.{layer}"
        tensors += [alone(f"{at}.{norm}_layernorm.weight", (hidden,), layer) for norm in ("input", "post_attention")]
        tensors += [Tensor(f"{at}.self_attn.{name}.weight", (rows, hidden), layer, f"{at}.fused_qkv_a_proj")
                    for name, rows in (("q_a_proj", 1536), ("kv_a_proj_with_mqa", 576))]
        tensors += [alone(f"{at}.self_attn.{name}_a_layernorm.weight", (size,), layer)
                    for name, size in (("q", 1536), ("kv", 512))]
        tensors += [alone(f"{at}.self_attn.q_b_proj.weight", (128 * 192, 1536), layer, 0),
                    alone(f"{at}.self_attn.kv_b_proj.weight", (128 * 256, 512), layer, 0),
                    alone(f"{at}.self_attn.o_proj.weight", (hidden, 128 * 128), layer, 1)]
        if layer < 3:
            tensors += mlp(f"{at}.mlp", layer, hidden, 18432)
            continue
        tensors += [alone(f"{at}.mlp.gate.weight", (256, hidden), layer),
                    alone(f"{at}.mlp.gate.e_score_correction_bias", (256,), layer)]
        tensors += [each for expert in range(256)
                    for each in mlp(f"{at}.mlp.experts.{expert}", layer, hidden, 2048, expert)]
        tensors += mlp(f"{at}.mlp.shared_experts", layer, hidden, 2048)
    return Model(around(tensors, 61, 129280, hidden), 61, 256)


def nemotron_ultra_550b() -> Model:
    """A hybrid like Nemotron Ultra, of 550 B: 48 layers of Mamba, 12 of attention, 48 of 512 experts.

    Each layer has its mixer and no MLP. Experts work in a latent space of 2,048, and have no gate.
    """
    hidden, latent, inner, experts, tensors = 8192, 2048, 5376, 512, []
    mamba, groups, heads = 16384, 8 * 128, 256
    for layer in range(108):
        at = f"backbone.layers.{layer}"
        mixer = f"{at}.mixer"
        tensors.append(alone(f"{at}.norm.weight", (hidden,), layer))
        if layer % 9 == 4:
            tensors += [Tensor(f"{mixer}.{part}_proj.weight", (count * 128, hidden), layer, f"{mixer}.qkv_proj", 0,
                               None, part) for part, count in (("q", 64), ("k", 8), ("v", 8))]
            tensors.append(alone(f"{mixer}.o_proj.weight", (hidden, 64 * 128), layer, 1))
        elif layer % 9 % 2 == 0:
            sections = (mamba, mamba, groups, groups, heads)
            tensors += [Tensor(f"{mixer}.in_proj.weight", (sum(sections), hidden), layer, f"{mixer}.in_proj", 0,
                               sections=sections)]
            convolved = sections[1:4]
            tensors += [Tensor(f"{mixer}.conv1d.{kind}", (sum(convolved), *more), layer, f"{mixer}.conv1d.{kind}", 0,
                               sections=convolved) for kind, more in (("weight", (1, 4)), ("bias", ()))]
            tensors += [alone(f"{mixer}.{name}", (heads,), layer, 0) for name in ("A_log", "D", "dt_bias")]
            tensors += [alone(f"{mixer}.norm.weight", (mamba,), layer, 0),
                        alone(f"{mixer}.out_proj.weight", (hidden, mamba), layer, 1)]
        else:
            tensors += [alone(f"{mixer}.gate.weight", (experts, hidden), layer),
                        alone(f"{mixer}.gate.e_score_correction_bias", (experts,), layer),
                        alone(f"{mixer}.fc1_latent_proj.weight", (latent, hidden), layer),
                        alone(f"{mixer}.fc2_latent_proj.weight", (hidden, latent), layer)]
            for expert in range(experts):
                name, fused = f"{mixer}.experts.{expert}", f"{mixer}.experts"
                tensors += [Tensor(f"{name}.up_proj.weight", (inner, latent), layer, f"{fused}.w13", 0, expert),
                            Tensor(f"{name}.down_proj.weight", (latent, inner), layer, f"{fused}.w2", 1, expert)]
            tensors += [alone(f"{mixer}.shared_experts.up_proj.weight", (2 * inner, hidden), layer, 0),
                        alone(f"{mixer}.shared_experts.down_proj.weight", (hidden, 2 * inner), layer, 1)]
    return Model(around(tensors, 108, 131072, hidden), 108, experts, 64, 8, 128)


MODELS: dict[str, Callable[[], Model]] = {"qwen3-235b-a22b": qwen3_235b_a22b, "deepseek-v3": deepseek_v3,
                                          "nemotron-ultra-550b": nemotron_ultra_550b}


COLUMNS = ("model", "trainer", "engine", "tensors", "kinds of workers", "MB of tables", "ops of a worker",
           "of a trainer rank", "GB a worker receives", "s a worker: mean, max, check", "s a trainer rank: mean, max")


@dataclass(frozen=True)
class Trainer:
    """A Megatron grid."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True)
class Engine:
    """Engines of vLLM."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 0
    replicas: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp * self.replicas


# Trainer and engines of 512 ranks each, and those of a replica of 550 B over four nodes.
CASES = {
    "qwen3-235b-a22b": (Trainer(8, 8, 8, 32), (Engine(tp=8, replicas=64), Engine(tp=4, dp=8, ep=1, replicas=16))),
    "deepseek-v3": (Trainer(8, 8, 8, 32), (Engine(tp=32, replicas=16), Engine(tp=8, dp=8, ep=1, replicas=8))),
    "nemotron-ultra-550b": (Trainer(8, 4, 2, 16), (Engine(tp=8, pp=4),)),
}


class Stacked:
    """Slots of a rank. Parts of one tensor are stored one after the other."""

    def __init__(self) -> None:
        self.slices: list[TensorSlice] = []
        self._filled: dict[str, int] = {}

    def add(self, tensor: Tensor, target: str, ways: int = 1, place: int = 0) -> None:
        """Add one of `ways` equal parts of a tensor along the axis that tensor parallelism divides."""
        if tensor.axis is None or ways == 1:
            self.add_box(tensor.name, target, Box.whole(tensor.shape))
            return
        first = 0
        for rows in tensor.sections:
            start, stop = first + rows * place // ways, first + rows * (place + 1) // ways
            ends = (stop, *tensor.shape[1:])
            self.add_box(tensor.name, target, Box((start, *(0 for _ in tensor.shape[1:])), ends))
            first += rows
        if tensor.sections:
            return
        size = tensor.shape[tensor.axis] / ways
        starts, stops = [0] * len(tensor.shape), list(tensor.shape)
        starts[tensor.axis], stops[tensor.axis] = round(place * size), round((place + 1) * size)
        self.add_box(tensor.name, target, Box(tuple(starts), tuple(stops)))

    def add_box(self, name: str, target: str, box: Box) -> None:
        first = self._filled.get(target, 0)
        self.slices.append(TensorSlice(name, box, Address(target, first, contiguous_strides(box.sizes))))
        self._filled[target] = first + box.numel


def fused_rows(model: Model, ways: int, place: int) -> list[tuple[int, int, int]]:
    """Return a rank's rows of Megatron's linear_qkv as (0, 1 or 2 for q, k or v; first row; row after the last).

    The rows are stored group after group, and divided among ranks evenly.
    """
    dim, share = model.head_dim, model.heads // model.kv_heads * model.head_dim
    size = model.kv_heads * (share + 2 * dim) // ways
    found, first = [], 0
    for group in range(model.kv_heads):
        for part, rows in enumerate((share, dim, dim)):
            start, stop = max(first, place * size), min(first + rows, (place + 1) * size)
            if start < stop:
                origin = group * rows - first
                found.append((part, start + origin, stop + origin))
            first += rows
    return found


def dense_slices(model: Model, trainer: Trainer, stage: int, tp: int) -> list[TensorSlice]:
    """Slots of a Megatron rank without experts."""
    held = Stacked()
    rows: dict[str, list[tuple[int, int]]] = {"q": [], "k": [], "v": []}
    for part, start, stop in fused_rows(model, trainer.tp, tp) if model.heads else ():
        rows["qkv"[part]].append((start, stop))
    for tensor in by_stage(model, trainer.pp)[stage, None]:
        if tensor.part:
            for start, stop in rows[tensor.part]:
                held.add_box(tensor.name, tensor.fused, Box((start, 0), (stop, tensor.shape[1])))
        else:
            held.add(tensor, tensor.fused, trainer.tp, tp)
    return held.slices


def expert_slices(model: Model, trainer: Trainer, stage: int, ep: int, etp: int) -> list[TensorSlice]:
    """Slots of a Megatron rank for experts."""
    held, count = Stacked(), model.experts // trainer.ep
    for expert in range(ep * count, (ep + 1) * count):
        for tensor in by_stage(model, trainer.pp).get((stage, expert), ()):
            held.add(tensor, f"{tensor.fused}.{expert}", trainer.etp, etp)
    return held.slices


def trainer_slices(model: Model, trainer: Trainer, rank: int) -> list[TensorSlice]:
    """All slices of a Megatron rank. Ranks are laid out as `tp-ep-dp-pp`."""
    stage, place = divmod(rank, trainer.tp * trainer.dp)
    return [*dense_slices(model, trainer, stage, place % trainer.tp),
            *expert_slices(model, trainer, stage, place // trainer.etp % trainer.ep, place % trainer.etp)]


def trainer_holders(model: Model, trainer: Trainer) -> Holders:
    """Return every box with the ranks that hold it."""
    boxes: dict[str, dict[Box, list[int]]] = {}
    width = trainer.tp * trainer.dp
    parts: list[tuple[list[TensorSlice], list[int]]] = []
    for stage in range(trainer.pp):
        ranks = range(stage * width, (stage + 1) * width)
        parts += [(dense_slices(model, trainer, stage, tp), list(ranks[tp::trainer.tp])) for tp in range(trainer.tp)]
        parts += [(expert_slices(model, trainer, stage, ep, etp),
                   list(ranks[ep * trainer.etp + etp::trainer.ep * trainer.etp]))
                  for ep in range(trainer.ep) for etp in range(trainer.etp)]
    for slices, ranks in parts:
        for part in slices:
            boxes.setdefault(part.name, {}).setdefault(part.box, []).extend(ranks)
    return {name: [Holder(box, tuple(sorted(ranks))) for box, ranks in held.items()] for name, held in boxes.items()}


def engine_specs(model: Model, engine: Engine, stage: int, tp: int, place: int) -> RecvSpec:
    """Return what a worker needs. `place` is its index among the workers that share the experts."""
    taken, ways = Stacked(), engine.tp * engine.dp
    each, more = divmod(model.experts, ways)
    own = range(place * each + min(place, more), (place + 1) * each + min(place + 1, more))
    kv_ways = min(engine.tp, model.kv_heads)
    for tensor in by_stage(model, engine.pp)[stage, None]:
        if tensor.part in ("k", "v"):
            taken.add(tensor, tensor.fused, kv_ways, tp * kv_ways // engine.tp)
        else:
            taken.add(tensor, tensor.fused, engine.tp, tp)
    for expert in own if engine.ep else range(model.experts):
        for tensor in by_stage(model, engine.pp).get((stage, expert), ()):
            taken.add(tensor, tensor.fused, 1 if engine.ep else ways, 0 if engine.ep else place)
    return RecvSpec(tuple(sorted(taken.slices, key=lambda part: model.numbers[part.name])), ())


def all_specs(model: Model, engine: Engine) -> dict[int, RecvSpec]:
    """Return what each worker needs. Workers with equal needs share an object."""
    kinds: dict[tuple[int, int, int], RecvSpec] = {}
    found = {}
    for worker in range(engine.ranks):
        rest, tp = divmod(worker, engine.tp)
        rest, stage = divmod(rest, engine.pp)
        kind = stage, tp, rest % engine.dp * engine.tp + tp
        if kind not in kinds:
            kinds[kind] = engine_specs(model, engine, *kind)
        found[worker] = kinds[kind]
    return found


def timed[Result](function: Callable[[], Result]) -> tuple[Result, float]:
    """Return a function's result and the seconds that a core worked on it."""
    started = time.process_time()
    result = function()
    return result, time.process_time() - started


@contextmanager
def uncollected() -> Iterator[None]:
    """Context without the collector of cycles, which would look through millions of boxes again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def spread(count: int, planned: int) -> list[int]:
    """Choose evenly spaced ranks out of `count`, each at another position in its group."""
    planned = min(planned, count)
    return sorted({(number * count // planned + number * (planned < count)) % count for number in range(planned)})


def case(name: str, model: Model, trainer: Trainer, engine: Engine, planned: int, proves: bool) -> dict[str, Any]:
    """Plan one model from one layout to another and return the costs. With `proves`, plan all and compare both sides.

    Raises:
        RuntimeError: a rank does not send a worker what the worker expects of it.
    """
    entries = model.entries
    holders, specs = trainer_holders(model, trainer), all_specs(model, engine)
    _, check_holders_s = timed(lambda: check_holders(entries, holders))
    takers = {worker: id(each) for worker, each in specs.items()}
    kinds = {id(each): each for each in specs.values()}
    tables = {kind: json.dumps(recv_spec_table(each)) for kind, each in kinds.items()}
    table_bytes = sum(map(len, tables.values())) + len(json.dumps(holders_table(holders)))
    received = [receive_figures(entries, holders, specs[worker], worker) for worker in spread(engine.ranks, planned)]
    sent = [send_figures(entries, holders, trainer_slices(model, trainer, rank), tables, takers, rank)
            for rank in spread(trainer.ranks, planned)]
    held = {rank: trainer_slices(model, trainer, rank) for rank in range(trainer.ranks)} if proves else {}
    pairs, proof_s = timed(lambda: prove(entries, holders, specs, held, tables)) if proves else (0, 0.0)
    return {"model": name, "trainer": asdict(trainer), "engine": asdict(engine), "tensors": len(entries),
            "proved_pairs": pairs, "proof_s": proof_s, "kinds_of_workers": len(kinds), "table_bytes": table_bytes,
            "check_holders_s": check_holders_s, "workers": side(received, engine.ranks),
            "trainer_ranks": side(sent, trainer.ranks)}


def prove(entries: Sequence[TensorMeta], holders: Holders, specs: dict[int, RecvSpec],
          held: dict[int, list[TensorSlice]], tables: dict[int, str]) -> int:
    """Prove that every worker gets each element that it needs once, and nothing else. `holders` have been checked.

    Args:
        entries: the chunk plan's.
        holders: what the ranks of the trainer hold.
        specs: what each worker needs, by index; workers of equal needs share an object.
        held: slices of each rank of the trainer.
        tables: id of each of these objects -> its table, as workers publish it.

    Returns:
        Number of pairs of trainer rank and worker between which something is sent.

    Raises:
        ValueError: the plan of a kind of worker is not complete.
        RuntimeError: a rank does not send a worker what the worker expects of it.
    """
    # Operations between a rank and a worker are lists of numbers, one for each entry and box.
    boxes: dict[Box, int] = {}

    def code(each: Piece | Share) -> int:
        return each.entry << 32 | boxes.setdefault(each.box, len(boxes))

    expected: dict[tuple[int, int], array[int]] = {}
    workers: dict[int, list[int]] = {}
    for worker, spec in specs.items():
        workers.setdefault(id(spec), []).append(worker)
    for alike in workers.values():
        spec = specs[alike[0]]
        pieces = needed_pieces(entries, holders, spec, alike[0])
        check_recv_spec(entries, spec)
        check_plan(entries, holders, spec, assigned(pieces, alike[0]))
        codes = list(map(code, pieces))
        for worker in alike:
            by_sender: defaultdict[int, list[int]] = defaultdict(list)
            for sender, number in zip(senders(pieces, worker), codes, strict=True):
                by_sender[sender].append(number)
            expected |= {(sender, worker): array("q", own) for sender, own in by_sender.items()}
    pairs, wrong = len(expected), []
    parsed = {kind: json.loads(text) for kind, text in tables.items()}
    by_names: dict[frozenset[str], list[int]] = {}
    for rank, slices in held.items():
        by_names.setdefault(frozenset(part.name for part in slices), []).append(rank)
    for names, ranks in by_names.items():
        kinds = {kind: recv_spec_from_table(table, names) for kind, table in parsed.items()}
        needs = {worker: kinds[id(spec)] for worker, spec in specs.items()}
        for rank in ranks:
            promised: defaultdict[int, list[int]] = defaultdict(list)
            for share in shares(entries, holders, held[rank], needs, rank):
                number = code(share)
                for worker in share.receivers:
                    promised[worker].append(number)
            wrong += [(rank, worker) for worker, own in promised.items()
                      if expected.pop((rank, worker), None) != array("q", own)]
    wrong += expected  # nobody sends these
    if wrong:
        raise RuntimeError(f"{len(wrong)} pairs of trainer rank and worker disagree, such as {min(wrong)}")
    return pairs


def receive_figures(entries: Sequence[TensorMeta], holders: Holders, spec: RecvSpec, worker: int) -> dict[str, float]:
    """Plan one worker's share and check that it is complete."""
    operations, seconds = timed(lambda: receive_plan(entries, holders, spec, worker))

    def check() -> None:
        check_recv_spec(entries, spec)
        check_plan(entries, holders, spec, operations)

    _, check_s = timed(check)
    num_bytes = bytes_moved(operations, entries)
    assert num_bytes == bytes_needed(spec, entries), f"worker {worker} receives {num_bytes} bytes"
    return {"seconds": seconds, "ops": len(operations), "bytes": num_bytes, "check_s": check_s}


def send_figures(entries: Sequence[TensorMeta], holders: Holders, slices: Sequence[TensorSlice], tables: dict[int, str],
                 takers: dict[int, int], rank: int) -> dict[str, float]:
    """Read what the workers need of one rank's tensors, and plan its share."""
    names = {part.name for part in slices}
    kinds, read_s = timed(lambda: {kind: recv_spec_from_table(json.loads(text), names)
                                   for kind, text in tables.items()})
    specs = {worker: kinds[kind] for worker, kind in takers.items()}
    operations, seconds = timed(lambda: send_plan(entries, holders, slices, specs, rank))
    return {"seconds": read_s + seconds, "ops": len(operations), "bytes": bytes_moved(operations, entries),
            "read_s": read_s}


def side(planned: Sequence[dict[str, float]], ranks: int) -> dict[str, Any]:
    """Figures of one side: means and maxima of the planned ranks, totals of all ranks."""
    def of(key: str) -> list[float]:
        return [each[key] for each in planned]

    figures = {"ranks": ranks, "planned": len(planned)}
    for key in planned[0]:
        figures |= {f"{key}_mean": statistics.mean(of(key)), f"{key}_max": max(of(key)),
                    f"{key}_total": statistics.mean(of(key)) * ranks}
    return figures


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Show all cases as a table."""
    def layout(sizes: dict[str, int]) -> str:
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp")

    rows = [list(COLUMNS)]
    for result in results:
        workers, ranks = result["workers"], result["trainer_ranks"]
        rows.append([
            result["model"], layout(result["trainer"]), layout(result["engine"]), f"{result['tensors']:,}",
            str(result["kinds_of_workers"]), f"{result['table_bytes'] / 1e6:.2f}", f"{workers['ops_mean']:,.0f}",
            f"{ranks['ops_mean']:,.0f}", f"{workers['bytes_mean'] / 1e9:.1f}",
            f"{workers['seconds_mean']:.2f}, {workers['seconds_max']:.2f}, {workers['check_s_mean']:.2f}",
            f"{ranks['seconds_mean']:.2f}, {ranks['seconds_max']:.2f}"])
    return table(rows)


def grid[Grid: (Trainer, Engine)](kind: type[Grid], text: str) -> Grid:
    """Parse a layout such as `tp=8,pp=2`."""
    try:
        return kind(**{name: int(size) for name, size in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    """Plan, print, and return the exit code."""
    parser = argument_parser(__doc__, device=False)
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given several times (default: all)")
    parser.add_argument("--trainer", type=partial(grid, Trainer), help="a Megatron grid, such as tp=8,pp=8,dp=8,ep=32")
    parser.add_argument("--engine", type=partial(grid, Engine), action="append",
                        help="engines of vLLM, such as tp=4,dp=8,ep=1,replicas=16; may be given several times")
    parser.add_argument("--planned", type=int, default=4, help="number of ranks to plan on each side")
    parser.add_argument("--prove", action="store_true", help="plan all ranks and prove that every element arrives once")
    chosen = parser.parse_args(arguments)
    check_least(parser, chosen, planned=1)
    results = []
    for name in chosen.model or MODELS:
        model, (trainer, engines) = MODELS[name](), CASES[name]
        trainer = chosen.trainer or trainer
        if trainer.tp * trainer.dp % (trainer.ep * trainer.etp) or model.experts % trainer.ep:
            parser.error(f"--trainer {trainer}: ep * etp must divide tp * dp, and ep the {model.experts} experts")
        with uncollected() if chosen.prove else nullcontext():
            results += [case(name, model, trainer, engine, chosen.planned, chosen.prove)
                        for engine in chosen.engine or engines]
    print(markdown(results))
    for result in results if chosen.prove else ():
        workers, ranks = result["workers"]["ranks"], result["trainer_ranks"]["ranks"]
        print(f"{result['model']}: every element arrives once: {workers} workers' plans are complete, and {ranks} "
              f"ranks' plans agree with them in all {result['proved_pairs']} pairs ({result['proof_s']:.0f} s)")
    print(json.dumps({"cases": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
