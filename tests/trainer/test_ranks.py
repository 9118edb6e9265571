"""Several trainers under ``torchrun``: who is who, whose cores, whose seeds, and equal numbers of updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numa_collectors.config import RunConfig
from numa_collectors.errors import ConfigError
from numa_collectors.learner import resolve_device
from numa_collectors.topo import Topology
from numa_collectors.trainer._governor import Governor
from numa_collectors.trainer._ranks import Ranks, resolve_ranks
from tests.trainer.toys import toy_trainer

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def environment(*values: object) -> dict[str, str]:
    return {name: str(value) for name, value in zip(VARIABLES, values, strict=True) if value is not None}


@pytest.mark.parametrize(
    ("env", "config", "expected"),
    [
        (environment(None, None, None, None), {}, (0, 1, 0, 1)),
        (environment(5, 8, 1, 4), {}, (5, 8, 1, 4)),
        (environment(5, 8, 1, 4), {"world_size": 1}, (0, 1, 0, 1)),
        (environment(3, None, None, None), {"world_size": 1}, (0, 1, 0, 1)),
        (environment(5, 8, 1, 4), {"local_rank": 0, "local_world_size": 1}, (5, 8, 0, 1)),
        ({}, {"rank": 1, "world_size": 2, "local_rank": 0, "local_world_size": 1}, (1, 2, 0, 1)),
    ],
)
def test_the_configuration_wins_over_torchruns_variables(
    env: dict[str, str], config: dict[str, int], expected: tuple[int, ...]
) -> None:
    assert resolve_ranks(RunConfig(**config), env) == Ranks(*expected)


@pytest.mark.parametrize(
    ("env", "config", "words"),
    [
        (environment(1, 4, 2, 2), {}, "local_rank: expected less than local_world_size=2, got 2"),
        (environment(4, 4, 0, 2), {}, "rank: expected less than world_size=4, got 4"),
        (environment(0, 2, 0, 4), {}, "local_world_size: expected at most world_size=2, got 4"),
        (environment(0, 2, 1, 2), {}, "local_rank: expected at most rank=0, got 1"),
        (environment(0, 2, None, None), {}, "local_rank: expected all of RANK, WORLD_SIZE, LOCAL_RANK and"),
        (environment("one", 2, 0, 2), {}, "rank: expected a whole number in the environment variable RANK, got 'one'"),
        (environment(None, None, None, None), {"rank": 1}, "world_size: expected all of RANK"),
        (environment(None, None, None, None), {"rank": 1, "world_size": 1}, "rank: expected less than world_size=1"),
    ],
)
def test_what_contradicts_itself_is_one_line_with_a_remedy(
    env: dict[str, str], config: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_ranks(RunConfig(**config), env)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(words)
    assert ", got " in line
    assert "world_size=1" in line.partition("; ")[2]


def test_torchruns_variables_are_read_and_a_refusal_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    assert toy_trainer(tmp_path / "run", oversubscribe=True).setup.ranks == Ranks(1, 2, 1, 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="local_rank: expected less than local_world_size=2, got 2"):
        toy_trainer(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def ranked(tmp_path: Path, rank: int, **changes: Any) -> Any:
    """Return the trainer of ``rank`` of two on this host."""
    ranks = {"rank": rank, "world_size": 2, "local_rank": rank, "local_world_size": 2}
    return toy_trainer(tmp_path / "run", oversubscribe=True, **{**ranks, **changes})


def test_a_collector_has_its_number_and_seeds_whichever_rank_has_it(tmp_path: Path) -> None:
    def contexts(trainer: Any) -> list[Any]:
        options = trainer.setup.options
        return [options.context(rank) for rank in range(options.num_collectors)]

    shared = [context for rank in (0, 1) for context in contexts(ranked(tmp_path, rank, num_envs=6, learning_starts=0))]
    alone = contexts(
        toy_trainer(tmp_path / "run", num_envs=12, num_collectors=4, learning_starts=0, oversubscribe=True)
    )
    assert [context.name for context in shared] == [f"collector[{number}]" for number in range(4)]
    assert shared == alone
    assert [context.env_seeds() for context in shared] == [context.env_seeds() for context in alone]
    # One collector a rank: collector 1 is then rank 1's, and the same as before.
    assert contexts(ranked(tmp_path, 1, num_envs=3, num_collectors=1))[0].env_seeds() == alone[1].env_seeds()


def test_ranks_share_out_the_cores_and_one_collector_is_bound_too(tmp_path: Path) -> None:
    placements = [ranked(tmp_path, rank, num_collectors=1).setup.placement for rank in (0, 1)]
    mine, other = ({cpu for worker in placement.collectors for cpu in worker.cpus} for placement in placements)
    assert mine
    assert other
    if len(Topology.discover().allowed) > 1:
        assert not mine & other
    # The launcher may have bound its ranks already.
    bound = ranked(tmp_path, 1, local_rank=0, local_world_size=1).setup.placement
    assert {cpu for worker in bound.collectors for cpu in worker.cpus} == set(Topology.discover().allowed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_dir": None}, "run_dir: expected a directory with world_size=2, got null"),
        (
            {"on_learner_exit": "restart"},
            "on_learner_exit: expected 'raise' with world_size=2, got 'restart'",
        ),
    ],
)
def test_what_several_ranks_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    from numa_collectors.trainer import FanOutTrainer
    from tests.trainer.toys import SCHEMA, WEIGHTS, make_collector, make_learner

    monkeypatch.chdir(tmp_path)
    config = ranked(tmp_path, 0).setup.config.replace(**changes)
    with pytest.raises(ConfigError) as caught:
        FanOutTrainer(config, collector=make_collector(), learner=make_learner(), schema=SCHEMA, weights=WEIGHTS)
    assert str(caught.value).startswith(words)
    assert "; " in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_unequal_numbers_of_updates_are_warned_of(tmp_path: Path) -> None:
    def warnings(**changes: Any) -> str:
        return "\n".join(ranked(tmp_path, 0, **changes).setup.warnings)

    assert "learner_bound" in warnings(utd_mode="learner_bound")
    assert "learner_bound" in warnings(utd_mode="learner_bound", utd_min=0.1, utd_max=0.2)
    assert warnings(utd_mode="learner_bound", utd_min=0.2, utd_max=0.2) == ""
    assert warnings() == ""


@given(
    shards=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    orders=st.tuples(*[st.lists(st.integers(0, 4), min_size=1, max_size=9)] * 2),
    num_updates=st.integers(1, 7),
    slots=st.integers(1, 12),
    warm_up=st.integers(0, 30),
)
def test_strict_updates_are_a_function_of_the_configuration_alone(
    shards: list[int], orders: tuple[list[int], list[int]], num_updates: int, slots: int, warm_up: int
) -> None:
    """However the collectors' slots interleave, and whoever makes them: two ranks never differ in their updates."""
    num_envs = sum(shards)
    target = num_envs * slots
    made = []
    for order in orders:
        governor = Governor.strict(num_updates=num_updates, num_envs=num_envs, warm_up=warm_up)
        turn = 0
        while governor.ingested < target:
            governor.ingested = min(target, governor.ingested + shards[order[turn % len(order)] % len(shards)])
            turn += 1
            while governor.owed:
                governor.done += governor.due()
        made.append(governor.done)
    assert made == [num_updates * max(0, target - warm_up) // num_envs] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a number of GPUs that this host does not have")
def test_a_rank_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device("cuda", rank)[0] for rank in (0, 1)] == ["cuda", "cuda:1"]
    assert resolve_device("cuda:0", 1)[0] == "cuda:0"
    with pytest.raises(
        ConfigError, match="a CUDA device for each local rank, got 2 for local_rank=2: start fewer ranks"
    ):
        resolve_device("cuda", 2)
    # Some launchers show each rank its own GPU alone.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda", 3)[0] == "cuda"


