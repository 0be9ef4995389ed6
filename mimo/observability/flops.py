"""Floating-point operations of a training step, from the sizes of a model and the lengths of its sequences.

A product of `[m, k]` and `[k, n]` counts 2 m k n. Norms, activations, softmax, rotary positions, embeddings, losses,
dispatch of tokens to experts and the optimizer do not count. There are two counts:

- Model FLOPs are what the model needs, in the sense of Chowdhery et al. (PaLM, arXiv:2204.02311, appendix B). They
  leave out padding, recomputation, gradients that nobody needs, and the half of causal products that is masked: a
  sequence of n tokens has n^2 / 2 pairs. TFLOP/s and MFU are computed from these.
- Hardware FLOPs are what was computed. They include padding (in a packed row it is a sequence of its own) and
  recomputation. For layers in plain PyTorch they include whole score matrices, and the input gradients that linear
  layers always compute. This is what `torch.utils.flop_counter` counts, except that it does not see the convolution of
  Mamba layers. If tensor-parallel ranks all compute the same (router, patch embedding), one copy counts.

In training, a product with weights costs as much again as its forward pass for the gradients of the weights, unless
they are frozen, and as much again for the gradients of its input, if anything before it trains. A product of
activations costs twice its forward pass in addition, if gradients flow through it.

This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal, Protocol, runtime_checkable

from mimo.protocols import LANGUAGE

CHUNK = 128
"""Tokens of a chunk of the Mamba-2 scan (Megatron Core's MambaMixer)."""

Recompute = Literal["none", "selective", "full"]

# Dense bf16 TFLOP/s: half of what NVIDIA's data sheets give with sparsity. The first entry that is part of a device's
# name counts. SXM modules have no suffix.
PEAK_TFLOPS = (("GB200", 2500.0), ("B200", 2250.0), ("H200 NVL", 835.5), ("H200", 989.5), ("H100 NVL", 835.5),
               ("H100 PCIe", 756.0), ("H100", 989.5))


@dataclass(frozen=True)
class SequenceSums:
    """Sums over a set of sequences on which FLOPs depend; the sums of several sets add up.

    Attributes:
        sequences: number of sequences. An encoder's sequences are images.
        tokens: sum of their lengths. An image's length is in language tokens.
        squares: sum of the squared lengths.
        scan_tokens: tokens of the Mamba-2 scan: `tokens`, and the padding of the last chunk if it is computed.
        scan_squares: sum of the squared lengths of the chunks.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    scan_tokens: float = 0.0
    scan_squares: float = 0.0

    @classmethod
    def of(cls, lengths: Iterable[float]) -> SequenceSums:
        """Count sequences of these lengths, each with chunks of its own, the last of which may be shorter."""
        found = [float(length) for length in lengths]
        chunked = sum(length // CHUNK * CHUNK**2 + (length % CHUNK) ** 2 for length in found)
        tokens = sum(found)
        return cls(len(found), tokens, sum(length**2 for length in found), tokens, chunked)

    @classmethod
    def of_rows(cls, lengths: Iterable[Sequence[float]], row_length: int) -> SequenceSums:
        """Count rows padded to `row_length` tokens, as they are computed.

        Args:
            lengths: for each row, the lengths of the sequences packed in it. Padding is one of them. A row that is
                not packed has one sequence that fills it.
            row_length: tokens of a row. The scan cuts the row into chunks and pads the last one.
        """
        rows = [[float(length) for length in row] for row in lengths]
        assert all(sum(row) == row_length for row in rows), (rows, row_length)
        chunk = min(CHUNK, row_length)
        scan_tokens = len(rows) * -(-row_length // chunk) * chunk
        return cls(sum(map(len, rows)), len(rows) * row_length, sum(length**2 for row in rows for length in row),
                   scan_tokens, scan_tokens * chunk)

    def __add__(self, other: SequenceSums) -> SequenceSums:
        return SequenceSums(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))


NUM_SUMS = len(fields(SequenceSums))


@dataclass(frozen=True, kw_only=True)
class FlopComponent:
    """Part of a model whose products are trained alike, with the FLOPs of its forward pass.

    Attributes:
        name: name in tables, such as `layers` or `output layer`.
        module: `language` or an encoder's name: the grid that runs it, and whose sequences count.
        part: name for --freeze: an encoder's name, `projector` or `language`.
        linear: FLOPs per token of products with weights.
        convolution: FLOPs per token of the depthwise convolutions of Mamba layers.
        attention: FLOPs per pair of tokens of a sequence, for scores and weighted values of all heads and layers.
        causal: whether only half of those pairs are needed.
        scan: FLOPs per token of the products of the scan that are linear in the length.
        scan_pairs: FLOPs per pair of tokens of a chunk of the scan. Half of the pairs are needed.
        opens_part: whether it comes first in its part, so that training this part alone needs no gradient of its input.
        parallel_linear: whether its products with weights are Megatron's linear layers, which in plain PyTorch always
            compute the gradient of their input.
        recomputed: whether `--recompute full` computes it twice.
        makes_logits: whether `--logits-chunk-size` computes it twice.
        tokens_per_token: number of tokens inside that become one token outside, such as patches of an image token.
        extra_tokens: number of further tokens of each sequence, such as class and register tokens.
    """

    name: str
    module: str
    part: str
    linear: float = 0.0
    convolution: float = 0.0
    attention: float = 0.0
    causal: bool = False
    scan: float = 0.0
    scan_pairs: float = 0.0
    opens_part: bool = False
    parallel_linear: bool = True
    recomputed: bool = False
    makes_logits: bool = False
    tokens_per_token: float = 1.0
    extra_tokens: float = 0.0


@runtime_checkable
class FlopsProvider(Protocol):
    """A model provider that says what its model computes, for figures of FLOP/s."""

    def flop_components(self, config: Any) -> Sequence[FlopComponent]:
        """Return the components of every module, from input to output: encoders, then the language model."""
        ...


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a component's forward pass.

    Attributes:
        weights: products with weights, convolutions included.
        attention: scores and weighted values.
        scan: products of activations in the scan.
    """

    weights: float
    attention: float
    scan: float

    @property
    def total(self) -> float:
        return self.weights + self.attention + self.scan


def forward_flops(component: FlopComponent, sums: SequenceSums, *, whole: bool = False) -> ForwardFlops:
    """Compute the FLOPs of a component's forward pass over sequences.

    With `whole`, causal products are computed without skipping the masked half.
    """
    factor, extra = component.tokens_per_token, component.extra_tokens
    tokens = factor * sums.tokens + extra * sums.sequences
    squares = factor**2 * sums.squares + 2 * factor * extra * sums.tokens + extra**2 * sums.sequences
    needed = 1.0 if whole else 0.5
    return ForwardFlops(
        (component.linear + component.convolution) * tokens,
        component.attention * squares * (needed if component.causal else 1.0),
        component.scan * sums.scan_tokens + component.scan_pairs * sums.scan_squares * needed)


class FlopsCounter:
    """Computes the FLOPs of training a model.

    Args:
        components: the model, from input to output.
        frozen: parts that do not train.
        recompute: activation recomputation in the language model.
        recomputed_share: share of its layers that `full` recomputes.
        encoder_recompute: activation recomputation in the encoders, `none` or `full`.
        logits_again: whether the backward pass computes the logits again.
        fused: whether layers are Transformer Engine's; otherwise they are plain PyTorch.
    """

    def __init__(self, components: Sequence[FlopComponent], *, frozen: frozenset[str] = frozenset(),
                 recompute: Recompute = "none", recomputed_share: float = 1.0, encoder_recompute: Recompute = "none",
                 logits_again: bool = False, fused: bool = True) -> None:
        self.components = tuple(components)
        self.frozen, self.fused, self.logits_again = frozen, fused, logits_again
        self.recompute, self.recomputed_share, self.encoder_recompute = recompute, recomputed_share, encoder_recompute

    def model_flops(self, sums: Mapping[str, SequenceSums]) -> dict[str, float]:
        """Return the FLOPs that the model needs in a step, by module, forward and backward.

        The sequences of the language model exclude padding; those of an encoder are images.
        """
        return self._by_module(sums, hardware=False)

    def hardware_flops(self, sums: Mapping[str, SequenceSums]) -> dict[str, float]:
        """Return the FLOPs that are computed in a step, by module, forward and backward.

        The sequences of the language model include padding (`SequenceSums.of_rows`).
        """
        return self._by_module(sums, hardware=True)

    def forward_flops(self, sums: Mapping[str, SequenceSums]) -> float:
        """Return the FLOPs that the model needs in a forward pass, of all modules; `sums` as in `model_flops`."""
        return sum(forward_flops(component, sums[component.module]).total for component in self.components)

    def passes(self, module: str, sums: SequenceSums) -> list[tuple[FlopComponent, float, float]]:
        """Return the FLOPs that are computed in the forward and in the backward pass, for each component of a module.

        The sequences of the language model include padding.
        """
        found = []
        for number, component in enumerate(self.components):
            if component.module == module:
                forward = forward_flops(component, sums, whole=not self.fused).total
                found.append((component, forward, self._training(number, sums, True) - forward))
        return found

    def _by_module(self, sums: Mapping[str, SequenceSums], *, hardware: bool) -> dict[str, float]:
        found = dict.fromkeys((component.module for component in self.components), 0.0)
        for number, component in enumerate(self.components):
            found[component.module] += self._training(number, sums[component.module], hardware)
        return found

    def _training(self, number: int, sums: SequenceSums, hardware: bool) -> float:
        component = self.components[number]
        trains = component.part not in self.frozen
        # The language model sees the output of all modules, an encoder only its own input.
        before = any(other.part not in self.frozen for other in self.components[:number]
                     if component.module in (LANGUAGE, other.module))
        flows = before or (trains and not component.opens_part)
        plain = hardware and not self.fused
        forward = forward_flops(component, sums, whole=plain)
        if not trains and not before:
            return forward.total
        input_gradients = flows or (plain and component.parallel_linear)
        total = forward.total + forward.weights * (trains + input_gradients)
        total += 2 * (forward.attention + forward.scan)
        # Gradients pass through a frozen language model, but not through a frozen encoder, which recomputes nothing.
        language = component.module == LANGUAGE
        if hardware and (trains or language) and component.recomputed:
            again = {"none": 0.0, "selective": forward.attention, "full": forward.total}
            total += (again[self.recompute] * self.recomputed_share if language else again[self.encoder_recompute])
        if hardware and self.logits_again and component.makes_logits:
            total += forward.total
        return total


def peak_tflops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 TFLOP/s by its driver's name; None for unknown GPUs and for parts of a GPU."""
    if " MIG " in device_name:
        return None
    return next((peak for name, peak in PEAK_TFLOPS if name.lower() in device_name.lower()), None)
