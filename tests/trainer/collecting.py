"""A tiny environment whose data tell their own order; imports no torch, so that its processes start fast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

import numpy as np

from numa_collectors.collector import Collector, CollectorContext, Episode


class CountingCollector(Collector):
    """Writes (rank, step) into every slot, so that loss, repetition and order can be told from the data alone.

    ``fault`` makes ``fault_rank`` misbehave at ``fault_step`` in its first ``fault_generations``:
    ``raise nan exit0 sysexit kill hang stop``.
    """

    def __init__(
        self,
        ctx: CollectorContext,
        *,
        delay_s: float = 0.0,
        slow_rank: int | None = None,
        fault: str | None = None,
        fault_rank: int = 0,
        fault_step: int = 5,
        fault_generations: int = 1,
    ) -> None:
        self.ctx = ctx
        self.step = ctx.start_slot
        self.delay_s = delay_s if slow_rank in (None, ctx.rank) else 0.0
        self.fault = fault if (ctx.rank == fault_rank and ctx.generation < fault_generations) else None
        self.fault_step = fault_step
        self.weights: dict[str, np.ndarray] = {}
        self.version = 0
        self.rng = np.random.default_rng(ctx.seed)

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        assert version > self.version, f"expected a version above {self.version}, got {version}"
        self.version = version
        self.weights = {name: array.copy() for name, array in weights.items()}

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self.fault is not None and self.step == self.fault_step:
            misbehave(self.fault, slot)
        if self.delay_s:
            time.sleep(self.delay_s)
        slot["obs"][:] = self.rng.standard_normal(slot["obs"].shape)
        slot["reward"][:] = self.step
        slot["serial"][:] = self.step
        slot["env"][:] = self.ctx.env_offset + np.arange(self.ctx.num_envs)
        if self.fault == "nan" and self.step == self.fault_step:
            slot["reward"][0] = np.nan
        self.step += 1

    def drain_episodes(self) -> list[Episode]:
        return [Episode(float(self.step), 10)] if self.step % 10 == 0 else []


def misbehave(fault: str, slot: Mapping[str, np.ndarray]) -> None:
    """End, hang or raise in the way that ``fault`` names."""
    if fault == "raise":
        raise RuntimeError("planted failure of the environment")
    if fault == "exit0":
        os._exit(0)
    if fault == "sysexit":
        raise SystemExit(0)
    if fault == "kill":
        slot["serial"][:] = -1  # half a slot is written when the signal comes
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(3600)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
