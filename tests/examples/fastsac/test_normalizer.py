"""The observation normaliser against numpy on everything at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.fastsac.normalizer import RunningNormalizer


@pytest.mark.parametrize("sizes", [[100], [1, 99], [1, 1, 1, 50, 47], [0, 100]])
def test_merged_batches_equal_numpy_on_the_concatenation(sizes: list[int], rng: torch.Generator) -> None:
    # A mean far from 0 is where sums of squares lose their digits.
    data = torch.randn(sum(sizes), 4, generator=rng) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + torch.tensor(
        [0.0, -5.0, 1000.0, 1.0]
    )
    normalizer = RunningNormalizer(4, eps=0.01)
    for part in data.split(sizes):
        normalizer.merge(part)
    array = data.numpy().astype(np.float64)
    np.testing.assert_allclose(normalizer.mean.numpy(), array.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(normalizer.std.numpy(), array.std(0), rtol=1e-6, atol=1e-6)
    assert int(normalizer.count) == sum(sizes)
    expected = (array - array.mean(0)) / (array.std(0) + 0.01)
    np.testing.assert_allclose(normalizer(data).numpy(), expected, rtol=1e-3, atol=1e-3)


def test_the_size_of_the_batches_does_not_matter(rng: torch.Generator) -> None:
    data = torch.randn(60, 3, generator=rng) * 7.3 + 1234.5
    whole, singly = RunningNormalizer(3), RunningNormalizer(3)
    whole.merge(data)
    for row in data:
        singly.merge(row)
    torch.testing.assert_close(singly.mean64, whole.mean64, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(singly.sum_of_squares64, whole.sum_of_squares64, rtol=1e-12, atol=0.0)


def test_leading_axes_do_not_matter(rng: torch.Generator) -> None:
    data = torch.randn(5, 6, 3, generator=rng)
    flat, shaped = RunningNormalizer(3), RunningNormalizer(3)
    flat.merge(data.reshape(30, 3))
    shaped.merge(data)
    assert torch.equal(flat.mean, shaped.mean)
    assert torch.equal(flat.std, shaped.std)


def test_before_any_data_it_leaves_observations_nearly_alone() -> None:
    obs = torch.tensor([[1.0, -2.0]])
    torch.testing.assert_close(RunningNormalizer(2, eps=1e-2)(obs), obs / 1.01)


def test_a_constant_feature_stays_finite() -> None:
    normalizer = RunningNormalizer(1)
    normalizer.merge(torch.full((50, 1), 3.0))
    assert torch.equal(normalizer(torch.full((2, 1), 3.0)), torch.zeros(2, 1))


def test_many_small_batches_keep_their_precision() -> None:
    """With float32 sums the variance of a far mean drifts; merged in float64 it does not."""
    normalizer = RunningNormalizer(1)
    pair = torch.tensor([[4999.0], [5001.0]])
    for _ in range(2000):
        normalizer.merge(pair)
    assert normalizer.mean.item() == 5000.0
    assert normalizer.std.item() == pytest.approx(1.0, rel=1e-9)
