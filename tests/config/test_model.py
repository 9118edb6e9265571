"""The model: every field's range, what contradicts what, and the arithmetic that the trainer relies on."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa_collectors.config import RunConfig, config_markdown, json_schema
from numa_collectors.config.model import SECTIONS
from numa_collectors.errors import ConfigError

OUT_OF_RANGE = {
    "collector": ["nomodule", "a:", 3],
    "learner": [":b", "a b:c"],
    "collector_options": [[1], "x"],
    "learner_options": [3],
    "num_envs": [0, -1, "many", None, True, 1.5, 2**24 + 1],
    "num_collectors": [0, -1, 4097, "two"],
    "total_env_steps": [0, -5, 2**62 + 1, "1e-3"],
    "seed": [-1, 2**32, None, "x"],
    "inline": ["perhaps", 7],
    "numa_nodes": [[], [-1], "0,x", "0-", [4096], {}, True, "", ["auto"]],
    "cpus_per_collector": [0, -2, "x"],
    "learner_node": [-1, "gpu", 4096],
    "learner_cpus": [0, -1],
    "oversubscribe": ["maybe"],
    "binding": ["on", True, "of", None],
    "memory_policy": ["preffered", 1],
    "huge_pages": ["x"],
    "ring_capacity": [0, -1, 2**20 + 1],
    "ring_max_bytes": [0, -1],
    "max_lead_slots": [0, -1],
    "max_ingest_per_iter": [0],
    "check_finite": ["x"],
    "utd_mode": ["stirct", None],
    "num_updates": [0, -1, 0.5],
    "utd_min": [0, -1.0, float("inf"), float("nan")],
    "utd_max": [0, "x"],
    "learning_starts": [-1],
    "weight_publish_interval": [0],
    "weight_poll_interval": [0],
    "max_policy_lag": [0, -1],
    "learner_device": ["gpu", "cuda:", "cuda:-1", "cuda:x", ""],
    "collector_inference_device": ["tpu", 0],
    "on_collector_exit": ["ignore"],
    "min_collectors": [0],
    "max_restarts": [-1],
    "restart_backoff_s": [-0.1, float("nan")],
    "on_learner_exit": ["continue"],
    "hang_timeout_s": [0, -1],
    "start_timeout_s": [0, None],
    "shutdown_timeout_s": [0, None, float("inf")],
    "run_dir": [3],
    "resume": [3],
    "checkpoint_interval_s": [0, -1],
    "keep_checkpoints": [0],
    "log_interval_s": [0, None, float("nan")],
    "tensorboard": ["x"],
    "console": ["rich"],
    "ring_layout": ["dense"],
    "rank": [-1, "x"],
    "world_size": [0, -1],
    "local_rank": [-1, 0.5],
    "local_world_size": [0],
}


def error_lines(**values: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig(**values)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    return str(caught.value).splitlines()


def test_every_field_has_out_of_range_values_here() -> None:
    assert set(OUT_OF_RANGE) == set(RunConfig.model_fields)


def test_out_of_range_is_one_line_with_expected_got_and_remedy() -> None:
    for name, value in [(name, value) for name, values in OUT_OF_RANGE.items() for value in values]:
        lines = error_lines(**{name: value})
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"{name}: expected ")
        assert ", got " in lines[0]
        assert "leave it out" in lines[0] or "did you mean" in lines[0]


def test_all_problems_are_reported_at_once() -> None:
    lines = error_lines(num_envs=0, utd_mode="stirct", nenvs=1)
    assert [line.partition(":")[0] for line in lines] == ["num_envs", "utd_mode", "nenvs"]
    assert "expected an integer >= 1 and <= 16777216, got 0" in lines[0]
    assert "did you mean 'strict'?" in lines[1]


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("num_env", "num_envs"),
        ("ring_capcity", "ring_capacity"),
        ("n_envs", "num_envs"),
        ("total_timesteps", "total_env_steps"),
        ("quiet", "console"),
    ],
)
def test_unknown_name_gets_the_nearest_known_one(unknown: str, nearest: str) -> None:
    (line,) = error_lines(**{unknown: 1})
    assert line == f"{unknown}: expected a known name, got an unknown one; did you mean {nearest!r}?"


def test_unknown_name_far_from_all_says_where_the_names_are() -> None:
    (line,) = error_lines(zzzzqqqq=1)
    assert "json_schema()" in line


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"num_collectors": 128}, "num_collectors: expected at most num_envs=64, got 128"),
    ({"num_collectors": 2, "min_collectors": 3}, "min_collectors: expected at most num_collectors=2, got 3"),
    ({"ring_capacity": None}, "ring_capacity: expected a number of slots, or ring_max_bytes"),
    ({"max_lead_slots": 65}, "max_lead_slots: expected at most ring_capacity=64, got 65"),
    ({"total_env_steps": 640, "learning_starts": 640}, "learning_starts: expected less than total_env_steps=640"),
    ({"utd_min": 0.5}, "utd_min: expected null with utd_mode='strict', got 0.5"),
    ({"utd_max": 0.5}, "utd_max: expected null with utd_mode='strict', got 0.5"),
    ({"utd_mode": "learner_bound", "utd_min": 2, "utd_max": 1}, "utd_min: expected at most utd_max=1.0, got 2.0"),
    ({"inline": True, "binding": "require"}, "binding: expected 'auto' or 'off' with inline=true, got 'require'"),
    ({"on_collector_exit": "restart", "max_restarts": 0}, "max_restarts: expected at least 1"),
    ({"on_learner_exit": "restart", "checkpoint_interval_s": None}, "checkpoint_interval_s: expected seconds"),
    ({"resume": "latest"}, "run_dir: expected a directory with resume='latest', got null"),
]


def test_contradictions() -> None:
    for values, start in CONTRADICTIONS:
        (line,) = error_lines(**values)
        assert line.startswith(start), line
        assert "; " in line


ACCEPTED_ELSEWHERE: list[tuple[dict[str, object], str]] = [
    ({"num_envs": 64, "num_collectors": 128}, "num_collectors: expected at most num_envs=64, got 128"),
    ({"num_collectors": 0}, "num_collectors: expected an integer >= 1"),
    ({"num_collectors": -1}, "num_collectors: expected an integer >= 1"),
    ({"cpus_per_collector": 0}, "cpus_per_collector: expected an integer >= 1"),
    ({"cpus_per_collector": -2}, "cpus_per_collector: expected an integer >= 1"),
    (
        {"utd_mode": "stirct"},
        "utd_mode: expected one of 'strict', 'learner_bound', got 'stirct'; did you mean 'strict'?",
    ),
    ({"ring_capacity": 0}, "ring_capacity: expected an integer >= 1"),
    ({"weight_publish_interval": 0}, "weight_publish_interval: expected an integer >= 1"),
    ({"max_ingest_per_iter": 0}, "max_ingest_per_iter: expected an integer >= 1"),
    ({"num_updates": 0}, "num_updates: expected an integer >= 1"),
    ({"num_envs": 0}, "num_envs: expected an integer >= 1"),
    ({"total_env_steps": 100, "learning_starts": 1000}, "learning_starts: expected less than total_env_steps=100"),
    ({"seed": None}, "seed: expected an integer >= 0"),
]
"""What other trainers accept in silence, clamp, or end in a traceback."""


def test_what_is_accepted_in_silence_elsewhere_is_refused() -> None:
    for values, start in ACCEPTED_ELSEWHERE:
        (line,) = error_lines(**values)
        assert line.startswith(start), line


def test_uneven_shards_are_no_error() -> None:
    assert RunConfig(num_envs=65, num_collectors=2).envs_of(0) == 33


def test_contradictions_are_reported_together() -> None:
    assert len(error_lines(num_collectors=128, max_lead_slots=100, utd_min=1)) == 3


def test_the_edges_that_are_allowed() -> None:
    RunConfig(num_envs=4, num_collectors=4, min_collectors=4)
    RunConfig(max_lead_slots=64)
    RunConfig(utd_mode="learner_bound", utd_min=1, utd_max=1)
    RunConfig(ring_capacity=None, ring_max_bytes=1 << 20, max_lead_slots=1000)
    RunConfig(resume="runs/a")
    RunConfig(learner_device="cuda:3", collector_inference_device="cpu")


def test_defaults_bind_nothing_and_run_one_collector() -> None:
    config = RunConfig()
    assert config.num_collectors == 1
    assert config.placement_values() == {
        "num_collectors": 1,
        "numa_nodes": None,
        "cpus_per_collector": None,
        "learner_node": None,
        "learner_cpus": None,
        "oversubscribe": False,
        "learner_gpu": None,
    }
    assert config.collector_inference_device == "cuda"


def test_uneven_shards() -> None:
    config = RunConfig(num_envs=7, num_collectors=3)
    assert [config.envs_of(rank) for rank in range(3)] == [3, 2, 2]
    assert [config.env_offset(rank) for rank in range(3)] == [0, 3, 5]
    with pytest.raises(IndexError):
        config.envs_of(3)
    with pytest.raises(IndexError):
        config.env_offset(-1)


@given(num_envs=st.integers(1, 300), data=st.data())
def test_shards_tile_the_environments(num_envs: int, data: st.DataObject) -> None:
    num_collectors = data.draw(st.integers(1, num_envs))
    config = RunConfig(num_envs=num_envs, num_collectors=num_collectors)
    sizes = [config.envs_of(rank) for rank in range(num_collectors)]
    assert sum(sizes) == num_envs
    assert max(sizes) - min(sizes) <= 1
    assert [config.env_offset(rank) for rank in range(num_collectors)] == [
        sum(sizes[:rank]) for rank in range(num_collectors)
    ]


def test_total_is_rounded_up_to_whole_slots() -> None:
    config = RunConfig(num_envs=7, total_env_steps=50)
    assert config.slots_per_collector == 8
    assert config.planned_env_steps == 56
    assert RunConfig(num_envs=7, total_env_steps=49).planned_env_steps == 49


def test_lead() -> None:
    assert RunConfig().effective_lead_slots == 1
    assert RunConfig(ring_capacity=2).effective_lead_slots == 1
    assert RunConfig(max_lead_slots=9).effective_lead_slots == 9
    assert RunConfig(utd_mode="learner_bound").effective_lead_slots == 64
    assert RunConfig(utd_mode="learner_bound", ring_capacity=None, ring_max_bytes=1).effective_lead_slots is None


@pytest.mark.parametrize(
    ("given_value", "kept"),
    [
        ("auto", "auto"),
        ("1,0", (1, 0)),
        ("0-2,5", (0, 1, 2, 5)),
        (3, (3,)),
        ([1, 1, 0], (1, 1, 0)),
        (None, None),
        ("2", (2,)),
    ],
)
def test_numa_nodes_keeps_order_and_repetition(given_value: object, kept: object) -> None:
    assert RunConfig(numa_nodes=given_value).numa_nodes == kept


def test_frozen_and_replace_validates() -> None:
    config = RunConfig(num_envs=8)
    with pytest.raises(ValueError, match="frozen"):
        config.num_envs = 9  # type: ignore[misc]
    assert config.replace(num_collectors=2).num_envs == 8
    with pytest.raises(ConfigError, match="num_collectors: expected at most num_envs=8"):
        config.replace(num_collectors=9)


def test_model_validate_raises_the_same_error() -> None:
    with pytest.raises(ConfigError, match="num_envs: expected"):
        RunConfig.model_validate({"num_envs": 0})
    assert RunConfig.model_validate({"num_envs": 3}).num_envs == 3


def test_round_trips() -> None:
    config = RunConfig(num_envs=9, numa_nodes="0,1", run_dir="runs/x", learner_options={"hidden": [1, 2]}, resume=True)
    assert pickle.loads(pickle.dumps(config)) == config
    assert RunConfig(**json.loads(config.model_dump_json())) == config
    assert config.run_dir == Path("runs/x")
    assert config.resume == "latest"


def test_json_schema_carries_ranges_and_descriptions() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert schema["$id"] == "numa-collectors/config/1"
    assert schema["additionalProperties"] is False
    assert schema["properties"]["num_envs"]["minimum"] == 1
    assert schema["properties"]["seed"]["exclusiveMaximum"] == 2**32
    assert all(part.get("description") for part in schema["properties"].values())


def test_markdown_has_each_field_once_and_each_section() -> None:
    text = config_markdown()
    for name in RunConfig.model_fields:
        assert text.count(f"\n| `{name}` |") == 1
    for name, title in SECTIONS.items():
        assert f"## {title}\n\n| name | default | accepts | meaning |\n|---|---|---|---|\n| `{name}` |" in text


def test_docs_page_is_the_generated_one() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    if not page.exists():
        pytest.skip("docs/configuration.md is not written yet")
    assert page.read_text(encoding="utf-8") == config_markdown(), (
        "regenerate docs/configuration.md from config_markdown()"
    )


def test_config_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import numa_collectors.config as c; c.RunConfig()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