@pytest.mark.timeout(600)
def test_two_ranks_train_one_policy_under_torchrun(tmp_path: Path) -> None:
    run_dir, env_steps = tmp_path / "run", 960
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [
            *launch,
            "-m",
            "examples.ddp",
            f"run_dir={run_dir}",
            f"total_env_steps={env_steps}",
            "num_collectors=1",
            "start_timeout_s=500",
        ],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:5000]
    results = [json.loads((path / "result.json").read_text()) for path in (run_dir, run_dir / "rank_1")]
    assert [result["status"] for result in results] == ["finished"] * 2
    assert [result["env_steps"] for result in results] == [env_steps] * 2
    # (960 - 640) / 16; the learner compared the weights of both ranks after the 20th, and would have raised.
    assert [result["updates"] for result in results] == [20] * 2
    points = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert points[-1]["train/checked_at"] == 1
    # Metrics, checkpoints and the console are rank 0's.
    names = {path.name for path in (run_dir / "rank_1").iterdir()}
    assert names == {".lock", "config.json", "placement.json", "result.json"}
    # The summary at the end, of each rank, is the example's own.
    assert "collector[0]: cpu, " in done.stdout
    assert "collector[1]: cpu, " not in done.stdout
    reports = [json.loads((path / "placement.json").read_text()) for path in (run_dir, run_dir / "rank_1")]
    assert set(reports[0]) == {"collector[0]", "learner[0]"}
    assert set(reports[1]) == {"collector[1]", "learner[1]"}
    if len(os.sched_getaffinity(0)) > 1:
        mine, other = (
            {cpu for name, report in found.items() if name.startswith("collector") for cpu in report["cpus"]}
            for found in reports
        )
        assert not mine & other
