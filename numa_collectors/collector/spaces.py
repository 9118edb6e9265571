"""From Gymnasium spaces to the fields of a slot.  Reads spaces by their type's name, so that Gymnasium need not be
imported.

Fields of a slot, per environment:

=============== ============================ ==========================================================================
field           dtype, shape                 meaning
=============== ============================ ==========================================================================
``obs``         the space's                  what was acted on; dict and tuple spaces: one field a leaf, ``obs/<path>``
``action``      the space's                  what the environment was given
``reward``      float32, ``()``
``terminated``  bool, ``()``                 the episode ended in itself: the value of ``next_obs`` is 0
``truncated``   bool, ``()``                 the episode was cut off (time limit): bootstrap from ``next_obs``
``next_obs``    as ``obs``                   what followed; where the episode ended its true last observation, never
                                             that of the reset
``valid``       bool, ``()``                 only with next-step autoreset: False marks a row to be left out
=============== ============================ ==========================================================================

Floating-point observations and actions are stored as ``float_dtype`` (float32 by default; ``None`` keeps the space's
own); integers and uint8 images stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from numa_collectors.errors import SchemaMismatchError
from numa_collectors.rings import Field, Schema

__all__ = ["GymSpec", "Leaf", "action_leaf", "leaves", "slot_schema"]


@dataclass(frozen=True)
class Leaf:
    """One array of a possibly nested space.  ``path``: the keys that lead to it, empty for a space that is one
    array."""

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        return "/".join(str(part) for part in self.path)

    def field(self, prefix: str) -> str:
        return f"{prefix}/{self.key}" if self.path else prefix

    def get(self, nested: Any) -> Any:
        """Return this leaf's array out of an observation as the environment gives it."""
        for part in self.path:
            nested = nested[part]
        return nested


@dataclass(frozen=True)
class GymSpec:
    """What one environment of a kind looks like: the schema of its slot's fields, its spaces and its autoreset mode.

    ``schema`` describes one environment; the ring's is ``schema.with_leading(num_envs)``.  ``autoreset_mode`` is
    ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``.  ``max_episode_steps`` is ``None`` where the environment
    declares none.
    """

    schema: Schema
    observation_space: Any
    action_space: Any
    autoreset_mode: str
    obs_leaves: tuple[Leaf, ...]
    action: Leaf
    max_episode_steps: int | None = None

    @property
    def num_obs(self) -> int:
        """Return the number of values of one observation, all leaves together."""
        return sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in self.obs_leaves)


def _box(space: Any) -> tuple[str, tuple[int, ...]]:
    return np.dtype(space.dtype).name, tuple(int(n) for n in space.shape)


# One array of fixed size each; the other spaces of Gymnasium (Text, Graph, Sequence, OneOf) have none.
_ARRAYS: Mapping[str, Callable[[Any], tuple[str, tuple[int, ...]]]] = {
    "Box": _box,
    "MultiBinary": _box,
    "MultiDiscrete": _box,
    "Discrete": lambda space: (np.dtype(space.dtype).name, ()),
}


def _kind(space: Any) -> str:
    for cls in type(space).__mro__:
        if cls.__name__ in _ARRAYS or cls.__name__ in ("Dict", "Tuple"):
            return cls.__name__
    return type(space).__name__


def _stored(dtype: str, float_dtype: str | None) -> str:
    return float_dtype if float_dtype is not None and np.dtype(dtype).kind == "f" else dtype


def leaves(space: Any, float_dtype: str | None = "float32") -> tuple[Leaf, ...]:
    """Return the arrays of ``space`` in the space's own order; raise SchemaMismatchError for a space without a fixed
    size."""
    return tuple(_walk(space, (), float_dtype))


def _walk(space: Any, path: tuple[str | int, ...], float_dtype: str | None) -> Iterator[Leaf]:
    kind = _kind(space)
    if kind in _ARRAYS:
        dtype, shape = _ARRAYS[kind](space)
        yield Leaf(path, _stored(dtype, float_dtype), shape)
    elif kind == "Dict":
        for key, child in space.spaces.items():
            if "/" in str(key):
                raise SchemaMismatchError(f"observation key {key!r}: expected one without '/', which separates levels")
            yield from _walk(child, (*path, key), float_dtype)
    elif kind == "Tuple":
        for index, child in enumerate(space.spaces):
            yield from _walk(child, (*path, index), float_dtype)
    else:
        where = "/".join(str(part) for part in path)
        raise SchemaMismatchError(
            f"space {where or '(whole)'} is a {kind}: expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict "
            f"or Tuple of them, got {space!r}; a slot has a fixed size, so wrap the environment to give arrays"
        )


def action_leaf(space: Any, float_dtype: str | None = "float32") -> Leaf:
    """Return the one array of an action space; raise SchemaMismatchError for nested action spaces."""
    found = leaves(space, float_dtype)
    if len(found) != 1 or found[0].path:
        raise SchemaMismatchError(
            f"action space: expected one Box, Discrete, MultiDiscrete or MultiBinary, got {space!r}; flatten it with "
            "gymnasium.wrappers or a wrapper of your own"
        )
    return found[0]


def slot_schema(obs: tuple[Leaf, ...], action: Leaf, *, valid: bool) -> Schema:
    """Return the fields of one environment's transition; ``valid`` adds the mask of next-step autoreset."""
    fields = [Field(leaf.field("obs"), leaf.dtype, leaf.shape) for leaf in obs]
    fields.append(Field("action", action.dtype, action.shape))
    fields.append(Field("reward", "float32", ()))
    fields.append(Field("terminated", "bool", ()))
    fields.append(Field("truncated", "bool", ()))
    fields.extend(Field(leaf.field("next_obs"), leaf.dtype, leaf.shape) for leaf in obs)
    if valid:
        fields.append(Field("valid", "bool", ()))
    return Schema(tuple(fields))
