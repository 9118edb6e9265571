"""The whole run from one object: :class:`FanOutTrainer`.

Reading order: ``_loop`` is the algorithm, ``_governor`` says how many updates are due, ``_session`` adds checkpoints and
counters, ``_worker`` is its process, ``_run`` supervises all processes, ``_inline`` does without any.
"""

from __future__ import annotations

from numa_collectors.trainer._files import RunFailedError, RunResult
from numa_collectors.trainer._run import FanOutTrainer
from numa_collectors.trainer._setup import RunSetup

__all__ = ["FanOutTrainer", "RunFailedError", "RunResult", "RunSetup"]
