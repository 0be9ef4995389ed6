"""Finds the parts of each Hugging Face tensor that the trainer's ranks hold, and their places in parameters.

`ModelWeights` does so once, at set-up. It keeps names, shapes and places, but no tensor, because weights may get new
memory between syncs. `LiveTensors` looks them up at every read. `WholeTensors` gathers whole tensors on the first rank.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from mimo.boxes import Box
from mimo.comm import gather
from mimo.compat import storage_key
from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.protocols import ModelProvider
from mimo.refit import compat
from mimo.refit.messages import dtype_name, torch_dtype, view_of
from mimo.refit.plan import holder_problems
from mimo.refit.rendezvous import without_collections
from mimo.refit.tensor_slices import DTYPE_BYTES, Address, Holder, Holders, TensorMeta, TensorSlice
from mimo.weights.export import ExportOptions, infos_of, plan_rules
from mimo.weights.load import agree
from mimo.weights.match import SHAPE_ERRORS, ModelPiece, fitted, module_pieces
from mimo.weights.rules import NamingScheme, Rule, WeightMap, hf_shapes

_LAYER = re.compile(r"(.*?)\.(\d+)\.")
Shapes = dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]
"""Module -> Megatron name -> shape and dtype of the whole tensor."""


class ModelWeights:
    """A model's weights for refits: the whole tensors, and the places of their boxes on this rank.

    The construction finds the entries, and `locate` the rest, because an engine's workers need only the entries to
    begin. Both are collective over the world, through host memory; once, at set-up.

    Args:
        built: this rank's model.
        grids: process groups.
        provider: the model family.
        family_config: its configuration.
        dtype: dtype in which floating tensors travel: `bfloat16`, `float16`, `float32`.

    Raises:
        ValueError: on the first rank: everything in which the weight map and the model do not fit each other, by name.
        ReportedElsewhereError: the same, on the other ranks.

    Attributes:
        entries: every whole tensor, in the order in which they travel.
        schemes: see `module_schemes`.
        live: this rank's parameters and buffers.
        holders: boxes of each tensor, and the ranks that hold them, once `locate` has found them. Like entries and
            schemes, the same on every rank.
        slices: this rank's boxes and their places, likewise.
    """

    holders: Holders
    slices: list[TensorSlice]

    @without_collections()
    def __init__(self, built: BuiltModel, grids: Grids, provider: ModelProvider, family_config: Any,
                 dtype: str) -> None:
        self._built, self._grids, self.dtype = built, grids, dtype
        self._maps = {module: provider.weight_map(family_config, module).for_engine() for module in grids.layout.grids}
        # Entries have the names of each module's first scheme. Workers choose their loader's scheme (`worker_plan`).
        self._chosen = {module: weight_map.schemes[0] for module, weight_map in self._maps.items()}
        self._pieces: dict[str, list[ModelPiece]] | None = {
            module: module_pieces(part, grids.collections[module]) for module, part in named_modules_of(built.model)}
        shapes: Shapes = {module: {} for module in grids.layout.grids}
        for tensors_of, _ in _gather_distinct(grids, {
                module: {piece.name: (piece.shape, piece.tensor.dtype) for piece in held}
                for module, held in self._pieces.items()}):
            for module, tensors in tensors_of.items():
                shapes[module] |= tensors
        self.entries, self._misfits = plan_entries(self._maps, self._chosen, shapes, dtype)
        if self._misfits:
            self.locate()  # raises, and lists what else is wrong
        self.schemes = module_schemes(self._maps, [entry.name for entry in self.entries])
        self.live = LiveTensors(built)

    def locate(self) -> ModelWeights:
        """Find which rank holds which boxes of the model, the first time. Return self. Raises as the construction."""
        if self._pieces is None:
            return self
        slices, problems = _rank_slices(self._pieces, self._built, self._maps, self._chosen)
        self._pieces = None  # They are tensors, which are not kept.
        ranks_of: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
        for boxes, ranks in _gather_distinct(self._grids, [(part.name, part.box) for part in slices]):
            for name, box in boxes:
                ranks_of[name][box] += ranks
        self.holders = {name: [Holder(box, tuple(sorted(boxes[box])))
                               for box in sorted(boxes, key=lambda box: box.starts)]
                        for name, boxes in ranks_of.items()}
        self.slices = slices
        # If some tensors do not fit, the boxes that they lack would only be more lines about the same faults.
        problems += self._misfits or ([] if problems else holder_problems(self.entries, self.holders))
        agree(self._grids, "the weight map does not fit the model", problems)
        return self

    def prepare(self) -> dict[str, torch.Tensor]:
        """Finish what an overlapped step left open, and return the live tensors by the names of addresses. Collective.

        They are valid for one sync, because their memory may change.
        """
        self._built.finish_gathers("a refit")
        return self.live.tensors({part.address.tensor: None for part in self.slices})


def module_schemes(maps: Mapping[str, WeightMap], names: Sequence[str]) -> list[dict[str, Any]]:
    """List the naming schemes of each module's tensors, of which an engine's loader knows one.

    Args:
        maps: each module's weight map, in the order of the entries.
        names: names of the entries, in the first naming scheme of each module.

    Returns:
        For each module `module`, `first` and `count` of its entries, and `styles`: naming scheme -> its entries' names.
    """
    found, first = [], 0
    for module, weight_map in maps.items():
        own = {weight_map.schemes[0].apply(name): name for rule in weight_map.rules for name in rule.hf}
        count = 0
        while first + count < len(names) and names[first + count] in own:
            count += 1
        entries = [own[name] for name in names[first:first + count]]
        found.append({"module": module, "first": first, "count": count,
                      "styles": {scheme.name: [scheme.apply(name) for name in entries]
                                 for scheme in weight_map.schemes}})
        first += count
    assert first == len(names), f"{len(names) - first} entries belong to no module, the first {names[first]}"
    return found


def plan_entries(maps: Mapping[str, WeightMap], schemes: Mapping[str, NamingScheme], shapes: Shapes,
                 wire_dtype: str) -> tuple[list[TensorMeta], list[str]]:
    """Make the chunk plan: every whole Hugging Face tensor once, in the order of modules and of their weight maps.

    The tensors of a layer follow each other, because an engine that loads layer by layer keeps a layer until it is
    complete. Shapes come from applying rules to meta tensors, which needs neither communication nor memory.

    Returns:
        The entries, and a line for each tensor without a rule, rule without a tensor, and other misfit.
    """
    found: list[TensorMeta] = []
    problems: list[str] = []
    options = ExportOptions(dtype=wire_dtype)
    for module, weight_map in maps.items():
        names = {rule.megatron for rule in weight_map.rules}
        problems += [f"no parameter: {module} {name} of the weight map is not in the model"
                     for name in names - shapes[module].keys()]
        problems += [f"no rule: {module} {name} {list(shape)} of the model is in no rule of its weight map"
                     for name, (shape, _) in shapes[module].items() if name not in names]
        planned, unfit = plan_rules(module, weight_map, schemes[module], shapes[module], options)
        problems += unfit
        for rule in planned:
            dtype = shapes[module][rule.rule.megatron][1]
            if rule.rule.keep_fp32 and dtype is not torch.float32:
                problems.append(f"dtype: {module} {rule.rule.megatron} must be float32 in the model, which has it in "
                                f"{dtype_name(dtype)}")
        kept = {info.name for rule in planned if rule.rule.keep_fp32 for info in rule.infos}
        found += by_layer([TensorMeta(info.name, dtype_name(info.dtype), info.shape, info.name in kept)
                           for info in infos_of(planned)])
    problems += [f"dtype: {entry.name} is {entry.dtype}, which does not travel: only {', '.join(DTYPE_BYTES)} do"
                 for entry in found if entry.dtype not in DTYPE_BYTES]
    problems += [f"twice: {name} is made by {count} rules" for name, count in
                 Counter(entry.name for entry in found).items() if count > 1]
    return found, problems


def by_layer(found: Sequence[TensorMeta]) -> list[TensorMeta]:
    """Sort entries so that those of a layer are together and layers of a stack ascend; keep the order otherwise.

    The first number in a name is that of the layer, so that experts stay in their layer.
    """
    layers = [_LAYER.match(entry.name) for entry in found]
    stacks: dict[str, int] = {}
    places = []
    for position, layer in enumerate(layers):
        places.append((position, 0) if layer is None else (stacks.setdefault(layer[1], position), int(layer[2])))
    return [found[position] for position in sorted(range(len(found)), key=places.__getitem__)]


def _rank_slices(pieces: Mapping[str, Sequence[ModelPiece]], built: BuiltModel, maps: Mapping[str, WeightMap],
                 schemes: Mapping[str, NamingScheme]) -> tuple[list[TensorSlice], list[str]]:
    """Return every box that this rank has, replicas included, in the order of the weight maps.

    Returns:
        The slices, and a line for each piece or parameter that makes no box.
    """
    slices: dict[tuple[str, Box], TensorSlice] = {}
    problems = []
    for module, wrapped in named_modules_of(built.model):
        rules = {rule.megatron: (number, rule) for number, rule in enumerate(maps[module].rules)}
        places = _Places(module, unwrap_model(wrapped))
        made: list[tuple[int, list[TensorSlice]]] = []
        for piece in pieces[module]:
            address = places.find(piece.tensor)
            if address is None:
                problems.append(f"a copy: {module} {piece.name} {list(piece.tensor.shape)} is a view of no parameter "
                                "or buffer of the model")
            elif piece.name in rules:  # `plan_entries` reports the others
                number, rule = rules[piece.name]
                try:
                    made.append((number, list(piece_slices(rule, schemes[module], piece, address))))
                except SHAPE_ERRORS as error:
                    problems.append(f"shape: {module} {piece.name} {list(piece.shape)}: {error}")
        problems += places.missing()
        for _, cut in sorted(made, key=lambda entry: entry[0]):
            for part in cut:
                # A rank may have a tensor twice, such as an embedding that is tied or shared by stages. One is enough.
                slices.setdefault((part.name, part.box), part)
    return list(slices.values()), problems


def piece_slices(rule: Rule, scheme: NamingScheme, piece: ModelPiece, address: Address) -> Iterator[TensorSlice]:
    """Cut a piece into boxes of Hugging Face tensors.

    `address` is that of the piece's first element, with the strides of the piece.

    Raises:
        ValueError: the piece is no set of boxes, because it is split on an axis that the conversion reshapes.
    """
    rule = fitted(rule, piece.shape)
    parts = hf_shapes(rule.convert, piece.shape)
    first_row = 0 if rule.rows is None else rule.rows.first
    segments = rule.convert.segments(piece.shape[0]) if piece.shape else None
    if segments is None:
        (name,), (part,) = rule.hf, parts
        strides = _reshaped_strides(piece, 0, part)
        box = Box.at((first_row, *(0,) * (len(part) - 1)) if part else (), part)
        yield TensorSlice(scheme.apply(name), box, Address(address.tensor, address.offset, strides))
        return
    first, end = piece.box.starts[0], piece.box.stops[0]
    for segment in segments:
        start, stop = max(first, segment.first), min(end, segment.first + segment.count)
        if start >= stop:
            continue
        # The axes after the rows are those that the rank holds or, if the conversion reshapes a row, all of the part's.
        row_shape = parts[segment.part][1:]
        if piece.shape[1:] == row_shape:
            rest, strides = Box(piece.box.starts[1:], piece.box.stops[1:]), piece.tensor.stride()
        else:
            rest, strides = Box.whole(row_shape), _reshaped_strides(piece, 1, (piece.tensor.shape[0], *row_shape))
        row = first_row + segment.part_first + start - segment.first
        box = Box((row, *rest.starts), (row + stop - start, *rest.stops))
        yield TensorSlice(scheme.apply(rule.hf[segment.part]), box,
                          Address(address.tensor, address.offset + (start - first) * strides[0], strides))


def _reshaped_strides(piece: ModelPiece, first_axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of the piece in another shape, which mixes the axes from `first_axis` on.

    Raises:
        ValueError: the piece is cut on one of these axes.
    """
    if piece.box.sizes[first_axis:] != piece.shape[first_axis:]:
        raise ValueError(f"becomes {list(shape)}, which a rank must hold whole; this one holds {piece.box}")
    return piece.tensor.view(shape).stride()


