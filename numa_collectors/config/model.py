"""The one model of a run's settings: names, types, ranges, defaults, and what contradicts what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from numa_collectors.config.messages import problems_of
from numa_collectors.errors import ConfigError

__all__ = ["SECTIONS", "RunConfig"]

STRICT_LEAD_SLOTS = 1


def _number(value: object) -> object:
    """Refuse a truth value where a number is expected, and read ``1e6``, which YAML leaves as text."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a number")
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and abs(number) <= 2**53 else value
    return value


def _off_word(value: object) -> object:
    """YAML 1.1 reads an unquoted ``off`` as false."""
    return "off" if value is False else value


def _optional_path_word(value: object) -> object:
    return {True: "latest", False: None}[value] if isinstance(value, bool) else value


def _nodes(value: object) -> object:
    """Read ``"auto"``, ``2``, ``"0,1"`` and ``"0-3"``; order and repetition stay: collector i gets entry i mod n."""
    if isinstance(value, bool):
        raise ValueError("a truth value is not a list of nodes")
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, str) or value.strip() == "auto":
        return value.strip() if isinstance(value, str) else value
    nodes: list[int] = []
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first + last) > 12:
            raise ValueError("not a list of node ids")
        nodes.extend(range(int(first), min(int(last if dash else first), int(first) + 4096) + 1))
    return tuple(nodes)


# The validator stands last, outermost: before the bounds, pydantic would leave them out of the JSON schema.
_READ = BeforeValidator(_number)
Count = Annotated[int, Field(ge=1, le=2**62), _READ]
Natural = Annotated[int, Field(ge=0, le=2**62), _READ]
NodeId = Annotated[int, Field(ge=0, lt=4096), _READ]
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), _READ]
Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False), _READ]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]+)?)$")]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
NodeList = Annotated[tuple[NodeId, ...], Field(min_length=1)]


