"""Running mean and standard deviation of observations."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RunningNormalizer(nn.Module):
    """Whitens observations with the statistics of everything that it was shown.

    Batches are merged exactly (Chan, Golub and LeVeque 1983), in float64, so that the order and the size
    of batches do not matter. ``mean`` and ``std`` are the float32 values that ``forward`` uses and that
    travel to the collectors; they hold no trace of a batch that was merged only in part.

    Args:
        dim: O, length of an observation.
        eps: added to the standard deviation, so that a constant feature stays near 0.
    """

    mean: Tensor
    std: Tensor
    mean64: Tensor
    sum_of_squares64: Tensor
    count: Tensor

    def __init__(self, dim: int, *, eps: float = 1e-2) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("std", torch.ones(dim))
        self.register_buffer("mean64", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("sum_of_squares64", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, obs: Tensor) -> Tensor:
        """Return whitened observations (..., O)."""
        return (obs - self.mean) / (self.std + self.eps)

    @torch.no_grad()
    def merge(self, obs: Tensor) -> None:
        """Add observations (..., O) to the statistics."""
        rows = obs.reshape(-1, obs.shape[-1]).double()
        num_rows = rows.shape[0]
        if num_rows == 0:
            return
        # Integer tensors divide in float32.
        before = self.count.double()
        total = before + num_rows
        batch_mean = rows.mean(0)
        delta = batch_mean - self.mean64
        self.sum_of_squares64 += (rows - batch_mean).square().sum(0) + delta.square() * (before * num_rows / total)
        self.mean64 += delta * (num_rows / total)
        self.count += num_rows
        self.mean.copy_(self.mean64)
        self.std.copy_((self.sum_of_squares64 / total).sqrt())
