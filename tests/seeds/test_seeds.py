"""Seeds: no two streams of a sweep agree, and nothing depends on how many workers there are."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from numa_collectors.seeds import collector_seed, env_seeds, seed_everything, seed_sequence, stream_seed


def test_first_collector_gets_the_seed_of_the_run() -> None:
    assert collector_seed(0, 0) == 0
    assert collector_seed(123, 0) == 123
    assert collector_seed(123, 0, generation=1) not in (123, collector_seed(123, 1))


def test_a_sweep_has_no_collision() -> None:
    """100 run seeds x 16 collectors x 64 environments; the plain ``seed + rank`` collides here."""
    environments: set[int] = set()
    collectors: set[int] = set()
    for seed in range(100):
        for rank in range(16):
            collectors.add(collector_seed(seed, rank))
            environments.update(env_seeds(seed, rank, 64))
    assert len(collectors) == 100 * 16
    assert len(environments) == 100 * 16 * 64


def test_first_draws_of_a_sweep_have_no_collision() -> None:
    draws = {
        np.random.default_rng(seed_sequence(seed, role, rank, generation)).bytes(16)
        for seed in range(20)
        for role in ("collector", "env", "learner", "trainer")
        for rank in range(16)
        for generation in range(2)
    }
    assert len(draws) == 20 * 4 * 16 * 2


def test_streams_stay_what_they_are() -> None:
    """Written down, since a change would silently make every published seed another run."""
    assert collector_seed(1, 1) == 243_118_311
    assert stream_seed(1, "learner") == 172_343_290
    assert env_seeds(1, 0, 2) == [8_114_064_281_633_089_408, 6_190_421_224_034_781_719]


def test_seeds_do_not_depend_on_how_many_there_are() -> None:
    assert env_seeds(7, 3, 64)[:5] == env_seeds(7, 3, 5)


def test_a_restart_gets_a_new_stream() -> None:
    assert not set(env_seeds(7, 3, 64)) & set(env_seeds(7, 3, 64, generation=1))
    assert collector_seed(7, 3) != collector_seed(7, 3, 1)


def test_seeds_fit_what_takes_them() -> None:
    assert max(env_seeds(1, 1, 1000, bits=31)) < 2**31
    assert max(env_seeds(1, 1, 1000)) < 2**63
    for rank in range(100):
        np.random.RandomState(collector_seed(5, rank))


@pytest.mark.parametrize("arguments", [(-1, "env", 0, 0), (0, "env", -1, 0), (0, "env", 0, -1)])
def test_negative_numbers_are_refused(arguments: tuple[int, str, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        seed_sequence(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0, 65])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="1 to 64 bits"):
        env_seeds(0, 0, 1, bits=bits)


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**40 + 3, 2**63 - 1])
def test_seed_everything_repeats(seed: int) -> None:
    def draw() -> tuple[float, float, float]:
        seed_everything(seed)
        return random.random(), float(np.random.random()), float(torch.rand(()))

    first = draw()
    assert draw() == first
    seed_everything(seed + 1)
    assert random.random() != first[0]


def test_a_small_seed_gives_numpys_usual_stream() -> None:
    seed_everything(5)
    assert np.random.random() == np.random.RandomState(5).random_sample()


def test_torch_is_not_imported_for_seeding() -> None:
    code = "import sys; from numa_collectors.seeds import seed_everything as f; f(1); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
