"""Environments that ignore their seed are noticed, and said once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from numa_collectors.collector import CollectorContext
from numa_collectors.trainer import FanOutTrainer
from tests.trainer.collecting import CountingCollector
from tests.trainer.toys import SCHEMA, WEIGHTS, make_learner, toy_config

ACROSS = "began with the same observation: does the environment ignore its seed"
WITHIN = "environments began with 1 different observation(s): does the environment ignore its seed"


class Alike(CountingCollector):
    """Ignores the seed of the collector, those of its environments, or both."""

    def __init__(self, ctx: CollectorContext, *, across: bool, within: bool) -> None:
        super().__init__(ctx)
        self.within = within
        if across:
            self.rng = np.random.default_rng(0)

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        super().collect(slot)
        if self.within:
            slot["obs"][:] = slot["obs"][0].copy()


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_alike_beginnings_are_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], across: bool, within: bool
) -> None:
    FanOutTrainer(
        toy_config(tmp_path / "run", num_envs=8, num_collectors=4, inline=True, console="plain", tensorboard=False),
        collector=partial(Alike, across=across, within=within),
        learner=make_learner(),
        schema=SCHEMA,
        weights=WEIGHTS,
    ).run()
    said = capsys.readouterr().out
    assert said.count(ACROSS) == int(across)
    assert said.count(WITHIN) == int(within)
