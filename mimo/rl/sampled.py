"""Which positions of a microbatch predict sampled tokens, and sums over sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class SampledTokens:
    """The `t` positions of whole sequences, one behind the other or row by row, padding among them.

    Attributes:
        mask: bool `[t]`, True where the position predicts a token that the policy sampled.
        sequence_ids: int64 `[t]`, number of the sequence of each position, below `num_sequences`.
        num_sequences: of the microbatch; one without a sampled token, such as padding, counts nowhere.
    """

    mask: torch.Tensor
    sequence_ids: torch.Tensor
    num_sequences: int

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `[t]`, 0 where no token was sampled: whatever stands there, NaN too, has no effect or gradient."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def sequence_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`."""
        sums = values.new_zeros(self.num_sequences)
        return sums.index_add(0, self.sequence_ids, self.masked(values))

    def lengths(self) -> torch.Tensor:
        """Sampled tokens of each sequence, float32 `[num_sequences]`."""
        return self.sequence_sums(torch.ones_like(self.mask, dtype=torch.float32))

    def sequence_means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `values` `[t]` over the sampled tokens of each sequence, `[num_sequences]`; 0 where there is none."""
        return self.sequence_sums(values) / self.lengths().clamp(min=1)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """One value a sequence, `[num_sequences]`, at each of its positions, `[t]`."""
        return values[self.sequence_ids]
