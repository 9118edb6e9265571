"""The learner's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from numa_collectors import checkpoint
from numa_collectors.binding import BindRequest
from numa_collectors.rings import TransitionRing
from numa_collectors.seeds import seed_everything
from numa_collectors.snapshots import WeightSnapshot
from numa_collectors.trainer._session import LearnerPlan, LearnerSession
from numa_collectors.worker import PinnedWorker

__all__ = ["LearnerWorker"]

# How soon a stop request is seen while no data comes, and how often statistics leave.
_WAIT_S = 0.05
_STATS_INTERVAL_S = 0.1
# The first update and saves may take this many times hang_timeout_s.
_LONG_WORK_FACTOR = 10


class LearnerWorker(PinnedWorker):
    """Runs a :class:`LearnerSession` in a process of its own, born on the node of its GPU."""

    def __init__(
        self,
        plan: LearnerPlan,
        rings: Sequence[TransitionRing],
        snapshots: Sequence[WeightSnapshot],
        *,
        bind: BindRequest | None = None,
    ) -> None:
        super().__init__(role="learner", rank=plan.ranks.rank, bind=bind)
        self._plan = plan
        self._rings = tuple(rings)
        self._snapshots = tuple(snapshots)
        self._session: LearnerSession | None = None
        self._failed = False
        self._next_stats_s = 0.0

    def successor(self) -> LearnerWorker:
        """Return the next generation: it takes up the run from the newest checkpoint, or from where this one began.

        Transitions that were ingested after that checkpoint are gone with the replay memory; the version of the weights
        goes on rising, since the snapshots know the last one.
        """
        following = super().successor()
        newest = checkpoint.latest(self._plan.run_dir)
        if newest is not None:
            progress = checkpoint.read_manifest(newest).progress
            following._plan = replace(self._plan, resume_from=newest, start=progress)
        following._failed = False
        return following

    def setup(self) -> None:
        seed_everything(self._plan.seed)
        self._session = LearnerSession(
            self._plan,
            self._rings,
            self._snapshots,
            excuse=self._long_work,
            say=lambda text: self.send_event({"message": text}),
        )
        self._post(self._session)

    def _long_work(self) -> AbstractContextManager[None]:
        """The first update may compile and a save may be large; neither goes on for ever."""
        hang_timeout_s = self._plan.config.hang_timeout_s
        return self.waiting(None if hang_timeout_s is None else _LONG_WORK_FACTOR * hang_timeout_s)

    def step(self) -> bool:
        session = self._running()
        try:
            ended = session.round(_WAIT_S)
        except BaseException:
            self._failed = True
            raise
        if time.monotonic() >= self._next_stats_s:
            self._post(session)
        return ended

    def teardown(self) -> None:
        session = self._running()
        # After an error the learner's state is not to be trusted: the last checkpoint stands.
        if not self._failed:
            self.set_result(session.end())
        self._post(session)
        # The rings stay open after a failure: a next generation may take them over.
        session.close(for_good=not self._failed)

    @property
    def start_env_steps(self) -> int:
        """Where this generation takes up the run."""
        return self._plan.start.env_steps

    def _post(self, session: LearnerSession) -> None:
        self._next_stats_s = time.monotonic() + _STATS_INTERVAL_S
        self.post_stats(session.stats())

    def _running(self) -> LearnerSession:
        if self._session is None:
            raise RuntimeError(f"{self.name}: setup() has not run")
        return self._session
