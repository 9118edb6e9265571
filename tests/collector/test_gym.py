"""What GymCollector writes into a slot, and what misbehaving environments and policies get."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from numa_collectors.collector import CollectorContext, CollectorError, GymCollector, gym_schema
from numa_collectors.errors import SchemaMismatchError
from numa_collectors.rings import Field, Schema
from tests.collector.envs import Chain, Constant, Counter, Nested, slot_of

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


# -- what a slot holds --------------------------------------------------------------------------------------------------


def test_importing_the_package_imports_neither_gymnasium_nor_torch() -> None:
    code = "import sys, numa_collectors.collector; print([m for m in ('gymnasium', 'torch') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("mode", ["single", "NextStep", "Disabled"])
def test_observations_survive_an_environment_that_reuses_its_buffer(mode: str) -> None:
    slots = collect(Counter if mode == "single" else partial(counters, mode=mode), 14)
    real = [slot for slot in slots if "valid" not in slot or slot["valid"].all()]
    # Next step: steps 6 and 12 return the observations of the resets.
    assert len(real) == (12 if mode == "NextStep" else 14)
    for index, slot in enumerate(real):
        count = index % 5
        assert slot["obs"][:, 1].tolist() == [count, count]
        assert slot["next_obs"][:, 1].tolist() == [count + 1, count + 1]
        assert slot["reward"].tolist() == [count + 1, count + 1]
        assert slot["terminated"].tolist() == [count == 4] * 2
        # The id is drawn at reset: the last observation is of the same episode as the first.
        assert np.array_equal(slot["obs"][:, 0], slot["next_obs"][:, 0])
    assert len({float(slot["obs"][0, 0]) for slot in real}) == 3


def test_same_step_over_a_reused_buffer_is_an_error() -> None:
    with pytest.raises(CollectorError, match=r"environment 0 .*step 4, field 'next_obs': the environment reuses its"):
        collect(partial(counters, copying=False), 6)


def test_masked_row_repeats_the_last_transition() -> None:
    slots = collect(partial(counters, mode="NextStep"), 7)
    assert [slot["valid"].tolist() for slot in slots] == [[True, True]] * 5 + [[False, False], [True, True]]
    for name in slots[0]:
        assert name == "valid" or np.array_equal(slots[4][name], slots[5][name]), name
    assert slots[6]["obs"][:, 1].tolist() == [0, 0]


def test_policy_sees_what_the_slot_holds_and_may_write_to_it() -> None:
    class Scribbler(Constant):
        def act(self, obs: Any) -> np.ndarray:
            action = super().act(obs)
            obs[...] = -1.0
            return action

    policies: list[Scribbler] = []

    def make_policy(ctx: CollectorContext, spec: Any) -> Scribbler:
        policies.append(Scribbler(ctx, spec, 0.25))
        return policies[0]

    slots = collect(counters, 4, policy=make_policy)
    for slot, seen in zip(slots, policies[0].seen, strict=True):
        assert np.array_equal(slot["obs"], seen)
        assert seen.dtype == np.float32
    assert [slot["obs"][0, 1] for slot in slots] == [0, 1, 2, 3]
    assert all((slot["action"] == 0.25).all() for slot in slots)


def test_nested_observations_become_fields() -> None:
    spec = gym_schema(Nested)
    assert {field.name: (field.dtype, field.shape) for field in spec.schema.fields} == {
        "obs/camera": ("uint8", (4, 4, 3)),
        "obs/arm/0": ("float32", (2,)),
        "obs/arm/1": ("int64", ()),
        "obs/flags": ("int8", (3,)),
        "action": ("int64", (2,)),
        "reward": ("float32", ()),
        "terminated": ("bool", ()),
        "truncated": ("bool", ()),
        "next_obs/camera": ("uint8", (4, 4, 3)),
        "next_obs/arm/0": ("float32", (2,)),
        "next_obs/arm/1": ("int64", ()),
        "next_obs/flags": ("int8", (3,)),
    }
    slots = collect(Nested, 4)
    # The third step ends the episode: its next observation is the last one, and the next slot begins anew.
    assert slots[2]["truncated"].all()
    assert (slots[2]["next_obs/camera"] == 203).all()
    assert slots[2]["next_obs/arm/1"].tolist() == [3, 3]
    assert np.allclose(slots[2]["next_obs/arm/0"], 0.3)
    assert (slots[3]["obs/camera"] == 200).all()


def test_nested_policy_gets_a_mapping_by_path() -> None:
    keys: list[set[str]] = []

    class Policy(Constant):
        def act(self, obs: Any) -> np.ndarray:
            keys.append(set(obs))
            return super().act(obs)

    collect(Nested, 1, policy=Policy)
    assert keys == [{"camera", "arm/0", "arm/1", "flags"}]


@pytest.mark.parametrize(
    "space", [spaces.Text(5), spaces.Sequence(spaces.Discrete(3)), spaces.Dict({"a/b": spaces.Discrete(2)})]
)
def test_space_without_a_fixed_size_is_refused(space: spaces.Space[Any]) -> None:
    class Odd(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = space  # type: ignore[assignment]

    with pytest.raises(SchemaMismatchError, match="expected"):
        gym_schema(Odd)


def test_nested_action_space_is_refused() -> None:
    class Odd(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Dict({"a": spaces.Discrete(2)})  # type: ignore[assignment]

    with pytest.raises(SchemaMismatchError, match="action space: expected one Box"):
        gym_schema(Odd)


def test_float_dtype_can_be_kept() -> None:
    spec = gym_schema(Counter, float_dtype=None)
    assert spec.schema.fields[0] == Field("obs", "float64", (2,))
    ctx = CollectorContext()
    collector = GymCollector(ctx, Counter, Constant)
    slot = slot_of(spec.schema, 1)
    collector.collect(slot)
    assert slot["obs"].dtype == np.float64
    collector.close()


def test_episodes_are_counted_once() -> None:
    for mode in ("SameStep", "NextStep", "Disabled"):
        ctx = CollectorContext(num_envs=2, total_num_envs=2)
        collector = GymCollector(ctx, partial(counters, mode=mode), Constant)
        run(collector, 13, 2)
        episodes = collector.drain_episodes()
        assert [(e.return_, e.length) for e in episodes] == [(15.0, 5)] * 4, mode
        assert collector.drain_episodes() == []
        assert ctx.timer("env_step").total_ns > 0
        assert ctx.timer("act").num_calls == 13
        collector.close()


# -- bad environments and policies --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "reset",
            r"collector\[0\], environment 1 \(row 1 of its 2\): the environment raised RuntimeError in reset\(\)",
        ),
        (
            "step",
            r"environment 1 \(row 1 of its 2\): the environment raised RuntimeError in step\(\): cannot step \(step 2\)",
        ),
        ("shape", r"environment 1 \(row 1 of its 2\), field 'obs': step\(\) gave shape \(3,\), expected \(2,\)"),
        ("close", r"environment 1 \(row 1 of its 2\): the environment raised RuntimeError in close\(\)"),
    ],
)
def test_fault_names_environment_and_step(fault: str, message: str) -> None:
    with pytest.raises((CollectorError, SchemaMismatchError), match=message):
        collect([Counter, partial(Counter, fault=fault)], 5)


def test_fault_of_a_vector_environment_names_collector_and_step() -> None:
    message = r"collector\[0\], step 2: the environment raised RuntimeError in step\(\)"
    with pytest.raises(CollectorError, match=message) as info:
        collect(partial(counters, fault="step"), 5)
    assert (info.value.rank, info.value.step) == (0, 2)
    assert isinstance(info.value.__cause__, RuntimeError)


def test_wrong_shapes_of_a_vector_environment_are_not_broadcast() -> None:
    class Narrow(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            obs, reward, *rest = self.env.step(actions)
            return obs, reward[:1], *rest

    with pytest.raises(
        SchemaMismatchError, match=r"step 0, field 'reward': expected float32 \(2,\), got float64 \(1,\)"
    ):
        collect(lambda num_envs: Narrow(counters(num_envs)), 1)


def test_same_step_without_final_observation_is_an_error() -> None:
    class Forgetful(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            *rest, _ = self.env.step(actions)
            return *rest, {}

    with pytest.raises(CollectorError, match=r"environment 0 .* step 4: .*infos\['final_obs'\] does not hold"):
        collect(lambda num_envs: Forgetful(counters(num_envs)), 6)


def test_final_observations_as_one_batch_are_understood() -> None:
    class Batched(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions: Any) -> Any:
            *rest, infos = self.env.step(actions)
            if "final_obs" in infos:
                infos["final_obs"] = np.stack(infos["final_obs"])
            return *rest, infos

    slots = collect(lambda num_envs: Batched(counters(num_envs)), 5)
    assert slots[4]["next_obs"][:, 1].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda n: np.full((n, 1), np.nan, np.float32), r"environment 0 .*step 0, field 'action': the policy gave nan"),
        (
            lambda n: np.zeros((n, 2), np.float32),
            r"step 0, field 'action': expected float32 \(2, 1\), got float32 \(2, 2\)",
        ),
        (lambda n: np.zeros((n, 1), np.complex64), r"field 'action': expected float32 \(2, 1\), got complex64"),
        (lambda n: 1 / 0, r"step 0: the policy raised ZeroDivisionError in act\(\)"),
    ],
)
def test_bad_actions_never_reach_the_environment(action: Any, message: str) -> None:
    class Bad(Constant):
        def act(self, obs: Any) -> np.ndarray:
            result: np.ndarray = action(self.num_envs)
            return result

    envs = [Counter(), Counter()]
    with pytest.raises((CollectorError, SchemaMismatchError), match=message):
        collect([lambda: envs[0], lambda: envs[1]], 1, policy=Bad)
    assert envs[0].actions == envs[1].actions == []


def test_slot_of_another_schema_is_refused_before_anything_is_stepped() -> None:
    envs = [Counter()]
    collector = GymCollector(CollectorContext(), lambda: envs[0], Constant)
    fields = list(gym_schema(Counter).schema.fields)
    fields[0] = Field("obs", "float32", (3,))
    fields[1] = Field("action", "int64", (1,))
    fields[2] = Field("bonus", "float32", ())
    with pytest.raises(SchemaMismatchError) as info:
        collector.collect(slot_of(Schema(fields), 1))
    for part in (
        "'reward' is missing",
        "'bonus' is not one",
        "gives float32 (1, 2), the slot has float32 (1, 3)",
        "'action'",
    ):
        assert part in str(info.value)
    assert envs[0].actions == []
    collector.close()
