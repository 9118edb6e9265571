"""Sources of a configuration: files, environment, command line; who wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from numa_collectors.config import RunConfig, load_config
from numa_collectors.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_json_and_mapping_agree(tmp_path: Path) -> None:
    yaml_path = write(tmp_path / "a.yaml", "num_envs: 8\nnuma_nodes: [1, 0]\nbinding: off\ntotal_env_steps: 1e5\n")
    json_path = write(
        tmp_path / "a.json", '{"num_envs": 8, "numa_nodes": [1, 0], "binding": "off", "total_env_steps": 100000}'
    )
    expected = RunConfig(num_envs=8, numa_nodes=(1, 0), binding="off", total_env_steps=100_000)
    assert load_config(yaml_path, env={}) == expected
    assert load_config(str(json_path), env={}) == expected
    assert (
        load_config({"num_envs": 8, "numa_nodes": [1, 0], "binding": "off", "total_env_steps": 1e5}, env={}) == expected
    )


def test_empty_file_and_no_source_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "a.yaml", "# nothing\n"), env={}) == RunConfig() == load_config(env={})


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "num_envs: 8\nnum_collectors: 2\nseed: 1\n")
    env = {
        "NUMA_COLLECTORS_NUM_COLLECTORS": "3",
        "NUMA_COLLECTORS_SEED": "2",
        "NUMA_COLLECTORS__INTERNAL": "x",
        "HOME": "/",
    }
    config = load_config(path, env=env, overrides=["seed=3"])
    assert (config.num_envs, config.num_collectors, config.seed) == (8, 3, 3)


def test_the_librarys_own_variables_are_no_settings() -> None:
    own = ("NUMA_COLLECTORS_BINDING_WARNED", "NUMA_COLLECTORS_LAB_CACHE", "NUMA_COLLECTORS__X")
    assert load_config(env=dict.fromkeys(own, "1")) == RunConfig()
    assert load_config(env={"NUMA_COLLECTORS_BINDING": "off"}).binding == "off"


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMA_COLLECTORS_NUM_ENVS", "5")
    assert load_config().num_envs == 5


def test_override_forms() -> None:
    config = load_config(
        {"learner_options": {"hidden": 1, "lr": 0.1}},
        env={},
        overrides=[
            "--num-collectors=2",
            "numa_nodes=[1,0]",
            "checkpoint_interval_s=null",
            "learner_options.hidden=[64, 64]",
            "collector_options.task=a=b",
            "run_dir=/tmp/x y",
        ],
    )
    assert config.num_collectors == 2
    assert config.numa_nodes == (1, 0)
    assert config.checkpoint_interval_s is None
    assert config.learner_options == {"hidden": [64, 64], "lr": 0.1}
    assert config.collector_options == {"task": "a=b"}
    assert config.run_dir == Path("/tmp/x y")


def test_given_mappings_are_not_changed() -> None:
    given = {"learner_options": {"a": 1}}
    load_config(given, env={}, overrides=["learner_options.a=2", "seed=4"])
    assert given == {"learner_options": {"a": 1}}


BAD_TEXTS = [
    ("a.yaml", "num_envs: [1\n", "expected YAML or JSON, got"),
    ("a.yaml", "num_envs: 1\nnum_envs: 2\n", "'num_envs' is given twice"),
    ("a.yaml", "- 1\n- 2\n", "expected `name: value` lines"),
    ("a.yaml", "just text\n", "expected `name: value` lines"),
    ("a.yaml", "x: !!python/object/apply:os.system ['true']\n", "expected YAML or JSON, got could not determine"),
    ("a.json", '{"num_envs": 1', "expected YAML or JSON, got"),
    ("a.json", "[" * 200_000, "expected YAML or JSON, got"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD_TEXTS)
def test_broken_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, env={})
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; check the path"):
        load_config(tmp_path / "absent.yaml", env={})
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path, env={})
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ConfigError, match="expected UTF-8 text"):
        load_config(binary, env={})


def test_each_problem_says_where_it_comes_from(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "num_envs: 0\nnum_colectors: 2\n")
    env = {"NUMA_COLLECTORS_SEED": "-1", "NUMA_COLLECTORS_NUM_ENVZ": "3"}
    with pytest.raises(ConfigError) as caught:
        load_config(path, env=env, overrides=["utd_mode=stirct", "bare", "ring.size=3"])
    lines = {line.partition(":")[0]: line for line in str(caught.value).splitlines()}
    assert len(lines) == 7
    assert f"got 0 ({path});" in lines["num_envs"]
    assert f"unknown one ({path}); did you mean 'num_collectors'?" in lines["num_colectors"]
    assert "(environment variable NUMA_COLLECTORS_SEED)" in lines["seed"]
    assert "(environment variable NUMA_COLLECTORS_NUM_ENVZ); did you mean 'num_envs'?" in lines["num_envz"]
    assert "(command line 'utd_mode=stirct'); did you mean 'strict'?" in lines["utd_mode"]
    assert "expected key=value, got 'bare'" in lines["bare"]
    assert "settings are not nested" in lines["ring.size"]


def test_a_rejected_configuration_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_config({"run_dir": str(tmp_path / "run"), "num_envs": 0}, env={})
    load_config({"run_dir": str(tmp_path / "run")}, env={})
    assert list(tmp_path.iterdir()) == []
