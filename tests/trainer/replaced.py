"""A collector whose replacement waits for a sign; imports no torch, so that its processes start fast."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from numa_collectors.collector import CollectorContext
from tests.trainer.collecting import CountingCollector
from tests.worker.helpers import until

PATIENCE_S = 120.0
_DIES_AT = 20


class Replaced(CountingCollector):
    """Collector 1 dies in the middle of a slot; the next one is not made before ``may_start`` exists."""

    def __init__(self, ctx: CollectorContext, *, died: Path, may_start: Path) -> None:
        if ctx.generation:
            until(may_start.exists, "the learner's progress", PATIENCE_S)
        super().__init__(ctx)
        self.died = died

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self.ctx.rank == 1 and self.step == _DIES_AT and not self.ctx.generation:
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().collect(slot)
