"""NUMA process orchestration for reinforcement learning.

N collector processes step CPU environments, each born bound to a NUMA node; one learner updates the policy on the node of its
GPU.  Transitions travel through one single-producer ring a collector, weights through one snapshot a collector, and every
placement is read back from the kernel.

Names are imported when they are first used, so that ``import numa_collectors`` costs nothing and a worker is bound before
anything heavy loads.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from numa_collectors._version import __version__

if TYPE_CHECKING:
    from numa_collectors.binding import BindReport as BindReport
    from numa_collectors.binding import BindRequest as BindRequest
    from numa_collectors.collector import Collector as Collector
    from numa_collectors.collector import CollectorContext as CollectorContext
    from numa_collectors.collector import CollectorError as CollectorError
    from numa_collectors.collector import Episode as Episode
    from numa_collectors.collector import GymCollector as GymCollector
    from numa_collectors.collector import GymSpec as GymSpec
    from numa_collectors.collector import NonFiniteError as NonFiniteError
    from numa_collectors.collector import Policy as Policy
    from numa_collectors.collector import gym_schema as gym_schema
    from numa_collectors.config import RunConfig as RunConfig
    from numa_collectors.config import load_config as load_config
    from numa_collectors.errors import BindingError as BindingError
    from numa_collectors.errors import CheckpointError as CheckpointError
    from numa_collectors.errors import ConfigError as ConfigError
    from numa_collectors.errors import NodeCapacityError as NodeCapacityError
    from numa_collectors.errors import NumaCollectorsError as NumaCollectorsError
    from numa_collectors.errors import PeerLostError as PeerLostError
    from numa_collectors.errors import PlacementError as PlacementError
    from numa_collectors.errors import RingClosedError as RingClosedError
    from numa_collectors.errors import SchemaMismatchError as SchemaMismatchError
    from numa_collectors.errors import TopologyError as TopologyError
    from numa_collectors.errors import WorkerFailedError as WorkerFailedError
    from numa_collectors.errors import WorkerStartTimeoutError as WorkerStartTimeoutError
    from numa_collectors.learner import Learner as Learner
    from numa_collectors.learner import LearnerContext as LearnerContext
    from numa_collectors.placement import Placement as Placement
    from numa_collectors.placement import PlacementRequest as PlacementRequest
    from numa_collectors.placement import WorkerPlacement as WorkerPlacement
    from numa_collectors.placement import plan as plan
    from numa_collectors.pool import CollectorPool as CollectorPool
    from numa_collectors.pool import PoolOptions as PoolOptions
    from numa_collectors.rings import CompactRing as CompactRing
    from numa_collectors.rings import Field as Field
    from numa_collectors.rings import Schema as Schema
    from numa_collectors.rings import Span as Span
    from numa_collectors.rings import TransitionRing as TransitionRing
    from numa_collectors.snapshots import TensorSpec as TensorSpec
    from numa_collectors.snapshots import WeightSnapshot as WeightSnapshot
    from numa_collectors.snapshots import WeightSpec as WeightSpec
    from numa_collectors.topo import Topology as Topology
    from numa_collectors.trainer import FanOutTrainer as FanOutTrainer
    from numa_collectors.trainer import RunFailedError as RunFailedError
    from numa_collectors.trainer import RunResult as RunResult
    from numa_collectors.worker import Launcher as Launcher
    from numa_collectors.worker import PinnedWorker as PinnedWorker
    from numa_collectors.worker import StopSignals as StopSignals
    from numa_collectors.worker import WorkerFailure as WorkerFailure
    from numa_collectors.worker import WorkerGroup as WorkerGroup

__all__ = [
    "BindReport",
    "BindRequest",
    "BindingError",
    "CheckpointError",
    "Collector",
    "CollectorContext",
    "CollectorError",
    "CollectorPool",
    "CompactRing",
    "ConfigError",
    "Episode",
    "FanOutTrainer",
    "Field",
    "GymCollector",
    "GymSpec",
    "Launcher",
    "Learner",
    "LearnerContext",
    "NodeCapacityError",
    "NonFiniteError",
    "NumaCollectorsError",
    "PeerLostError",
    "PinnedWorker",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "Policy",
    "PoolOptions",
    "RingClosedError",
    "RunConfig",
    "RunFailedError",
    "RunResult",
    "Schema",
    "SchemaMismatchError",
    "Span",
    "StopSignals",
    "TensorSpec",
    "Topology",
    "TopologyError",
    "TransitionRing",
    "WeightSnapshot",
    "WeightSpec",
    "WorkerFailedError",
    "WorkerFailure",
    "WorkerGroup",
    "WorkerPlacement",
    "WorkerStartTimeoutError",
    "__version__",
    "gym_schema",
    "load_config",
    "plan",
]

_HOMES = {
    "binding": ("BindReport", "BindRequest"),
    "collector": (
        "Collector",
        "CollectorContext",
        "CollectorError",
        "Episode",
        "GymCollector",
        "GymSpec",
        "NonFiniteError",
        "Policy",
        "gym_schema",
    ),
    "config": ("RunConfig", "load_config"),
    "errors": (
        "BindingError",
        "CheckpointError",
        "ConfigError",
        "NodeCapacityError",
        "NumaCollectorsError",
        "PeerLostError",
        "PlacementError",
        "RingClosedError",
        "SchemaMismatchError",
        "TopologyError",
        "WorkerFailedError",
        "WorkerStartTimeoutError",
    ),
    "learner": ("Learner", "LearnerContext"),
    "placement": ("Placement", "PlacementRequest", "WorkerPlacement", "plan"),
    "pool": ("CollectorPool", "PoolOptions"),
    "rings": ("CompactRing", "Field", "Schema", "Span", "TransitionRing"),
    "snapshots": ("TensorSpec", "WeightSnapshot", "WeightSpec"),
    "topo": ("Topology",),
    "trainer": ("FanOutTrainer", "RunFailedError", "RunResult"),
    "worker": ("Launcher", "PinnedWorker", "StopSignals", "WorkerFailure", "WorkerGroup"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
