"""Checkpoints: bit-exact round trips, and a named error for every kind of damage."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numa_collectors.checkpoint import (
    Progress,
    check_matches,
    checkpoints,
    generator_state,
    keep_last,
    latest,
    load,
    restore_generator,
    restore_rng,
    rng_state,
    save,
)
from numa_collectors.checkpoint.store import _digest
from numa_collectors.errors import CheckpointError

PROGRESS = Progress(1200, 300, 77, {0: {"slots": 150, "return_sum": 1.5}, 1: {"slots": 149}})


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {"learner": {"w": torch.full((4, 3), value)}, "step": 3}


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    module = torch.nn.Linear(5, 3)
    # The form of torch.optim's state_dict; the optimizers themselves import for seconds.
    optimizer = {
        "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.rand(3, 5)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "fused": None, "params": [0]}],
    }
    state = {
        "model": module.state_dict(),
        "parameter": module.weight,
        "optimizer": optimizer,
        "bf16": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "flags": [True, None, -(2**70), 1.5, "text", b"bytes", (1, 2)],
        "ordered": OrderedDict(a=1),
    }
    path = save(tmp_path / "checkpoints", state, PROGRESS, config={"num_envs": 8}, fingerprints={"schema": "abc"})
    for target in (path, tmp_path, tmp_path / "checkpoints"):
        loaded = load(target)
        assert loaded.path == path
        assert loaded.progress == PROGRESS
        assert loaded.config == {"num_envs": 8}
        assert loaded.fingerprints == {"schema": "abc"}
        assert loaded.state["flags"] == state["flags"]
        assert loaded.state["optimizer"]["param_groups"] == optimizer["param_groups"]
        assert torch.equal(loaded.state["optimizer"]["state"][0]["exp_avg"], optimizer["state"][0]["exp_avg"])
        assert torch.equal(loaded.state["bf16"].view(torch.int16), state["bf16"].view(torch.int16))
        assert loaded.state["empty"].shape == (0, 3)
        for name, tensor in module.state_dict().items():
            assert torch.equal(loaded.state["model"][name], tensor)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_00000001_step_1200"]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": {"b": np.zeros(3)}}, "state.a.b: .*got ndarray"),
        ({"a": [1, np.float32(1)]}, r"state.a\[1\]: .*got float32"),
        ({"f": print}, "state.f: .*got builtin_function_or_method"),
        ({"d": {1.5: 1}}, "state.d: expected keys of str or int, got 1.5"),
        ({"s": {1}}, "state.s: .*got set"),
    ],
)
def test_what_could_not_be_loaded_is_refused_at_saving(tmp_path: Path, state: dict[str, Any], where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        save(tmp_path / "c", state, PROGRESS)
    assert not (tmp_path / "c").exists()


def test_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="fit in JSON"):
        save(tmp_path, small_state(), PROGRESS, config={"x": object()})
    assert os.listdir(tmp_path) == []


def test_the_newest_counts_also_when_its_step_is_lower(tmp_path: Path) -> None:
    save(tmp_path, small_state(1), Progress(500, 5))
    resumed_from_earlier = save(tmp_path, small_state(2), Progress(400, 4))
    assert latest(tmp_path) == resumed_from_earlier
    assert load(tmp_path).progress.env_steps == 400
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint_00000001_step_500",
        "checkpoint_00000002_step_400",
    ]


def test_keep_last(tmp_path: Path) -> None:
    paths = [save(tmp_path, small_state(), Progress(step, step)) for step in range(5)]
    assert keep_last(tmp_path, 2) == paths[-2:]
    assert sorted(os.listdir(tmp_path)) == [path.name for path in paths[-2:]]
    assert keep_last(tmp_path, 2) == paths[-2:]
    assert save(tmp_path, small_state(), Progress(9, 9)).name == "checkpoint_00000006_step_9"
    with pytest.raises(ValueError, match="at least 1"):
        keep_last(tmp_path, 0)


def test_what_was_left_aside_is_ignored_and_cleaned(tmp_path: Path) -> None:
    good = save(tmp_path, small_state(), Progress(1, 1))
    shutil.copytree(good, tmp_path / ".saving-00000002-99")
    shutil.copytree(good, tmp_path / ".deleting-checkpoint_00000009_step_9")
    (tmp_path / ".saving-00000003-99").mkdir()
    assert latest(tmp_path) == good
    save(tmp_path, small_state(), Progress(2, 2))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_00000001_step_1", "checkpoint_00000002_step_2"]


def test_nothing_to_load(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="expected a checkpoint, a run directory with one"):
            load(path)


def test_check_matches(tmp_path: Path) -> None:
    save(tmp_path, small_state(), PROGRESS, fingerprints={"transition schema": "abc", "weights": "w"})
    loaded = load(tmp_path)
    check_matches(loaded, {"weights": "w", "transition schema": "abc", "new": "x"})
    with pytest.raises(CheckpointError, match=r"transition schema: expected abc as in .*, got abd; resume with"):
        check_matches(loaded, {"weights": "w", "transition schema": "abd"})


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object], resign: bool = False) -> None:
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    if resign:
        manifest["manifest_sha256"] = _digest(manifest)
    file.write_text(json.dumps(manifest))


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def truncate(file: Path, drop: int) -> None:
    file.write_bytes(file.read_bytes()[:-drop])


class Exploit:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return (os.mkdir, (os.environ["EXPLOIT_MARK"],))  # type: ignore[return-value]


def plant_state(path: Path, write: Callable[[Path], object]) -> None:
    """Replace the state by another one with correct sizes and digests, as an attacker would."""
    write(path / "state.pt")
    data = (path / "state.pt").read_bytes()
    entry = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["files"].update({"state.pt": entry}), resign=True)


def plant_exploit(path: Path, protocol: bool) -> None:
    if protocol:
        plant_state(path, lambda file: torch.save({"x": Exploit()}, file))
    else:
        plant_state(path, lambda file: file.write_bytes(pickle.dumps(Exploit(), protocol=2)))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "state missing": (lambda path: (path / "state.pt").unlink(), "expected a readable .*state.pt, got No such file"),
    "state truncated": (lambda path: truncate(path / "state.pt", 1), "bytes in .*state.pt, got .* truncated"),
    "state empty": (lambda path: (path / "state.pt").write_bytes(b""), "state.pt, got 0: truncated"),
    "state flipped at the start": (
        lambda path: flip(path / "state.pt", 5),
        "state.pt as it was written, got a changed",
    ),
    "state flipped at the end": (
        lambda path: flip(path / "state.pt", -40),
        "state.pt as it was written, got a changed",
    ),
    "manifest missing": (lambda path: (path / "manifest.json").unlink(), "expected manifest.json in"),
    "manifest a directory": (
        lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),
        "expected a readable .*manifest.json, got Is a directory",
    ),
    "manifest truncated": (lambda path: truncate(path / "manifest.json", 20), "expected JSON in .*damaged"),
    "manifest empty": (lambda path: (path / "manifest.json").write_bytes(b""), "expected JSON in .*damaged"),
    "manifest not UTF-8": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x81"), "expected JSON in"),
    "manifest a list": (lambda path: (path / "manifest.json").write_text("[]"), "expected a mapping in .*got list"),
    "manifest changed": (
        lambda path: edit_manifest(path, lambda manifest: manifest["progress"].update(env_steps=9)),
        "its digest differs",
    ),
    "another version": (
        lambda path: edit_manifest(path, lambda manifest: manifest.update(schema="numa-collectors/checkpoint/2"), True),
        "expected schema numa-collectors/checkpoint/1 .*got 'numa-collectors/checkpoint/2' .library version 0",
    ),
    "another program's": (lambda path: (path / "manifest.json").write_text('{"a": 1}'), "expected schema .*got None"),
    "progress missing": (
        lambda path: edit_manifest(path, lambda manifest: manifest.pop("progress"), True),
        "expected the progress",
    ),
    "progress of words": (
        lambda path: edit_manifest(path, lambda manifest: manifest["progress"].update(updates="x"), True),
        "expected the progress",
    ),
    "files missing": (
        lambda path: edit_manifest(path, lambda manifest: manifest.pop("files"), True),
        "expected the files of the checkpoint",
    ),
    "a file outside": (
        lambda path: edit_manifest(path, lambda manifest: manifest["files"].update({"../../x": {}}), True),
        "expected the files of the checkpoint",
    ),
    "an entry without a size": (
        lambda path: edit_manifest(path, lambda manifest: manifest["files"].update({"state.pt": {}}), True),
        "expected size and digest",
    ),
    "code in the archive": (lambda path: plant_exploit(path, True), "expected tensors and plain values"),
    "code in a bare pickle": (lambda path: plant_exploit(path, False), "expected tensors and plain values"),
    "no archive": (
        lambda path: plant_state(path, lambda file: file.write_bytes(b"PK\x03\x04" + b"x" * 99)),
        "expected tensors and plain values",
    ),
    "a list for a state": (lambda path: plant_state(path, lambda file: torch.save([1], file)), "expected a mapping in"),
}


def test_every_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    monkeypatch.setenv("EXPLOIT_MARK", str(mark))
    whole = save(tmp_path / "whole", small_state(), PROGRESS, config={"a": 1})
    for number, (name, (damage, words)) in enumerate(DAMAGES.items()):
        run_dir = tmp_path / f"run{number}"
        path = run_dir / "checkpoints" / whole.name
        shutil.copytree(whole, path)
        load(path)
        damage(path)
        for target in (path, run_dir):
            if name == "manifest missing" and target == run_dir:
                words = "readable .*manifest.json, got No such file"
            with pytest.raises(CheckpointError) as caught:
                load(target)
            assert re.search(words, str(caught.value)), f"{name}: {caught.value}"
        assert not mark.exists(), name


def test_the_exploit_of_these_tests_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    monkeypatch.setenv("EXPLOIT_MARK", str(mark))
    pickle.loads(pickle.dumps(Exploit()))
    assert mark.exists()


def test_a_damaged_newest_is_an_error_and_the_older_one_loads_by_path(tmp_path: Path) -> None:
    older = save(tmp_path, small_state(1), Progress(1, 1))
    newest = save(tmp_path, small_state(2), Progress(2, 2))
    truncate(newest / "state.pt", 1)
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path)
    assert load(older).progress.env_steps == 1


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"expected to write a checkpoint into .*got .*; there is no earlier one"):
        save(tmp_path / "file" / "checkpoints", small_state(), PROGRESS)


def test_rng_states_come_back(tmp_path: Path) -> None:
    def draws() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]

    before = rng_state()
    try:
        random.gauss(0, 1)
        np.random.normal()
        save(tmp_path, {"rng": rng_state()}, PROGRESS)
        expected = draws()
        draws()
        restore_rng(load(tmp_path).state["rng"])
        assert draws() == expected
    finally:
        restore_rng(before)


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_generator_states_come_back(tmp_path: Path, kind: Callable[[int], np.random.BitGenerator]) -> None:
    generator = np.random.Generator(kind(5))
    generator.integers(10, dtype=np.uint32)
    save(tmp_path, {"generator": generator_state(generator)}, PROGRESS)
    expected = generator.normal(size=20)
    other = np.random.Generator(kind(6))
    restore_generator(other, load(tmp_path).state["generator"])
    assert np.array_equal(other.normal(size=20), expected)


def test_rng_states_of_another_form_are_refused() -> None:
    for state in ({}, {"python": 3}, {**rng_state(), "torch": torch.zeros(3)}, {**rng_state(), "numpy": {"state": 1}}):
        before = rng_state()
        with pytest.raises(CheckpointError, match="expected generator states"):
            restore_rng(state)
        restore_rng(before)
    with pytest.raises(CheckpointError, match="expected the state of a PCG64 generator"):
        restore_generator(np.random.default_rng(), {"bit_generator": "MT19937"})
