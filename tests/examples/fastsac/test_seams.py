"""The two seams to the library: learner and policy."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch

from examples.fastsac import EnvSpec, FastSACConfig, FastSACLearner, FastSACPolicy, policy_weights
from tests.examples.fastsac._reference import transitions


def make_learner(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator, num_slots: int = 20) -> FastSACLearner:
    learner = FastSACLearner(spec, config, num_envs=(2, 1), seed=4)
    learner.ingest(0, transitions(num_slots, 2, generator=rng))
    learner.ingest(1, transitions(num_slots, 1, generator=rng))
    return learner


def as_arrays(weights: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in weights.items()}


def test_policy_acts_exactly_as_the_learners_networks(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    learner = make_learner(spec, config, rng)
    learner.update(6)
    policy = FastSACPolicy(spec, config, seed=99, deterministic=True)
    sent = as_arrays(learner.weights())
    policy.load_weights(sent, version=7)
    for array in sent.values():
        array.fill(np.nan)  # the caller may reuse its memory
    assert policy.version == 7
    held = policy_weights(policy.actor, policy.normalizer)
    for name, tensor in learner.weights().items():
        assert np.array_equal(held[name].numpy().view(np.int32), tensor.numpy().view(np.int32)), name
    obs = torch.randn(11, 3, generator=rng)
    with torch.no_grad():
        mean, _ = learner.agent.actor(learner.agent.normalize(obs))
        expected = learner.agent.actor.to_env(torch.tanh(mean)).numpy()
    action = policy.act(obs.numpy())
    assert action.dtype == np.float32
    assert np.array_equal(action, expected)


def test_loading_writes_into_the_bound_parameters(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    learner = make_learner(spec, config, rng)
    policy = FastSACPolicy(spec, config)
    addresses = [p.data_ptr() for p in policy.actor.parameters()] + [policy.normalizer.mean.data_ptr()]
    policy.load_weights(as_arrays(learner.weights()), version=1)
    assert addresses == [p.data_ptr() for p in policy.actor.parameters()] + [policy.normalizer.mean.data_ptr()]
    assert (
        len(
            {tensor.untyped_storage().data_ptr() for tensor in policy_weights(policy.actor, policy.normalizer).values()}
        )
        == 1
    )


def test_policy_takes_read_only_float64_observations_and_weights(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    learner = make_learner(spec, config, rng)
    weights = as_arrays(learner.weights())
    obs = np.ones((4, 3))
    for array in (obs, *weights.values()):
        array.flags.writeable = False
    policy = FastSACPolicy(spec, config)
    policy.load_weights(weights, version=1)
    assert policy.act(obs).shape == (4, 2)


def test_sampled_actions_follow_the_policys_distribution(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    policy = FastSACPolicy(spec, config, seed=1)
    obs = np.repeat(np.array([[0.5, -1.0, 2.0]], np.float32), 20_000, axis=0)
    inner = policy.actor.from_env(torch.from_numpy(policy.act(obs))).clamp(-1 + 1e-6, 1 - 1e-6)
    mean, log_std = policy.actor(policy.normalizer(torch.from_numpy(obs[:1])))
    torch.testing.assert_close(torch.atanh(inner).mean(0), mean[0], atol=0.03, rtol=0.0)
    torch.testing.assert_close(torch.atanh(inner).std(0), log_std[0].exp(), atol=0.03, rtol=0.0)


def test_actions_stay_inside_the_bounds(spec: EnvSpec, config: FastSACConfig) -> None:
    action = FastSACPolicy(spec, config, seed=1).act(np.random.default_rng(0).normal(size=(500, 3)) * 100)
    assert (action >= np.array([-2.0, 0.0])).all()
    assert (action <= np.array([2.0, 1.0])).all()


def test_policies_of_two_seeds_differ_and_of_one_agree(spec: EnvSpec, config: FastSACConfig) -> None:
    obs = np.zeros((5, 3), np.float32)
    actions = [FastSACPolicy(spec, config, seed=seed).act(obs) for seed in (1, 1, 2)]
    assert np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[0], actions[2])


def test_weights_that_do_not_fit_are_refused_whole(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    policy = FastSACPolicy(spec, config, deterministic=True)
    obs = np.ones((2, 3), np.float32)
    before = policy.act(obs)
    other = FastSACLearner(spec, dataclasses.replace(config, hidden_sizes=(16, 9)), num_envs=(1,))
    with pytest.raises(ValueError, match=r"expected .*head.*same EnvSpec"):
        policy.load_weights(as_arrays(other.weights()), version=1)
    missing = as_arrays(make_learner(spec, config, rng).weights())
    del missing["normalizer.mean"]
    with pytest.raises(ValueError, match=r"normalizer\.mean"):
        policy.load_weights(missing, version=1)
    assert np.array_equal(policy.act(obs), before)
    assert policy.version == 0


def test_names_shapes_and_order_of_the_weights_do_not_change(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    fresh = FastSACLearner(spec, config, num_envs=(1,)).weights()
    learner = make_learner(spec, config, rng)
    learner.update(3)
    assert [(n, t.shape, t.dtype) for n, t in fresh.items()] == [
        (n, t.shape, t.dtype) for n, t in learner.weights().items()
    ]
    assert all(t.dtype is torch.float32 and t.is_contiguous() for t in fresh.values())


def test_normaliser_sees_every_observation_once(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    learner = FastSACLearner(spec, config, num_envs=(2, 1), seed=4)
    batches = [(0, transitions(6, 2, generator=rng)), (1, transitions(9, 1, generator=rng))]
    for rank, batch in batches:
        learner.ingest(rank, batch)
    learner.update(2)
    everything = torch.cat([batch["obs"].reshape(-1, 3) for _, batch in batches]).double()
    weights = learner.weights()
    torch.testing.assert_close(weights["normalizer.mean"].double(), everything.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        weights["normalizer.std"].double(), everything.std(0, correction=0), rtol=1e-6, atol=1e-6
    )


def test_update_makes_exactly_the_updates_asked_for(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator) -> None:
    learner = make_learner(spec, config, rng)
    learner.update(3)
    metrics = learner.update(4)
    assert learner.agent.num_updates == 7
    assert {"critic_loss", "actor_loss", "alpha", "entropy"} <= metrics.keys()
    assert all(type(value) is float for value in metrics.values())
    # policy_frequency is 2, so this one leaves the actor alone: its scalars are those last seen.
    alone = learner.update(1) if learner.agent.num_updates % 2 == 0 else {}
    assert alone == {} or alone["actor_loss"] == metrics["actor_loss"]


def test_ready_and_num_transitions_count_what_is_held(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    learner = FastSACLearner(spec, config, num_envs=(2, 1))
    assert not learner.ready
    with pytest.raises(ValueError, match="no transition yet"):
        learner.update(1)
    learner.ingest(0, transitions(15, 2, generator=rng))
    assert learner.num_transitions == 30
    assert not learner.ready
    learner.ingest(1, transitions(2, 1, generator=rng))
    assert learner.num_transitions == 32
    assert learner.ready


@pytest.mark.parametrize("n_step", [1, 3])
def test_state_goes_on_bit_for_bit(spec: EnvSpec, config: FastSACConfig, rng: torch.Generator, n_step: int) -> None:
    config = dataclasses.replace(config, save_replay=True, n_step=n_step)
    learner = make_learner(spec, config, rng)
    learner.update(5)
    resumed = FastSACLearner(spec, config, num_envs=(2, 1), seed=123)
    resumed.load_state_dict(_through_a_file(learner.state_dict()))
    more = transitions(3, 2, generator=rng)
    for each in (learner, resumed):
        each.ingest(0, more)
    assert learner.update(4) == resumed.update(4)
    for (name, tensor), (other_name, other) in zip(
        _flatten(learner.state_dict()), _flatten(resumed.state_dict()), strict=True
    ):
        assert name == other_name
        same = torch.equal(tensor, other) if isinstance(tensor, torch.Tensor) else tensor == other
        assert same, name


def test_without_a_saved_memory_a_resumed_learner_begins_empty(
    spec: EnvSpec, config: FastSACConfig, rng: torch.Generator
) -> None:
    learner = make_learner(spec, config, rng)
    learner.update(4)
    state = _through_a_file(learner.state_dict())
    assert "replay" not in state
    # The number of collectors may change.
    resumed = FastSACLearner(spec, config, num_envs=(1, 1, 1, 1), seed=5)
    resumed.load_state_dict(state)
    assert resumed.num_transitions == 0
    assert not resumed.ready
    assert resumed.agent.num_updates == 4
    for name, tensor in learner.weights().items():
        assert torch.equal(resumed.weights()[name], tensor)


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def _flatten(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _flatten(inner, f"{name}/{key}")]
    if isinstance(value, list | tuple):
        return [leaf for index, inner in enumerate(value) for leaf in _flatten(inner, f"{name}/{index}")]
    return [(name, value)]
