"""Benchmarks claim what their samples show and no more."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import collector_inference
from benchmarks.collector_inference import Arm, recommend
from benchmarks.comparing import Comparison, CpuMeter


@pytest.mark.parametrize(
    ("ratios", "goal", "verdict"),
    [
        ([1.2, 1.3, 1.1], None, "ahead"),
        ([0.9, 0.8, 0.7], None, "behind"),
        ([1.5, 1.4, 0.99], None, "inside the noise"),
        ([1.5, 1.6], None, "inside the noise"),
        ([1.9, 1.8, 2.0], 1.8, "met"),
        ([1.7, 1.79, 1.2], 1.8, "not met"),
        ([1.7, 1.9, 1.9], 1.8, "met by the median, not in every round"),
        ([1.7, 1.7, 1.9], 1.8, "not met by the median, met in some round"),
    ],
)
def test_nothing_is_claimed_that_a_round_contradicts(ratios: list[float], goal: float | None, verdict: str) -> None:
    found = Comparison("a over b", ratios, goal)
    assert found.verdict == verdict
    assert str(found).startswith(f"{verdict}: a over b: ")
    assert f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds" in str(found)


def arms(cuda: list[float], cpu: list[float], beside_cuda: float, beside_cpu: float) -> dict[str, Arm]:
    """Arms of one collector that infer so many steps a second, beside a learner that alone makes 100 updates."""
    rounds = len(cuda)
    made = [
        Arm("cpu", 0, updates_per_s=[100.0] * rounds),
        Arm("cuda:0", 1, infers_per_s=[[value] for value in cuda], updates_per_s=[beside_cuda] * rounds),
        Arm("cpu", 1, infers_per_s=[[value] for value in cpu], updates_per_s=[beside_cpu] * rounds),
    ]
    return {arm.name: arm for arm in made}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (arms([20, 21, 22], [10, 10, 10], 90, 90), "choose cuda"),
        (arms([5, 6, 5], [10, 10, 10], 90, 90), "choose cpu"),
        (arms([10, 9, 11], [10, 10, 10], 60, 90), "choose cpu"),
        (arms([10, 9, 11], [10, 10, 10], 90, 60), "choose cuda"),
        (arms([20, 21, 22], [10, 10, 10], 60, 90), "cuda where the environments hold the run back, cpu where"),
        (arms([10, 9, 11], [10, 10, 10], 90, 90), "no difference beyond the noise"),
    ],
)
def test_the_device_is_recommended_from_both_sides(found: dict[str, Arm], words: str) -> None:
    (line,) = recommend(found, [1], "cuda:0")
    assert words in line


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="benchmarks bind by Linux's calls")
def test_inference_runs_on_the_cpu_and_says_what_was_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if collector_inference.torch.cuda.is_available():
        pytest.skip("there is a CUDA device: both are measured")
    cpus, threads = os.sched_getaffinity(0), collector_inference.torch.get_num_threads()
    try:
        arguments = ["--counts", "1", "--rounds", "1", "--measure-s", "0.5", "--settle-s", "0.1"]
        assert collector_inference.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    finally:
        os.sched_setaffinity(0, cpus)
        collector_inference.torch.set_num_threads(threads)
    written = json.loads((tmp_path / "out.json").read_text())
    assert set(written["arms"]) == {"learner alone", "1 x cpu"}
    assert written["arms"]["1 x cpu"]["infers_per_s"][0][0] > 0
    assert "was not compared" in written["recommendation"][0]
    assert written["recommendation"][0] in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="psutil tells allowed CPUs on Linux only")
def test_cpu_time_is_told_by_role_and_place() -> None:
    meter = CpuMeter(role="learner")
    before = sum(meter.read().values())
    end_s = os.times().user + 0.05
    while os.times().user < end_s:
        pass
    after = meter.read()
    assert sum(after.values()) > before
    assert any(name.startswith("learner on CPUs ") for name in after)