class _Places:
    """Finds the parameter or buffer of a module of which a tensor is a view.

    Parameters are often views of one large buffer, so the range of memory inside the storage decides.
    """

    def __init__(self, module: str, part: torch.nn.Module) -> None:
        self.module = module
        self._by_storage: dict[int, list[tuple[int, int, str, torch.Tensor]]] = defaultdict(list)
        self._left = {name: parameter.numel() for name, parameter in part.named_parameters()}
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if tensor.numel():
                view = view_of(tensor)
                self._by_storage[storage_key(tensor)].append((view.offset, view.end, name, tensor))
        for held in self._by_storage.values():
            held.sort(key=lambda entry: entry[:3])

    def find(self, tensor: torch.Tensor) -> Address | None:
        """Return the address of a tensor; None if it is no view of a parameter or buffer of the module."""
        held = self._by_storage.get(storage_key(tensor), [])
        view = view_of(tensor)
        index = bisect_right(held, view.offset, key=lambda entry: entry[0]) - 1
        if index < 0 or view.end > held[index][1] or tensor.dtype != held[index][3].dtype:
            return None
        start, _, name, _ = held[index]
        if name in self._left:
            self._left[name] -= tensor.numel()
        return Address(f"{self.module}/{name}", view.offset - start, view.strides)

    def missing(self) -> list[str]:
        """Return a line for each parameter of which some elements were not looked up."""
        return [f"not saved: {count} elements of {self.module}/{name} are in no sharded state dict"
                for name, count in self._left.items() if count > 0]