class RunConfig(BaseModel):
    """Every setting of a run.

    Frozen; an unknown name is refused with the nearest known one.  Whatever is wrong raises
    :class:`~numa_collectors.errors.ConfigError` with one line a problem, before anything is started or written.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, hide_input_in_errors=True
    )

    collector: ImportPath | None = None
    """Import path `module:attribute` of the collector factory; used by `python -m numa_collectors.train`."""
    learner: ImportPath | None = None
    """Import path `module:attribute` of the learner factory; used by `python -m numa_collectors.train`."""
    collector_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the collector factory named by import path."""
    learner_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments bound to the learner factory named by import path."""

    num_envs: Annotated[int, Field(ge=1, le=2**24), _READ] = 64
    """Environments of all collectors together; the shards differ by at most one (7 over 3 is 3/2/2)."""
    num_collectors: Annotated[int, Field(ge=1, le=4096), _READ] = 1
    """Collector processes. More than one turns binding on."""
    total_env_steps: Count = 1_000_000
    """Environment steps of all environments together; rounded up to whole slots."""
    seed: Annotated[int, Field(ge=0, lt=2**32), _READ] = 0
    """Seed of the run. Collector 0 gets it as it is, everything else a stream derived from it."""
    inline: bool = False
    """Run collectors and learner in turn in this process: for debugging, and byte-reproducible."""

    numa_nodes: Annotated[Literal["auto"] | NodeList | None, BeforeValidator(_nodes)] = None
    """Nodes for the collectors: `auto` spreads them, a list (`0,1`) gives collector i its entry i modulo the length."""
    cpus_per_collector: Count | None = None
    """Logical CPUs of each collector; whole cores first. Left out, the cores that the learner leaves are shared out."""
    learner_node: NodeId | None = None
    """Node of the learner; left out, the node of its GPU."""
    learner_cpus: Count | None = None
    """Logical CPUs reserved for the learner; left out, two whole cores where binding is on and there are enough."""
    oversubscribe: bool = False
    """Let workers share CPUs where there are too few."""
    binding: Annotated[Literal["auto", "require", "off"], BeforeValidator(_off_word)] = "auto"
    """`auto` takes the best that the kernel grants and warns once, `require` fails instead, `off` binds nothing."""
    memory_policy: Literal["preferred", "bind", "interleave", "local", "none"] = "preferred"
    """Memory policy of the workers. `bind` fails hard when the node is full."""
    huge_pages: bool = False
    """Ask for transparent huge pages for rings and snapshots."""

    ring_capacity: Annotated[int, Field(ge=1, le=2**20), _READ] | None = 64
    """Slots of each ring, each with one transition of every environment of the collector.

    `null`: as many as `ring_max_bytes` holds.
    """
    ring_max_bytes: Count | None = None
    """Most bytes of one ring; caps `ring_capacity`."""
    ring_layout: Literal["plain", "compact"] = "plain"
    """`compact` stores each observation once: about half the bytes where `obs` and `next_obs` are most of a slot."""
    max_lead_slots: Count | None = None
    """Slots by which a collector may lead the learner; left out, 1 with `strict`, the ring's capacity otherwise."""
    max_ingest_per_iter: Count = 8
    """Most slots taken from one ring in one round of the learner; with `strict` it takes them one by one."""
    check_finite: bool = True
    """Refuse a slot with NaN or infinite values, naming collector, environment and step."""

    utd_mode: Literal["strict", "learner_bound"] = "strict"
    """`strict`: exactly `num_updates` for every `num_envs` transitions, waiting for data.

    `learner_bound`: once started it never waits; without new data it updates on what the buffer holds.
    """
    num_updates: Count = 1
    """Updates for every `num_envs` transitions (`strict`), or in each round (`learner_bound`)."""
    utd_min: Ratio | None = None
    """With `learner_bound`: below this many updates an environment step, collectors wait."""
    utd_max: Ratio | None = None
    """With `learner_bound`: above this many updates an environment step, the learner waits."""
    learning_starts: Natural = 0
    """Environment steps that the buffer must hold before the first update."""

    weight_publish_interval: Count = 1
    """Updates from one publication of weights to the next."""
    weight_poll_interval: Count = 1
    """Slots from one look of a collector for new weights to the next."""
    max_policy_lag: Count | None = None
    """Versions by which the weights that acted may be behind the newest.

    Beyond, a collector loads newer ones first, and waits while its oldest slot that the learner has not taken is that old.
    Nothing is dropped. Left out, there is no bound.
    """

    learner_device: Device = "cuda"
    """Device of the learner. `cuda` without an index falls back to the CPU with one warning where there is no CUDA.

    Under `torchrun` it is the GPU of the local rank.
    """
    collector_inference_device: Device = "cuda"
    """Device on which collectors run the policy; same fallback."""

    rank: Annotated[int, Field(ge=0, le=2**20), _READ] | None = None
    """Which of `world_size` trainers this is; left out, the variable `RANK` that `torchrun` sets, else 0."""
    world_size: Annotated[int, Field(ge=1, le=2**20), _READ] | None = None
    """Trainers of the run, on all hosts; left out, `WORLD_SIZE`, else 1. `1` is a run alone, whatever the environment says."""
    local_rank: Annotated[int, Field(ge=0, le=2**20), _READ] | None = None
    """Which of the trainers on this host this is; left out, `LOCAL_RANK`. Chooses its share of the cores, and its GPU."""
    local_world_size: Annotated[int, Field(ge=1, le=2**20), _READ] | None = None
    """Trainers on this host that share its cores; left out, `LOCAL_WORLD_SIZE`."""

    on_collector_exit: Literal["raise", "restart", "continue"] = "raise"
    """What the death of a collector means: end of the run, a new generation, or one collector fewer."""
    min_collectors: Count = 1
    """Fewest live collectors with which the run goes on."""
    max_restarts: Natural = 3
    """Restarts of one worker before its death ends the run."""
    restart_backoff_s: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False), _READ] = 1.0
    """Pause before the first restart, in seconds; doubled by each further one."""
    on_learner_exit: Literal["raise", "restart"] = "raise"
    """What the death of the learner means: end of the run, or a restart from the last checkpoint."""
    hang_timeout_s: Seconds | None = 60.0
    """Silence of a worker, in seconds, after which it counts as hung; `null` turns the watch off."""
    start_timeout_s: Seconds = 120.0
    """Time for all workers to become ready, in seconds."""
    shutdown_timeout_s: Seconds = 10.0
    """Time for all workers to end, in seconds; then they are killed."""

    run_dir: Path | None = None
    """Directory of the run's files; left out, `runs/<date>_<time>`."""
    resume: Annotated[str | None, BeforeValidator(_optional_path_word)] = None
    """`latest` continues in `run_dir`; a path starts from that checkpoint or run directory."""
    checkpoint_interval_s: Seconds | None = 300.0
    """Seconds from one checkpoint to the next; `null`: only at the end."""
    keep_checkpoints: Count = 3
    """Newest checkpoints that are kept."""
    log_interval_s: Seconds = 5.0
    """Seconds from one log point to the next."""
    tensorboard: bool = True
    """Write TensorBoard events beside the JSONL file."""
    console: Literal["auto", "panel", "plain", "quiet"] = "auto"
    """`auto` shows the panel on a terminal and plain lines elsewhere."""

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            self._fill(values, origins={})

        @classmethod
        def model_validate(cls, obj: Any, **_: Any) -> RunConfig:
            return obj if isinstance(obj, cls) else cls(**obj)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], origins: Mapping[str, str]) -> RunConfig:
        """Return the configuration of ``values``; ``origins`` says, for each name, where it was set."""
        config = cls.__new__(cls)
        config._fill(values, origins)
        return config

    def _fill(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        try:
            BaseModel.__init__(self, **values)
        except ValidationError as error:
            raise ConfigError("\n".join(problems_of(error, type(self), values, origins))) from None

    @model_validator(mode="after")
    def _check_together(self) -> RunConfig:
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with ``changes``, validated like a new configuration (``model_copy`` is not)."""
        return RunConfig(**{name: getattr(self, name) for name in self.model_fields_set} | changes)

    @property
    def quiet(self) -> bool:
        """Whether nothing but errors goes to the console."""
        return self.console == "quiet"

    @property
    def slots_per_collector(self) -> int:
        """Slots that each collector writes in the whole run: ``ceil(total_env_steps / num_envs)``."""
        return -(-self.total_env_steps // self.num_envs)

    @property
    def planned_env_steps(self) -> int:
        """``total_env_steps`` rounded up to whole slots of all collectors."""
        return self.slots_per_collector * self.num_envs

    @property
    def effective_lead_slots(self) -> int | None:
        """Slots by which a collector may lead; None where only the ring, sized by ``ring_max_bytes``, bounds it."""
        if self.max_lead_slots is not None:
            return self.max_lead_slots
        if self.utd_mode == "learner_bound":
            return self.ring_capacity
        return STRICT_LEAD_SLOTS

    def envs_of(self, rank: int) -> int:
        """Return the number of environments of collector ``rank``; the first collectors take the remainder."""
        self._check_rank(rank)
        share, remainder = divmod(self.num_envs, self.num_collectors)
        return share + (rank < remainder)

    def env_offset(self, rank: int) -> int:
        """Return the run-wide index of the first environment of collector ``rank``."""
        self._check_rank(rank)
        share, remainder = divmod(self.num_envs, self.num_collectors)
        return rank * share + min(rank, remainder)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_collectors:
            raise IndexError(f"expected a rank from 0 to {self.num_collectors - 1}, got {rank}")

    def placement_values(self, learner_gpu: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments of a ``PlacementRequest``; ``learner_gpu`` is the resolved device's ordinal."""
        names = ("num_collectors", "numa_nodes", "cpus_per_collector", "learner_node", "learner_cpus", "oversubscribe")
        return {name: getattr(self, name) for name in names} | {"learner_gpu": learner_gpu}


def _contradictions(config: RunConfig) -> Iterator[str]:
    yield from _count_contradictions(config)
    yield from _utd_contradictions(config)
    yield from _lifecycle_contradictions(config)


def _count_contradictions(config: RunConfig) -> Iterator[str]:
    if config.num_collectors > config.num_envs:
        yield (
            f"num_collectors: expected at most num_envs={config.num_envs}, got {config.num_collectors}; "
            f"each collector needs an environment: lower num_collectors or raise num_envs"
        )
    if config.min_collectors > config.num_collectors:
        yield (
            f"min_collectors: expected at most num_collectors={config.num_collectors}, got {config.min_collectors}; "
            f"lower min_collectors or raise num_collectors"
        )
    if config.ring_capacity is None and config.ring_max_bytes is None:
        yield (
            "ring_capacity: expected a number of slots, or ring_max_bytes beside null, got null for both; "
            "set one of the two"
        )
    lead, capacity = config.max_lead_slots, config.ring_capacity
    if lead is not None and capacity is not None and lead > capacity:
        yield (
            f"max_lead_slots: expected at most ring_capacity={capacity}, got {lead}; "
            f"lower max_lead_slots or raise ring_capacity"
        )
    if config.learning_starts >= config.planned_env_steps:
        yield (
            f"learning_starts: expected less than total_env_steps={config.total_env_steps}, "
            f"got {config.learning_starts}; the run would never train: lower learning_starts or raise total_env_steps"
        )


def _utd_contradictions(config: RunConfig) -> Iterator[str]:
    low, high = config.utd_min, config.utd_max
    if config.utd_mode == "strict" and (low is not None or high is not None):
        name = "utd_min" if low is not None else "utd_max"
        yield (
            f"{name}: expected null with utd_mode='strict', got {low if low is not None else high}; "
            f"strict keeps the ratio by itself: leave it out or set utd_mode=learner_bound"
        )
    if low is not None and high is not None and low > high:
        yield f"utd_min: expected at most utd_max={high}, got {low}; exchange the two or leave one out"


def _lifecycle_contradictions(config: RunConfig) -> Iterator[str]:
    if config.inline and config.binding == "require":
        yield (
            "binding: expected 'auto' or 'off' with inline=true, got 'require'; "
            "one process cannot be bound apart: set binding=auto or inline=false"
        )
    if config.max_restarts == 0 and "restart" in (config.on_collector_exit, config.on_learner_exit):
        yield (
            "max_restarts: expected at least 1 with a 'restart' on exit, got 0; "
            "raise max_restarts or set on_collector_exit and on_learner_exit to 'raise'"
        )
    if config.on_learner_exit == "restart" and config.checkpoint_interval_s is None:
        yield (
            "checkpoint_interval_s: expected seconds with on_learner_exit='restart', got null; "
            "a learner restarts from a checkpoint: set an interval or on_learner_exit=raise"
        )
    if config.resume == "latest" and config.run_dir is None:
        yield "run_dir: expected a directory with resume='latest', got null; set run_dir to the run to continue"


SECTIONS: Mapping[str, str] = {
    "collector": "What runs",
    "num_envs": "Size of the run",
    "numa_nodes": "Placement",
    "ring_capacity": "Rings",
    "utd_mode": "Updates",
    "weight_publish_interval": "Weights",
    "learner_device": "Devices",
    "rank": "Several trainers (torchrun)",
    "on_collector_exit": "Failures",
    "run_dir": "Files and output",
}
"""Titles of the groups of fields, by the first field of each."""
