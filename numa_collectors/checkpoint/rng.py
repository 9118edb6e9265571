"""States of random generators as plain numbers, strings and tensors, so that loading them executes nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from numa_collectors.errors import CheckpointError

__all__ = ["generator_state", "restore_generator", "restore_rng", "rng_state"]

_ARRAY = "ndarray"


def rng_state() -> dict[str, Any]:
    """Return the states of ``random``, numpy's legacy generator, torch and, where they are in use, all CUDA devices."""
    state: dict[str, Any] = {
        "python": _plain(random.getstate()),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
    }
    # Asking an unused CUDA for its states would create a context in this process.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["torch_cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put back what :func:`rng_state` returned; CUDA states only where the number of devices is the same.

    Raises :class:`CheckpointError` where ``state`` is not of that form.
    """
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(_numpy(state["numpy"]))
        torch.set_rng_state(state["torch"])
        cuda = state.get("torch_cuda", [])
        if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"expected generator states as rng_state() returns them, got {error!r}") from error


def generator_state(generator: np.random.Generator) -> dict[str, Any]:
    """Return the state of a numpy generator."""
    state: dict[str, Any] = _plain(generator.bit_generator.state)
    return state


def restore_generator(generator: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Put back what :func:`generator_state` returned, into a generator of the same kind."""
    try:
        generator.bit_generator.state = _numpy(state)
    except (KeyError, TypeError, ValueError) as error:
        name = type(generator.bit_generator).__name__
        raise CheckpointError(f"expected the state of a {name} generator, got {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {_ARRAY: str(value.dtype), "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value


def _numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _ARRAY in value:
            return np.asarray(value["values"], dtype=value[_ARRAY])
        return {key: _numpy(part) for key, part in value.items()}
    return value
