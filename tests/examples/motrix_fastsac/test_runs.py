"""``mxlab train task=<env>/numa.fastsac`` against motrix's own trainer, with its agent, buffer and environments."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip(
    "motrix_fastsac", reason="motrix is not installed here: `make demo-motrix` makes an environment that has it"
)
import torch

from tests.examples.motrix_fastsac.conftest import Run, Train, mxlab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]  # each run imports torch and motrix anew

SMALL = ("num_envs=8", "algo.agent.batch_size=64", "algo.agent.num_updates=2", "algo.agent.learning_starts=10")
COLLECTORS = "algo.trainer.async_options.num_collectors="


def iterations(number: int) -> str:
    return f"algo.trainer.num_learning_iterations={number}"


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return where two states are not the same to the bit."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {sorted(map(str, one))} / {sorted(map(str, other))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)):
        return [
            f for index, pair in enumerate(zip(one, other, strict=True)) for f in differences(*pair, f"{where}/{index}")
        ]
    same = torch.equal(one, other) if torch.is_tensor(one) else one == other
    return [] if same else [where]


@pytest.mark.parametrize("task", ["pendulum-np", "cartpole-ms"])
def test_the_inline_mode_gives_the_bits_of_their_synchronous_trainer(train: Train, task: str) -> None:
    options = (*SMALL, iterations(60), "seed=3", "algo.asynchronous=false")
    theirs, ours = (train(framework, *options, task=task).model() for framework in ("motrix", "numa"))
    assert ours["update_idx"] == (60 - 10) * 2
    assert differences(theirs, ours) == []


@pytest.fixture(scope="module")
def two(train: Train) -> Run:
    return train(
        *("numa", *SMALL, "num_envs=9", iterations(80), f"{COLLECTORS}2", "checkpoint.interval=25"),
        NUMA_COLLECTORS_LOG_INTERVAL_S="0.2",
    )


def test_two_collectors_make_exactly_the_steps_and_updates_of_the_synchronous_run(two: Run) -> None:
    result = json.loads((two.directory / "numa" / "result.json").read_text())
    assert (result["status"], result["env_steps"], result["updates"]) == ("finished", 80 * 9, (80 - 10) * 2)
    model = two.model()
    assert (model["global_step"], model["update_idx"]) == (80, 140)


def test_model_files_and_manifest_are_theirs(two: Run) -> None:
    from motrix_rl import checkpoints

    names = sorted(path.name for path in (two.directory / "checkpoints").glob("*.pt"))
    assert names == ["latest.pt", "model_0000025.pt", "model_0000050.pt", "model_0000075.pt"]
    assert two.model("model_0000050.pt")["global_step"] == 50
    for resolve in (checkpoints.resolve_checkpoint_path, checkpoints.resolve_resume_checkpoint_path):
        assert resolve(two.directory).name == "latest.pt"


def test_their_playback_loads_our_model(two: Run) -> None:
    model = two.directory / "checkpoints" / "latest.pt"
    played = mxlab("play", "env=pendulum-np", f"policy={model}", "seed=1", cwd=two.directory)
    assert played.code == 0, played.output[-4000:]
    steps = [
        int(line.split()[0]) for line in played.output.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]
    assert steps == list(range(1, 201))


def events(run: Run) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.directory))
    accumulator.Reload()
    return accumulator


def test_with_one_collector_the_tags_are_theirs(train: Train) -> None:
    options = (*SMALL, iterations(60), f"{COLLECTORS}1", "logging.interval=5")
    theirs = set(events(train("motrix", *options)).Tags()["scalars"])
    ours = set(events(train("numa", *options, NUMA_COLLECTORS_LOG_INTERVAL_S="0.2")).Tags()["scalars"])
    # docs/motrix.md lists them.
    parts = ("wait_writer", "host_snapshot", "actor_load")
    missing = {f"perf/collector_sync.{part}_ms" for part in parts}
    # No episode has ended yet: theirs are NaN.
    missing |= {"rollout/mean_return", "rollout/mean_ep_len"}
    assert theirs - ours == missing
    assert not {f"{tag}_collector0" for tag in theirs} & ours


def test_tags_of_several_are_theirs_and_each_collector_adds_its_own(two: Run) -> None:
    accumulator = events(two)
    tags = set(accumulator.Tags()["scalars"])
    stages = ("sample_actions", "env_step", "push", "bookkeep", "sync", "wait", "env_step.physics")
    expected = {f"perf/collector_{stage}_ms" for stage in stages}
    expected |= {"perf/env_steps_per_s", "perf/updates_per_s", "perf/learn_ms_total", "perf/learn_pct"}
    expected |= {
        "perf/collect_ms_per_batch",
        "async/utd",
        "async/policy_lag",
        "async/ring_fill",
        "async/weight_version",
    }
    expected |= {"async/weight_publishes_per_iter", "reward/upright", "reward/torque", "metrics/height"}
    expected |= {"train/qf_loss", "train/alpha", "train/actor_loss", "train/qf_max_max", "train/final_obs_events"}
    expected |= {f"async/{tag}_collector{rank}" for tag in ("ring_fill", "policy_lag") for rank in range(2)}
    assert expected - tags == set()
    # Steps are iterations, and the ratio is of updates to iterations, as theirs.
    last = accumulator.Scalars("async/utd")[-1]
    assert last.step <= 80
    assert last.value == pytest.approx(140 / 80, rel=0.2)


def test_their_checkpoint_is_resumed_and_ours_by_them(train: Train, two: Run) -> None:
    theirs = train("motrix", *SMALL, iterations(30), "algo.asynchronous=false")
    ours = train("numa", *SMALL, iterations(70), f"{COLLECTORS}2", f"resume={theirs.directory}")
    model = ours.model()
    # The memory starts empty, so its warm-up comes again, as in their synchronous trainer; no random actions.
    assert (model["global_step"], model["update_idx"]) == (70, 20 * 2 + (40 - 10) * 2)
    back = train("motrix", *SMALL, "num_envs=9", iterations(100), "algo.asynchronous=false", f"resume={two.directory}")
    assert (back.model()["global_step"], back.model()["update_idx"]) == (100, 140 + 10 * 2)


def test_a_misspelt_option_is_refused_and_nothing_is_left_running(train: Train) -> None:
    run = train("numa", *SMALL, iterations(20), "algo.trainer.async_options.utd_mode=stirct", check=False)
    assert run.code != 0
    assert "utd_mode" in run.output
    assert "strict" in run.output
    assert not (run.directory / "numa").exists()


def test_a_failed_run_marks_no_best_policy(train: Train) -> None:
    run = train("numa", *SMALL, iterations(60), "algo.agent.policy_frequency=0", check=False)
    assert run.code != 0
    assert "modulo by zero" in run.output
    manifest = run.directory / "checkpoints" / "manifest.json"
    assert not manifest.exists() or "best_policy" not in json.loads(manifest.read_text())["artifacts"]
