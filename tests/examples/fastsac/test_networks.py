"""Networks against plain computations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from examples.fastsac import EnvSpec, FastSACConfig
from examples.fastsac.networks import (
    Actor,
    TwinCritic,
    TwinLayerNorm,
    TwinLinear,
    bind_flat,
    project,
    tanh_normal_log_prob,
)
from tests.examples.fastsac._reference import naive_projection


def test_projection_equals_the_naive_loop(rng: torch.Generator) -> None:
    support = torch.linspace(-2.0, 3.0, 11)
    probs = torch.rand(64, 11, generator=rng).softmax(-1)
    # Inside, far outside on both sides, and exactly on the atoms.
    atoms = torch.randn(64, 11, generator=rng) * 4.0
    atoms[0] = support
    atoms[1] = -100.0
    atoms[2] = 100.0
    expected = naive_projection(probs, atoms, support)
    torch.testing.assert_close(project(probs, atoms, support).double(), expected, rtol=1e-5, atol=1e-6)


def test_projection_keeps_mass_and_mean_inside_the_support(rng: torch.Generator) -> None:
    support = torch.linspace(-1.0, 1.0, 21)
    probs = torch.rand(2, 40, 21, generator=rng).softmax(-1)
    atoms = torch.rand(2, 40, 21, generator=rng) * 1.8 - 0.9
    projected = project(probs, atoms, support)
    torch.testing.assert_close(projected.sum(-1), torch.ones(2, 40))
    torch.testing.assert_close(projected @ support, (probs * atoms).sum(-1), rtol=1e-4, atol=1e-5)


def test_projection_onto_the_same_atoms_changes_nothing(rng: torch.Generator) -> None:
    support = torch.linspace(-8.0, 8.0, 33)
    probs = torch.rand(16, 33, generator=rng).softmax(-1)
    torch.testing.assert_close(project(probs, support.expand(16, 33), support), probs, rtol=0.0, atol=0.0)


def test_log_prob_equals_the_transformed_distribution(rng: torch.Generator) -> None:
    mean = torch.randn(200, 3, dtype=torch.float64, generator=rng)
    log_std = torch.rand(200, 3, dtype=torch.float64, generator=rng) * 3.0 - 2.5
    noise = torch.randn(200, 3, dtype=torch.float64, generator=rng)
    pre_tanh = mean + log_std.exp() * noise
    reference = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    expected = reference.log_prob(reference.transforms[0](pre_tanh))
    torch.testing.assert_close(tanh_normal_log_prob(pre_tanh, noise, log_std), expected)


def test_log_prob_stays_finite_where_the_tanh_saturates() -> None:
    pre_tanh = torch.tensor([[40.0], [-40.0]])
    log_prob = tanh_normal_log_prob(pre_tanh, torch.zeros(2, 1), torch.zeros(2, 1))
    # log(1 - tanh(x)^2) tends to log 4 - 2|x|.
    expected = -0.5 * math.log(2 * math.pi) - (math.log(4.0) - 80.0)
    torch.testing.assert_close(log_prob, torch.full((2,), expected))


def test_actor_samples_with_the_log_prob_of_its_own_mean_and_std(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    torch.manual_seed(0)
    actor = Actor(spec, config)
    obs, noise = torch.randn(50, 3, generator=rng), torch.randn(50, 2, generator=rng)
    action, log_prob = actor.sample(obs, noise)
    mean, log_std = actor(obs)
    assert (config.log_std_min <= log_std).all()
    assert (log_std <= config.log_std_max).all()
    reference = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    torch.testing.assert_close(log_prob, reference.log_prob(reference.transforms[0](mean + log_std.exp() * noise)))
    torch.testing.assert_close(action, torch.tanh(mean + log_std.exp() * noise))


def test_actions_are_scaled_to_the_bounds_and_back(spec: EnvSpec, config: FastSACConfig) -> None:
    actor = Actor(spec, config)
    inner = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]])
    outer = actor.to_env(inner)
    torch.testing.assert_close(outer, torch.tensor([[-2.0, 0.0], [2.0, 1.0], [0.0, 0.75]]))
    torch.testing.assert_close(actor.from_env(outer), inner)


def test_twin_layers_equal_two_plain_networks(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    torch.manual_seed(1)
    critic = TwinCritic(spec, config)
    for parameter in critic.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=rng)
    obs, action = torch.randn(20, 3, generator=rng), torch.randn(20, 2, generator=rng)
    logits = critic(obs, action)
    for twin in range(2):
        plain = nn.Sequential(*(_plain(layer, twin) for layer in [*critic.trunk, critic.head]))
        expected = plain(torch.cat((obs, action), -1))
        torch.testing.assert_close(logits[twin], expected)
        torch.testing.assert_close(critic.q_values(logits)[twin], (expected.softmax(-1) * critic.support).sum(-1))


def _plain(layer: nn.Module, twin: int) -> nn.Module:
    if isinstance(layer, TwinLinear):
        linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
        linear.weight.data, linear.bias.data = layer.weight[twin].T, layer.bias[twin, 0]
        return linear
    if isinstance(layer, TwinLayerNorm):
        norm = nn.LayerNorm(layer.width)
        norm.weight.data, norm.bias.data = layer.weight[twin, 0], layer.bias[twin, 0]
        return norm
    return layer


@pytest.mark.parametrize("layer_norm", [True, False])
def test_layer_norm_precedes_every_hidden_activation(spec: EnvSpec, layer_norm: bool) -> None:
    config = FastSACConfig(hidden_sizes=(8, 8, 8), layer_norm=layer_norm)
    for network, norm in ((Actor(spec, config), nn.LayerNorm), (TwinCritic(spec, config), TwinLayerNorm)):
        layers = list(network.trunk)
        before = [layers[i - 1] for i, layer in enumerate(layers) if isinstance(layer, nn.SiLU)]
        assert len(before) == 3
        assert all(isinstance(layer, norm) is layer_norm for layer in before)


def test_layer_norm_bounds_the_values_of_far_observations(spec: EnvSpec) -> None:
    torch.manual_seed(0)
    with_norm = TwinCritic(spec, FastSACConfig(hidden_sizes=(16,)))
    far = torch.full((1, 3), 1e6)
    nearer = torch.full((1, 3), 1e5)
    action = torch.zeros(1, 2)
    torch.testing.assert_close(with_norm(far, action), with_norm(nearer, action), rtol=1e-3, atol=1e-3)


def test_bind_flat_writes_through_in_order(spec: EnvSpec, config: FastSACConfig) -> None:
    actor = Actor(spec, config).requires_grad_(False)
    before = copy.deepcopy(actor)
    flat = bind_flat(list(actor.parameters()))
    for bound, original in zip(actor.parameters(), before.parameters(), strict=True):
        assert torch.equal(bound, original)
    flat.copy_(torch.arange(flat.numel()))
    assert torch.equal(torch.cat([p.reshape(-1) for p in actor.parameters()]), torch.arange(flat.numel()).float())