def _gather_distinct(grids: Grids, value: Any) -> list[tuple[Any, list[int]]]:
    """Gather a value of every rank. Return the distinct ones, each with its ranks. Equal ones are sent once."""
    digests = gather(grids, hashlib.sha256(repr(value).encode()).hexdigest())
    values = gather(grids, value if digests.index(digests[grids.rank]) == grids.rank else None)
    return [(values[digests.index(digest)], [rank for rank, other in enumerate(digests) if other == digest])
            for digest in dict.fromkeys(digests)]


class LiveTensors:
    """A rank's parameters and buffers by path, looked up again at every call. A refit looks up tens of thousands.

    A parameter may get new memory between two syncs. Its shape and strides must stay as they were, because addresses
    depend on them.
    """

    def __init__(self, built: BuiltModel) -> None:
        self._owners = {}
        for module, part in named_modules_of(built.model):
            for prefix, owner in unwrap_model(part).named_modules():
                parameters, buffers, _ = compat.module_tables(owner)
                for table in (parameters, buffers):
                    for name, tensor in table.items():
                        if tensor is not None:
                            path = f"{module}/{prefix}.{name}" if prefix else f"{module}/{name}"
                            self._owners[path] = table, name, tensor.shape, tensor.stride()

    def tensors(self, paths: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors at paths `MODULE/PATH`: the parameters and buffers themselves.

        Raises:
            RuntimeError: names a tensor that does not exist, whose layout has changed, or whose memory is offloaded.
        """
        found = {}
        for path in paths:
            if path not in self._owners:
                raise RuntimeError(f"{path} is not a tensor of this rank's model")
            table, name, shape, strides = self._owners[path]
            tensor = table.get(name)
            if tensor is None:
                raise RuntimeError(f"{path} was a tensor of this rank's model at set-up and is none now")
            if tensor.shape != shape or tensor.stride() != strides:
                raise RuntimeError(f"{path} has shape and strides {(tuple(tensor.shape), tensor.stride())}; at set-up "
                                   f"it had {(tuple(shape), strides)}")
            if not tensor.untyped_storage().nbytes() and tensor.numel():
                raise RuntimeError(f"{path} has no memory: its weights are offloaded")
            found[path] = tensor
        return found

    def view(self, address: Address, sizes: Sequence[int]) -> torch.Tensor:
        """Return the box of these sizes at an address, detached. Raises RuntimeError as `tensors`."""
        tensor = self.tensors([address.tensor])[address.tensor].detach()
        return torch.as_strided(tensor, tuple(sizes), address.strides, tensor.storage_offset() + address.offset)


class WholeTensors:
    """Whole tensors of a model whose ranks hold parts of them. Each iteration gathers their present values.

    Each holder sends its boxes of a tensor to the first rank of the world in one message, in the dtype of the wire.
    Iterating is collective over the world. Ranks other than the first get tensors on the meta device. The weights must
    be located. Whole tensors are put together on `device`, the model's.
    """

    def __init__(self, weights: ModelWeights, device: torch.device) -> None:
        self._weights, self._device = weights, device
        self.entries = weights.entries
        self._mine = {(part.name, part.box): part.address for part in weights.slices}

    def __iter__(self) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Yield every whole tensor. Only one is in memory at a time. Collective."""
        self._weights.prepare()
        for number, entry in enumerate(self.entries):
            # The boxes that each rank sends, the same choice on every rank. Replicas take turns, but what the first
            # rank has by itself is not sent.
            boxes: dict[int, list[Box]] = {}
            for held in self._weights.holders[entry.name]:
                rank = 0 if 0 in held.ranks else held.ranks[number % len(held.ranks)]
                boxes.setdefault(rank, []).append(held.box)
            yield entry, self._gathered(entry, boxes)

    @torch.no_grad()
    def _gathered(self, entry: TensorMeta, boxes: dict[int, list[Box]]) -> torch.Tensor:
        """Return the whole tensor on the first rank, and a meta tensor on the others."""
        rank, dtype = dist.get_rank(), torch_dtype(entry.dtype)
        if rank != 0:
            if rank in boxes:
                parts = [self._held(entry, box).to(dtype).flatten() for box in boxes[rank]]
                dist.send(_bytes(parts[0] if len(parts) == 1 else torch.cat(parts)), dst=0)
            return torch.empty(entry.shape, dtype=dtype, device="meta")
        whole = torch.empty(entry.shape, dtype=dtype, device=self._device)
        for sender, sent in sorted(boxes.items()):
            places = [whole[box.slices] for box in sent]
            if sender == 0:
                for place, box in zip(places, sent, strict=True):
                    place.copy_(self._held(entry, box))
            elif len(places) == 1 and places[0].is_contiguous():
                dist.recv(_bytes(places[0]), src=sender)
            else:
                packed = whole.new_empty(sum(box.numel for box in sent))
                dist.recv(_bytes(packed), src=sender)
                for place, part in zip(places, packed.split([box.numel for box in sent]), strict=True):
                    place.copy_(part.view(place.shape))
        return whole

    def _held(self, entry: TensorMeta, box: Box) -> torch.Tensor:
        return self._weights.live.view(self._mine[entry.name, box], box.sizes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's memory as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)
