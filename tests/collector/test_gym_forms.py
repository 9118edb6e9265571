"""What GymCollector makes of what it is given: forms of environments, seeds, real environments."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from numa_collectors.collector import CollectorContext, CollectorError, GymCollector, gym_schema
from numa_collectors.errors import ConfigError, SchemaMismatchError
from tests.collector.envs import Constant, Counter, chain_next, limited_chain, slot_of

Slot = dict[str, np.ndarray]


def run(collector: GymCollector, num_slots: int, num_envs: int) -> list[Slot]:
    slots = [slot_of(collector.spec.schema, num_envs) for _ in range(num_slots)]
    for slot in slots:
        collector.collect(slot)
    return slots


def collect(make_env: Any, num_slots: int, num_envs: int = 2, policy: Any = Constant, **ctx: Any) -> list[Slot]:
    context = CollectorContext(num_envs=num_envs, total_num_envs=num_envs, **ctx)
    collector = GymCollector(context, make_env, policy)
    try:
        return run(collector, num_slots, num_envs)
    finally:
        collector.close()


def counters(num_envs: int, mode: str = "SameStep", **options: Any) -> SyncVectorEnv:
    options = {"copying": mode == "SameStep", **options}
    return SyncVectorEnv([partial(Counter, **options)] * num_envs, copy=False, autoreset_mode=AutoresetMode(mode))


# -- what make_env may be -----------------------------------------------------------------------------------------------


def test_forms_of_make_env() -> None:
    def takes_ctx(context: CollectorContext) -> SyncVectorEnv:
        return SyncVectorEnv([limited_chain] * context.num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    def takes_ctx_by_name(*, length: int = 5, ctx: CollectorContext) -> Counter:
        assert ctx.cpus == (1, 2)
        return Counter(length)

    vector = partial(gymnasium.make_vec, "CartPole-v1", vectorization_mode="sync")
    for form in ("CartPole-v1", takes_ctx, takes_ctx_by_name, vector, [Counter, Counter, Counter]):
        assert collect(form, 2, num_envs=3, cpus=(1, 2))[1]["obs"].shape[0] == 3


def test_list_is_shared_out_by_offset() -> None:
    factories = [partial(Counter, length=n) for n in (2, 3, 4)]
    ctx = CollectorContext(rank=1, num_collectors=2, num_envs=1, env_offset=2, total_num_envs=3)
    collector = GymCollector(ctx, factories, Constant)
    run(collector, 4, 1)
    assert [e.length for e in collector.drain_episodes()] == [4]
    collector.close()
    with pytest.raises(ConfigError, match="one factory for each of the num_envs=3 environments of the run, got 2"):
        GymCollector(ctx, factories[:2], Constant)


def test_wrong_make_env_is_refused() -> None:
    ctx = CollectorContext(num_envs=2, total_num_envs=2)
    with pytest.raises(SchemaMismatchError, match=r"expected a vector environment of num_envs=2 .* got 3"):
        GymCollector(ctx, lambda: counters(3), Constant)
    with pytest.raises(ConfigError, match=r"gymnasium\.Env or a gymnasium\.vector\.VectorEnv, got dict"):
        GymCollector(ctx, dict, Constant)
    with pytest.raises(ConfigError, match="expected an environment id, a callable, or a list"):
        GymCollector(ctx, 7, Constant)
    with pytest.raises(CollectorError, match=r"collector\[0\]: making the environment raised ZeroDivisionError"):
        GymCollector(ctx, lambda: 1 / 0, Constant)


def test_autoreset_mode_must_be_known() -> None:
    def silent(num_envs: int) -> SyncVectorEnv:
        env = counters(num_envs)
        env.metadata = {}
        return env

    with pytest.raises(ConfigError, match="say how it resets with autoreset_mode="):
        gym_schema(silent)
    assert gym_schema(silent, autoreset_mode="SameStep").autoreset_mode == "SameStep"


def test_policy_that_fails_at_birth_leaves_no_environment_open() -> None:
    closed: list[bool] = []

    class Closing(Counter):
        def close(self) -> None:
            closed.append(True)

    def fail(ctx: CollectorContext, spec: Any) -> Constant:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        GymCollector(CollectorContext(), Closing, fail)
    assert closed == [True]


# -- seeds and random actions -------------------------------------------------------------------------------------------


def first_ids(**ctx: Any) -> list[float]:
    context = CollectorContext.for_rank(**ctx)
    collector = GymCollector(context, Counter, Constant)
    slot = run(collector, 1, context.num_envs)[0]
    collector.close()
    return [float(value) for value in slot["obs"][:, 0]]


def test_environments_of_a_run_are_seeded_apart() -> None:
    shape = {"num_collectors": 2, "total_num_envs": 4}
    ids = [
        *first_ids(rank=0, run_seed=5, **shape),
        *first_ids(rank=1, run_seed=5, **shape),
        *first_ids(rank=1, run_seed=5, generation=1, **shape),
        *first_ids(rank=0, run_seed=6, **shape),
    ]
    assert len(set(ids)) == 8
    assert first_ids(rank=1, run_seed=5, **shape) == ids[2:4]
    # Collector 0's first environment has the run's seed itself.
    assert ids[0] == pytest.approx(np.random.default_rng(5).random())
    # More collectors leave collector 1 as it was.
    assert first_ids(rank=1, run_seed=5, num_collectors=4, total_num_envs=8) == ids[2:4]


def test_random_actions_until_learning_starts() -> None:
    def actions(**ctx: Any) -> list[float]:
        slots = collect(partial(Counter, limit=3.0), 6, num_envs=1, learning_starts_slots=4, **ctx)
        return [float(slot["action"][0, 0]) for slot in slots]

    drawn = actions(seed=1)
    assert drawn[4:] == [0.0, 0.0]
    assert len(set(drawn[:4])) == 4
    assert all(abs(action) <= 3.0 for action in drawn)
    assert max(abs(action) for action in actions(seed=1) + actions(seed=2) + actions(seed=3)) > 1.0
    assert actions(seed=1) == drawn != actions(seed=2)
    # A restarted collector goes on counting.
    assert actions(seed=1, start_slot=3)[1:] == [0.0] * 5


# -- real environments --------------------------------------------------------------------------------------------------


def test_cartpole_in_next_step_mode_is_continuous_within_episodes() -> None:
    def make(num_envs: int) -> SyncVectorEnv:
        return SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * num_envs)

    spec = gym_schema(make)
    assert (spec.autoreset_mode, spec.max_episode_steps, spec.num_obs) == ("NextStep", 500, 4)
    slots = collect(make, 60, num_envs=3, learning_starts_slots=60)
    joined = {name: np.stack([slot[name] for slot in slots]) for name in slots[0]}
    both = joined["valid"][:-1] & joined["valid"][1:]
    assert np.array_equal(joined["next_obs"][:-1][both], joined["obs"][1:][both])
    assert joined["terminated"][joined["valid"]].sum() >= 3
    # No step is lost or doubled: an invalid row after each end.
    ended = (joined["terminated"] | joined["truncated"]) & joined["valid"]
    assert np.array_equal(ended[:-1], ~joined["valid"][1:])


def test_mujoco_in_same_step_mode(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log where it runs
    make = partial(gymnasium.make, "HalfCheetah-v5", max_episode_steps=8)
    spec = gym_schema(make)
    assert (spec.autoreset_mode, spec.max_episode_steps, spec.num_obs) == ("SameStep", 8, 17)
    slots = collect(make, 17, learning_starts_slots=17)
    ends = [index for index, slot in enumerate(slots) if slot["truncated"].all()]
    assert ends == [7, 15]
    assert not any(slot["terminated"].any() for slot in slots)
    for index in range(16):
        same = np.array_equal(slots[index]["next_obs"], slots[index + 1]["obs"])
        assert same == (index not in ends)
    # The buffer holds what the environment was given: replaying the actions gives the same rewards and observations.
    replay = make()
    obs, _ = replay.reset(seed=0)
    for slot in slots[:8]:
        assert np.array_equal(slot["obs"][0], obs.astype(np.float32))
        obs, reward, _, truncated, _ = replay.step(slot["action"][0].astype(np.float32))
        assert slot["reward"][0] == pytest.approx(reward, rel=1e-6)
    assert truncated
    assert np.array_equal(slots[7]["next_obs"][0], obs.astype(np.float32))
    replay.close()


def test_processes_of_an_async_vector_environment_give_what_sync_gives() -> None:
    def parallel(num_envs: int) -> AsyncVectorEnv:
        return AsyncVectorEnv([limited_chain] * num_envs, shared_memory=False, autoreset_mode=AutoresetMode.DISABLED)

    for one, other in zip(collect(parallel, 30), collect(limited_chain, 30), strict=True):
        for name in one:
            assert np.array_equal(one[name], other[name]), name


def test_vector_environment_of_its_own_gets_one_seed() -> None:
    make = partial(gymnasium.make_vec, "CartPole-v1", vectorization_mode="vector_entry_point")
    first, again = collect(make, 3, seed=4), collect(make, 3, seed=4)
    assert all(np.array_equal(a["obs"], b["obs"]) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0]["obs"], collect(make, 1, seed=5)[0]["obs"])
    assert gym_schema(chain_next).schema.names[-1] == "valid"
