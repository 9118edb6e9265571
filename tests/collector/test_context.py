"""The context, shards, seeds and what may be sent to a process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from numa_collectors.collector import (
    CollectorContext,
    CollectorError,
    NonFiniteError,
    Policy,
    check_picklable,
    gym_schema,
    shard,
)
from numa_collectors.errors import ConfigError
from tests.collector.envs import Constant, Counter, Numbered


def test_uneven_shards_cover_everything_once() -> None:
    assert [shard(7, 3, rank) for rank in range(3)] == [(0, 3), (3, 2), (5, 2)]
    for total, count in ((1, 1), (5, 5), (64, 3), (100, 7)):
        covered = [
            env for rank in range(count) for env in range(shard(total, count, rank)[0], sum(shard(total, count, rank)))
        ]
        assert covered == list(range(total))
    for total, count, rank in ((2, 3, 0), (4, 2, 2), (4, 2, -1)):
        with pytest.raises(ConfigError, match="expected 0 <= rank < num_collectors <= num_envs"):
            shard(total, count, rank)


def test_context_of_a_rank() -> None:
    ctx = CollectorContext.for_rank(
        1, num_collectors=3, total_num_envs=7, run_seed=11, cpus=(4, 5), node=1, device="cuda:0"
    )
    assert (ctx.env_offset, ctx.num_envs, ctx.total_num_envs, ctx.name) == (3, 2, 7, "collector[1]")
    assert (ctx.cpus, ctx.node, ctx.device, ctx.generation) == ((4, 5), 1, "cuda:0", 0)
    assert ctx.seed != 11 == ctx.run_seed
    first = CollectorContext.for_rank(0, num_collectors=3, total_num_envs=7, run_seed=11)
    assert first.seed == 11
    assert first.env_seeds()[0] == 11


def test_seeds_never_meet() -> None:
    seeds = [
        seed
        for run_seed in range(4)
        for rank in range(3)
        for generation in range(2)
        for seed in CollectorContext.for_rank(
            rank, num_collectors=3, total_num_envs=12, run_seed=run_seed, generation=generation
        ).env_seeds()
    ]
    assert len(set(seeds)) == len(seeds) == 4 * 3 * 2 * 4
    assert all(seed < 2**31 for seed in CollectorContext(num_envs=50, seed=3).env_seeds(bits=31))


def test_restarted_context_is_that_of_the_generation() -> None:
    made: dict[str, Any] = {"num_collectors": 2, "total_num_envs": 4, "run_seed": 9}
    ctx = CollectorContext.for_rank(1, **made)
    with ctx.timer("act"):
        pass
    again = ctx.restarted(2, start_slot=40)
    assert again.seed == CollectorContext.for_rank(1, generation=2, **made).seed
    assert (again.generation, again.start_slot, again.timers) == (2, 40, {})
    assert ctx.restarted(0).seed == ctx.seed
    # Without the run's seed, from its own.
    bare = CollectorContext(seed=5)
    assert bare.restarted(1).seed not in (5, bare.restarted(2).seed)


def test_context_and_errors_are_picklable() -> None:
    ctx = CollectorContext.for_rank(1, num_collectors=2, total_num_envs=4, run_seed=9)
    assert pickle.loads(pickle.dumps(ctx)) == ctx
    error = ctx.error("broken", row=1, step=7, field="obs")
    assert str(error) == "collector[1], environment 3 (row 1 of its 2), step 7, field 'obs': broken"
    again = pickle.loads(pickle.dumps(NonFiniteError(str(error), rank=1, env=3, step=7, field="obs")))
    assert isinstance(again, NonFiniteError)
    assert isinstance(again, CollectorError)
    assert (str(again), again.rank, again.env, again.step, again.field) == (str(error), 1, 3, 7, "obs")


def test_timers_add_up() -> None:
    ctx = CollectorContext()
    for _ in range(3):
        with ctx.timer("reward"), ctx.timer("physics"):
            pass
    assert ctx.timer("reward").num_calls == 3
    assert ctx.timer("reward").total_ns > ctx.timer("physics").total_ns > 0


def test_what_cannot_be_sent_is_named() -> None:
    check_picklable(partial(Numbered, fault="raise"), "the collector factory")
    check_picklable(Counter, "make_env")

    class Local:
        pass

    for thing in (lambda ctx: None, Local, (x for x in ()), partial(Numbered, fault=Local)):
        with pytest.raises(ConfigError, match=r"the collector factory cannot be sent .* expected something picklable"):
            check_picklable(thing, "the collector factory")


def test_function_from_a_prompt_is_refused() -> None:
    code = (
        "from numa_collectors.collector import check_picklable\n"
        "def make(ctx): return None\n"
        "check_picklable(make, 'the collector factory')\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root, check=False
    )
    assert result.returncode == 1
    assert "ConfigError: the collector factory cannot be sent to a worker process" in result.stderr
    assert "interactive prompt" in result.stderr


def test_test_policy_is_a_policy() -> None:
    assert isinstance(Constant(CollectorContext(), gym_schema(Counter)), Policy)
