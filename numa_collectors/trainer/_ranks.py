"""Which of several trainers this process is: what ``torchrun`` exports, or what the configuration says instead.

Guarantees
    * Collector i of the whole run has the same seeds whichever rank has it; collectors of different ranks never share one.
    * With ``utd_mode="strict"`` all ranks make the same number of updates, so that a collective in each is safe.

Not covered
    * Ranks that were given different configurations: nothing here talks to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from numa_collectors.config import RunConfig
from numa_collectors.errors import ConfigError
from numa_collectors.seeds import stream_seed

__all__ = ["Ranks", "resolve_ranks"]

_FIELDS = ("rank", "world_size", "local_rank", "local_world_size")


@dataclass(frozen=True)
class Ranks:
    """One trainer of ``world_size``, one of ``local_world_size`` on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes metrics and checkpoints and shows the console."""
        return self.rank == 0

    def directory(self, run_dir: Path) -> Path:
        """Return where this rank's own files go: ``run_dir``, or ``run_dir/rank_<r>`` for all but rank 0."""
        return run_dir if self.is_main else run_dir / f"rank_{self.rank}"

    def learner_seed(self, seed: int, generation: int = 0) -> int:
        """Return the seed of this rank's learner; rank 0 has that of a run alone, also after a resume."""
        return stream_seed(seed, "learner", self.rank, 0 if self.is_main else generation)


def resolve_ranks(config: RunConfig, env: Mapping[str, str]) -> Ranks:
    """Return the rank that ``config`` says, else the one in torchrun's variables, else that of a run alone.

    ``world_size=1`` in the configuration is a run alone, whatever the environment says.  Raises ``ConfigError`` where pieces
    are missing or contradict each other.
    """
    if config.world_size == 1:
        found: dict[str, int] = asdict(Ranks()) | {
            name: value for name in _FIELDS if (value := getattr(config, name)) is not None
        }
        return _checked(found, "the configuration")
    found = {}
    for name in _FIELDS:
        given = getattr(config, name)
        text = env.get(name.upper())
        if given is not None:
            found[name] = given
        elif text is not None:
            found[name] = _number(name.upper(), text)
    if not found:
        return Ranks()
    missing = [name for name in _FIELDS if name not in found]
    if missing:
        raise ConfigError(
            f"{missing[0]}: expected all of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or none, got no "
            f"{' and no '.join(name.upper() for name in missing)}; start with torchrun, set the missing ones, or set "
            "world_size=1 for a run alone"
        )
    return _checked(found, "the environment and the configuration")


def _number(variable: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(
            f"{variable.lower()}: expected a whole number in the environment variable {variable}, got {text!r}; start with "
            "torchrun, or set world_size=1 for a run alone"
        )
    return int(text)


def _checked(found: Mapping[str, int], source: str) -> Ranks:
    ranks = Ranks(**found)
    for name, holds, expected in (
        ("rank", ranks.rank < ranks.world_size, f"less than world_size={ranks.world_size}"),
        ("local_world_size", ranks.local_world_size <= ranks.world_size, f"at most world_size={ranks.world_size}"),
        (
            "local_rank",
            ranks.local_rank < ranks.local_world_size,
            f"less than local_world_size={ranks.local_world_size}",
        ),
        ("local_rank", ranks.local_rank <= ranks.rank, f"at most rank={ranks.rank}"),
    ):
        if not holds:
            raise ConfigError(
                f"{name}: expected {expected}, got {found[name]}, in {source}; start with torchrun, correct it, or set "
                "world_size=1 for a run alone"
            )
    return ranks
