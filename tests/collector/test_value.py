"""The proof of the autoreset handling: values learned from the slots are those of the closed form, and wrong handling shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numa_collectors.collector import CollectorContext, GymCollector, gym_schema
from tests.collector.envs import (
    DISCOUNT,
    Constant,
    chain_disabled,
    chain_next,
    chain_values,
    chain_vector,
    limited_chain,
    slot_of,
)

NUM_ENVS, NUM_SLOTS = 5, 120
FORMS = {"single": limited_chain, "same": chain_vector, "next": chain_next, "disabled": chain_disabled}

Batch = dict[str, np.ndarray]


def gather(make_env: Any) -> Batch:
    """Return what NUM_SLOTS slots hold, ``(slots, envs, ...)`` each."""
    ctx = CollectorContext(num_envs=NUM_ENVS, total_num_envs=NUM_ENVS, seed=3)
    schema = gym_schema(make_env).schema
    collector = GymCollector(ctx, make_env, Constant)
    slots = []
    for _ in range(NUM_SLOTS):
        slot = slot_of(schema, NUM_ENVS)
        collector.collect(slot)
        slots.append(slot)
    collector.close()
    return {name: np.stack([slot[name] for slot in slots]) for name in slots[0]}


def learn(batch: Batch) -> np.ndarray:
    """Return what TD(0) converges to, by least squares, with the target r + discount (1 - terminated) V(next_obs)."""
    keep = batch["valid"].reshape(-1) if "valid" in batch else np.ones(batch["reward"].size, bool)
    flat = {name: array.reshape(-1, *array.shape[2:])[keep].astype(float) for name, array in batch.items()}
    successor = flat["next_obs"] * (1 - flat["terminated"])[:, None]
    return np.linalg.solve(flat["obs"].T @ (flat["obs"] - DISCOUNT * successor), flat["obs"].T @ flat["reward"])


def error(values: np.ndarray) -> float:
    """Return the largest relative error of any state's value."""
    return float(np.max(np.abs(values / chain_values() - 1)))


@pytest.mark.parametrize("form", FORMS)
def test_value_on_a_time_limit_is_the_closed_form(form: str) -> None:
    batch = gather(FORMS[form])
    assert batch["terminated"].any()
    assert batch["truncated"].any()
    assert error(learn(batch)) < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_truncation_taken_for_termination_fails(form: str) -> None:
    batch = gather(FORMS[form])
    batch["terminated"] |= batch["truncated"]
    assert error(learn(batch)) > 0.2


@pytest.mark.parametrize("form", FORMS)
def test_bootstrap_from_the_reset_fails(form: str) -> None:
    batch = gather(FORMS[form])
    reset_obs = np.concatenate([batch["obs"][1:], batch["next_obs"][-1:]])
    if form == "next":  # there the observation of the reset follows one step later
        reset_obs = np.concatenate([batch["obs"][2:], batch["next_obs"][-2:]])
    batch["next_obs"] = np.where(batch["truncated"][..., None], reset_obs, batch["next_obs"])
    assert error(learn(batch)) > 0.2


def test_fake_transitions_taken_for_real_fail() -> None:
    batch = gather(chain_next)
    fake = ~batch["valid"]
    assert 0 < fake.sum() < fake.size / 5
    # As the environment gave them: from the last observation to the reset's, without reward.
    step, row = np.nonzero(fake)
    keep = step < NUM_SLOTS - 1
    step, row = step[keep], row[keep]
    planted = {name: array.copy() for name, array in batch.items() if name != "valid"}
    planted["obs"][step, row] = batch["next_obs"][step, row]
    planted["next_obs"][step, row] = batch["obs"][step + 1, row]
    planted["reward"][step, row] = 0.0
    planted["terminated"][step, row] = False
    assert error(learn(planted)) > 0.2


def test_a_learner_that_forgets_the_mask_is_not_misled() -> None:
    batch = gather(chain_next)
    del batch["valid"]
    # The repeated last transition of an episode shifts how often states are seen, not what follows them.
    step, row = np.nonzero(batch["terminated"])
    assert np.array_equal(batch["obs"][step, row].argmax(-1), np.full(len(step), chain_values().size - 1))
    assert error(learn(batch)) < 0.01


def test_all_forms_see_the_same_episodes() -> None:
    same, disabled = gather(chain_vector), gather(chain_disabled)
    single = gather(limited_chain)
    for name in same:
        assert np.array_equal(same[name], disabled[name]), name
        assert np.array_equal(same[name], single[name]), name
