"""Small shapes that every test of FastSAC shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples.fastsac import EnvSpec, FastSACConfig


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On matrices of this size a second OpenMP thread only spins, and on a busy machine it costs a hundred times."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def spec() -> EnvSpec:
    return EnvSpec(obs_dim=3, action_low=(-2.0, 0.0), action_high=(2.0, 1.0))


@pytest.fixture
def config() -> FastSACConfig:
    return FastSACConfig(
        hidden_sizes=(16, 8),
        num_atoms=11,
        v_min=-5.0,
        v_max=5.0,
        batch_size=32,
        replay_capacity=600,
        policy_frequency=2,
    )


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)
