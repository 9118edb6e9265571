"""Collectors: the user's side of the fan-out, its loop, its process, and an adapter for Gymnasium.

Counters of :meth:`CollectorLoop.stats`, cumulative within one generation, so that a report which is lost loses nothing:

=========================================== ===========================================================================
``slots, env_steps``                        committed; ``env_steps`` is slots * num_envs, masked rows included
``masked_env_steps``                        rows with ``valid`` = False (next-step autoreset)
``episodes, return_sum, length_sum``        of episodes that ended
``weight_version, weight_loads``            version that acts now; how many times new weights were taken over
``collect_ns``                              in :meth:`Collector.collect`, everything included
``<stage>_ns``                              in the stages of ``ctx.timer``; of GymCollector: ``act``, ``env_step``
``push_ns, sync_ns``                        committing; polling and loading weights
``check_s``                                 in ``check_finite``
``wait_space_ns, wait_weights_s``           waiting for space (or for the learner, ``max_policy_lag``); for the first weights
``generation, start_slot``                  which restart this is, and the slots that earlier ones committed
``first_obs_digest``                        digest of the first observation of the shard's first environment
``first_obs_distinct``                      how many different first observations the shard's environments had
``time_ns``                                 ``time.monotonic_ns()`` of the report
=========================================== ===========================================================================

Equal digests of two collectors, or fewer distinct first observations than environments, mean that the environment
ignores its seed, or starts always alike.
"""

from numa_collectors.collector.context import (
    Collector,
    CollectorContext,
    CollectorError,
    CollectorFactory,
    Episode,
    NonFiniteError,
    Policy,
    check_picklable,
    shard,
)
from numa_collectors.collector.gym import GymCollector, gym_schema
from numa_collectors.collector.loop import CollectorLoop, CollectorOptions, build_loop
from numa_collectors.collector.spaces import GymSpec
from numa_collectors.collector.worker import CollectorWorker

__all__ = [
    "Collector",
    "CollectorContext",
    "CollectorError",
    "CollectorFactory",
    "CollectorLoop",
    "CollectorOptions",
    "CollectorWorker",
    "Episode",
    "GymCollector",
    "GymSpec",
    "NonFiniteError",
    "Policy",
    "build_loop",
    "check_picklable",
    "gym_schema",
    "shard",
]
