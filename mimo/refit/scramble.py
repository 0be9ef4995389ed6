"""Scrambles or rounds the trainer's weights in a way that can be undone bit by bit, to verify refits.

A refit that leaves out a tensor, or exchanges two, hardly shows in the log-probs of a policy that has moved little
since the last refit, or whose tensors are alike. Scrambled weights have nothing in common with the real ones: the sign
of about half of the elements is changed, and matrices of an untrained model are scaled up so that each layer
contributes. Every tensor that an engine misses or confuses then changes its log-probs.

Two further scalings make rounding noise small compared with the effect of a fault. Embeddings become larger than what
the layers add to them, so that a layer's rounding errors hardly change what the next layers compute. Routers are scaled
so that few tokens are undecided between two experts.

Rounded weights show how far log-probs move if only the precision differs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from mimo.grid.groups import Grids
from mimo.model.build import BuiltModel, named_modules_of
from mimo.weights.match import ModelPiece, module_pieces

# Integer dtype of the same size, and number of mantissa bits. The exponent is above them, the sign is the highest bit.
FORMATS = {torch.bfloat16: (torch.int16, 7), torch.float16: (torch.int16, 10), torch.float32: (torch.int32, 23),
           torch.float64: (torch.int64, 52)}
# dtypes whose exponents (8 bits) have room for scaling, and the largest power of two to scale by.
SCALED_DTYPES = frozenset({torch.bfloat16, torch.float32})
EXPONENT_BITS = 8
MAX_POWER = 20
# Additional powers of two, which bring elements of an embedding, and router logits, to a size of 4 to 8.
EMBEDDING_POWER = 2
ROUTER_POWER = 2
# Number of elements that are changed at a time, so that masks of a large embedding take little memory.
BLOCK_ELEMENTS = 1 << 24


@contextmanager
def scrambled(built: BuiltModel, grids: Grids) -> Iterator[None]:
    """Context with scrambled weights, for refits and forward passes but no step. Collective.

    Ranks that hold the same part of a tensor scramble it alike: signs depend on a tensor's global name and place. The
    weights must not be offloaded.
    """
    with torch.no_grad():
        parts = _parts(built, grids)
        # Whether the output layer uses the weights of the embedding; every stage says so.
        is_tied = any(isinstance(module, LanguageModule) and module.share_embeddings_and_output_weights
                      for module in built.model.modules())
        powers = _powers(parts, is_tied)
        for part, power in zip(parts, powers, strict=True):
            _scale(part, power)
            _flip(part, "signs", part.sign_bit)
    try:
        yield
    finally:
        with torch.no_grad():
            for part, power in zip(parts, powers, strict=True):
                _flip(part, "signs", part.sign_bit)
                _scale(part, -power)


@contextmanager
def rounded(built: BuiltModel, grids: Grids, mantissa_bits: int) -> Iterator[None]:
    """Context in which about half of the weights differ in their last bit. Collective like `scrambled`.

    It is the last bit of a mantissa of `mantissa_bits`, such as 7 for bfloat16. The weights must not be offloaded.
    """
    with torch.no_grad():
        parts = _parts(built, grids)
        for part in parts:
            _flip(part, "rounding", max(0, part.mantissa_bits - mantissa_bits))
    try:
        yield
    finally:
        with torch.no_grad():
            for part in parts:
                _flip(part, "rounding", max(0, part.mantissa_bits - mantissa_bits))


@dataclass(frozen=True)
class _Part:
    """A part of one tensor on this rank.

    Attributes:
        name: name of the tensor, with its module.
        piece: place of the part in the tensor, and its values.
        words: the same memory as integers.
        mantissa_bits: number of mantissa bits of a value.
    """

    name: str
    piece: ModelPiece
    words: torch.Tensor
    mantissa_bits: int

    @property
    def sign_bit(self) -> int:
        return 8 * self.words.element_size() - 1


def _parts(built: BuiltModel, grids: Grids) -> list[_Part]:
    """Return every floating-point part of this rank's tensors, without scalars. Shared memory is listed once."""
    built.finish_gathers("a refit")
    found: dict[tuple[int, tuple[int, ...]], _Part] = {}
    for module, owner in named_modules_of(built.model):
        for piece in module_pieces(owner, grids.collections[module]):
            tensor = piece.tensor
            if tensor.dtype not in FORMATS or not tensor.numel() or not tensor.ndim:
                continue
            integers, mantissa_bits = FORMATS[tensor.dtype]
            # A tied embedding occurs twice. Changing its signs twice would restore them.
            found.setdefault((tensor.data_ptr(), tuple(tensor.shape)),
                             _Part(f"{module} {piece.name}", piece, tensor.view(integers), mantissa_bits))
    return list(found.values())


