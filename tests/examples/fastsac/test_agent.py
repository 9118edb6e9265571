"""One update of the algorithm against plain computations."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from examples.fastsac import EnvSpec, FastSAC, FastSACConfig
from examples.fastsac.replay import Batch
from tests.examples.fastsac._reference import naive_projection


def make_batch(size: int, rng: torch.Generator) -> Batch:
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
    return Batch(
        obs=torch.randn(size, 3, generator=rng),
        action=low + (high - low) * torch.rand(size, 2, generator=rng),
        reward=torch.randn(size, generator=rng),
        next_obs=torch.randn(size, 3, generator=rng),
        discount=torch.where(torch.rand(size, generator=rng) < 0.3, 0.0, 0.9),
    )


@pytest.mark.parametrize("clipped", [True, False])
def test_critic_loss_equals_the_naive_one(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator, clipped: bool
) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, clipped_double_q=clipped), seed=3)
    for parameter in agent.target_critic.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=rng)
    batch, noise, alpha = make_batch(12, rng), torch.randn(12, 2, generator=rng), torch.tensor(0.3)
    action = agent.actor.from_env(batch.action)
    loss, q_mean = agent.critic_loss(batch.obs, action, batch.reward, batch.next_obs, batch.discount, noise, alpha)

    with torch.no_grad():
        next_action, log_prob = agent.actor.sample(batch.next_obs, noise)
        probs = agent.target_critic(batch.next_obs, next_action).softmax(-1)
        support = agent.critic.support
        expected, values = 0.0, []
        for row in range(12):
            means = [float(probs[twin, row] @ support) for twin in range(2)]
            for twin in range(2):
                chosen = means.index(min(means)) if clipped else twin
                atoms = [
                    float(batch.reward[row]) + float(batch.discount[row]) * (float(z) - 0.3 * float(log_prob[row]))
                    for z in support
                ]
                target = naive_projection(probs[chosen, row][None], torch.tensor(atoms)[None], support)[0]
                online = agent.critic(batch.obs[row : row + 1], action[row : row + 1])[twin, 0]
                expected -= float((target * torch.log_softmax(online, -1)).sum()) / 12
                values.append(float(online.softmax(-1) @ support))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert q_mean.item() == pytest.approx(sum(values) / len(values), abs=1e-5)


@pytest.mark.parametrize("clipped", [True, False])
def test_actor_loss_is_temperature_times_log_prob_less_value(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator, clipped: bool
) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, clipped_double_q=clipped), seed=3)
    obs, noise, alpha = torch.randn(9, 3, generator=rng), torch.randn(9, 2, generator=rng), torch.tensor(0.2)
    loss, _ = agent.actor_loss(obs, noise, alpha)
    with torch.no_grad():
        action, log_prob = agent.actor.sample(obs, noise)
        first, second = agent.critic.q_values(agent.critic(obs, action))
        value = torch.minimum(first, second) if clipped else (first + second) / 2
    torch.testing.assert_close(loss.detach(), (0.2 * log_prob - value).mean())


def test_temperature_gradient_and_target_entropy(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, target_entropy_ratio=0.75, alpha_init=0.2), seed=0)
    assert agent.target_entropy == -1.5
    assert agent.alpha.item() == pytest.approx(0.2)
    log_prob = torch.randn(64, generator=rng).requires_grad_()
    agent.alpha_loss(log_prob).backward()
    entropy = -log_prob.detach().mean().item()
    assert agent.log_alpha.grad is not None
    assert agent.log_alpha.grad.item() == pytest.approx(0.2 * (entropy - (-1.5)), rel=1e-5)
    assert log_prob.grad is None


@pytest.mark.parametrize(("ratio", "rises"), [(-5.0, True), (50.0, False)])
def test_temperature_rises_below_the_target_entropy_and_falls_above(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator, ratio: float, rises: bool
) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, target_entropy_ratio=ratio, policy_frequency=1), seed=0)
    before = agent.alpha.item()
    for _ in range(5):
        agent.update(make_batch(16, rng))
    assert (agent.alpha.item() > before) is rises


def test_actor_is_delayed_and_critics_are_not(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, policy_frequency=3), seed=0)
    actor_moved, critic_moved, reported = [], [], []
    for _ in range(6):
        actor, critic = copy.deepcopy(agent.actor), copy.deepcopy(agent.critic)
        reported.append("actor_loss" in agent.update(make_batch(8, rng)))
        actor_moved.append(not _same(actor, agent.actor))
        critic_moved.append(not _same(critic, agent.critic))
    assert actor_moved == reported == [False, False, True, False, False, True]
    assert all(critic_moved)


def test_actor_update_leaves_the_critics_alone(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, policy_frequency=1), seed=0)
    critic = copy.deepcopy(agent.critic)
    agent._update_actor(torch.randn(8, 3, generator=rng))
    assert _same(critic, agent.critic)
    assert all(parameter.grad is None for parameter in agent.critic.parameters())
    assert all(parameter.requires_grad for parameter in agent.critic.parameters())


def test_targets_follow_by_tau(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, tau=0.25, critic_lr=0.05), seed=0)
    before = copy.deepcopy(agent.target_critic)
    agent.update(make_batch(8, rng))
    for old, target, online in zip(
        before.parameters(), agent.target_critic.parameters(), agent.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * online.detach())


def test_observations_are_whitened_only_when_asked(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    obs = torch.randn(50, 3, generator=rng) * 4 + 2
    for wanted in (True, False):
        agent = FastSAC(spec, dataclasses.replace(config, normalize_obs=wanted), seed=0)
        agent.normalizer.merge(obs)
        changed = not torch.equal(agent.normalize(obs), obs)
        assert changed is wanted


def test_gradients_are_clipped_to_the_given_norm(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    agent = FastSAC(spec, dataclasses.replace(config, max_grad_norm=1e-3), seed=0)
    metrics = agent.update(make_batch(16, rng))
    assert metrics["critic_grad_norm"].item() > 1e-3
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in agent.critic.parameters() if p.grad is not None))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_critics_learn_the_returns_of_a_one_step_task(rng: torch.Generator) -> None:
    """Reward ``-|action - obs|`` that ends at once: the policy has to copy the observation."""
    spec = EnvSpec(obs_dim=1, action_low=(-1.0,), action_high=(1.0,))
    config = FastSACConfig(
        hidden_sizes=(32, 32), num_atoms=21, v_min=-2.0, v_max=0.5, critic_lr=3e-3, actor_lr=3e-3, alpha_init=0.01
    )
    agent = FastSAC(spec, config, seed=0)
    for _ in range(400):
        obs = torch.rand(128, 1, generator=rng) * 1.6 - 0.8
        action = torch.rand(128, 1, generator=rng) * 2 - 1
        reward = -(action - obs).abs().squeeze(-1)
        agent.update(Batch(obs, action, reward, obs, torch.zeros(128)))
    obs = torch.linspace(-0.7, 0.7, 15).unsqueeze(-1)
    with torch.no_grad():
        action = torch.tanh(agent.actor(agent.normalize(obs))[0])
    assert (action - obs).abs().mean().item() < 0.15


def test_seeds_decide_and_the_global_generator_is_left_alone(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    batch = make_batch(8, rng)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    losses = []
    for seed in (1, 1, 2):
        agent = FastSAC(spec, config, seed=seed)
        losses.append([agent.update(batch)["critic_loss"].item() for _ in range(3)])
    assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]


def test_bad_settings_are_refused() -> None:
    for bad in (
        {"gamma": 1.5},
        {"v_min": 1.0, "v_max": 1.0},
        {"hidden_sizes": ()},
        {"tau": 0.0},
        {"n_step": 0},
        {"batch_size": 0},
        {"num_atoms": 1},
        {"critic_lr": 0.0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            FastSACConfig(**bad)
    with pytest.raises(ValueError, match="finite action bounds"):
        EnvSpec(3, (-math.inf,), (math.inf,))
    with pytest.raises(ValueError, match="same length"):
        EnvSpec(3, (-1.0,), (1.0, 1.0))


def _same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