def _powers(parts: list[_Part], is_tied: bool) -> list[int]:
    """Return the power of two by which each part is scaled up so that inputs of size 1 give outputs of size 1 to 2.

    The power is 0 for parts that are not matrices. A tied embedding is scaled as an output layer.
    """
    matrices = [part for part in parts if part.piece.tensor.ndim > 1 and part.piece.tensor.dtype in SCALED_DTYPES]
    if not matrices:
        return [0] * len(parts)
    # Ranks that hold the same part find the same norm.
    norms = torch.stack([torch.linalg.vector_norm(part.piece.tensor, dtype=torch.float32) for part in matrices])
    powers = {}
    for part, norm in zip(matrices, norms.tolist(), strict=True):
        gain = norm / math.sqrt(part.piece.tensor.numel())
        further = 0
        if part.name.endswith("word_embeddings.weight") and not is_tied:
            further = EMBEDDING_POWER  # The elements of a row are the outputs.
        else:
            gain *= math.sqrt(math.prod(part.piece.shape[1:]))  # size of an output of the whole tensor
            if part.name.endswith("router.weight"):
                further = ROUTER_POWER
        if gain > 0 and math.isfinite(gain):
            powers[id(part)] = min(MAX_POWER, max(0, -math.frexp(gain)[1] + 1 + further))
    return [powers.get(id(part), 0) for part in parts]


def _scale(part: _Part, power: int) -> None:
    """Add to the exponents, which can be undone exactly. Zeros and subnormal numbers stay as they are."""
    for words, _ in _blocks(part) if power else ():
        exponents = words.bitwise_right_shift(part.mantissa_bits).bitwise_and_((1 << EXPONENT_BITS) - 1)
        words.add_(exponents.ne(0), alpha=power << part.mantissa_bits)


def _flip(part: _Part, purpose: str, bit: int) -> None:
    """Flip a bit of each element for which the random bits of its row, column and so on have an odd sum."""
    seed = hashlib.sha256(f"{purpose} {part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    # There is one random bit for each index on each axis of the whole tensor. This rank may hold a part of the tensor.
    axes = [torch.randint(0, 2, (size,), generator=generator, dtype=part.words.dtype)[held].to(part.words.device)
            for size, held in zip(part.piece.shape, part.piece.box.slices, strict=True)]
    # The integers are signed, so the value of the sign bit is negative.
    size = 8 * part.words.element_size()
    value = -(1 << bit) if bit == size - 1 else 1 << bit
    for words, rows in _blocks(part):
        mask = axes[0][rows].view(-1, *(1,) * (words.ndim - 1)).clone()
        for number, axis in enumerate(axes[1:], start=1):
            mask = mask.bitwise_xor(axis.view(-1, *(1,) * (words.ndim - 1 - number)))
        words.bitwise_xor_(mask.mul_(value))


def _blocks(part: _Part) -> Iterator[tuple[torch.Tensor, slice]]:
    """Yield the part's integers in blocks of rows, and the numbers of these rows."""
    words = part.words
    rows = max(1, BLOCK_ELEMENTS * words.shape[0] // words.numel())
    for first in range(0, words.shape[0], rows):
        held = slice(first, first + rows)
        yield words[held], held
