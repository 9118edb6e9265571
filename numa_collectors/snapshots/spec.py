"""Which tensors a snapshot holds, and where each lies in the flat image."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TENSOR_ALIGNMENT_BYTES", "TensorSpec", "WeightSpec"]

Array = npt.NDArray[Any]

TENSOR_ALIGNMENT_BYTES = 64

# Dtypes that numpy does not know travel as unsigned integers of their size; the bits are what counts.
_AS_INTEGERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that holds a tensor's bits: its own, or an unsigned integer for bfloat16 and float8."""
    return np.dtype(_AS_INTEGERS.get(dtype, dtype))


def _dtype_name(dtype: object) -> str:
    """``float32`` from numpy dtypes, ``torch.float32`` and names alike."""
    name = str(dtype) if not isinstance(dtype, type) else np.dtype(dtype).name
    return name.removeprefix("torch.")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: any numpy dtype of bool, integers, floats or complex, or ``"bfloat16"`` or a float8 name of torch."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a tensor's name must be a non-empty string, got {self.name!r}")
        try:
            storage = storage_dtype(_dtype_name(self.dtype))
        except TypeError as error:
            raise ValueError(f"tensor {self.name!r}: {self.dtype!r} is not a dtype that can be shared") from error
        if storage.kind not in "biufc" or not storage.isnative:
            raise ValueError(
                f"tensor {self.name!r}: dtype {self.dtype!r} cannot be shared between processes; use a bool, integer, "
                "float or complex dtype in native byte order, bfloat16 or float8"
            )
        shape = tuple(int(length) for length in self.shape)
        if any(length < 1 for length in shape):
            raise ValueError(f"tensor {self.name!r}: shape {shape} holds no bytes; every dimension must be at least 1")
        name = _dtype_name(self.dtype)
        object.__setattr__(self, "dtype", name if name in _AS_INTEGERS else storage.name)
        object.__setattr__(self, "shape", shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class WeightSpec:
    """Named tensors in order.

    The flat image of a version holds the tensors in this order, in C order and native byte order, each beginning at a
    multiple of 64 bytes (:attr:`offsets`); :attr:`nbytes` is its size.  A learner may keep one flat host buffer of
    that form.
    """

    tensors: tuple[TensorSpec, ...]

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        object.__setattr__(self, "tensors", tuple(tensors))
        if not self.tensors:
            raise ValueError("a weight spec needs at least one tensor")
        for tensor in self.tensors:
            if not isinstance(tensor, TensorSpec):
                raise ValueError(f"a weight spec holds TensorSpec objects, got {tensor!r}")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"tensor names must differ; given more than once: {', '.join(twice)}")

    @classmethod
    def like(cls, tensors: Mapping[str, Any]) -> WeightSpec:
        """The spec of a mapping of arrays, torch tensors, or anything with ``dtype`` and ``shape``."""
        return cls(TensorSpec(name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in order."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each tensor in the flat image."""
        offsets: dict[str, int] = {}
        end = 0
        for tensor in self.tensors:
            start = -(-end // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
            offsets[tensor.name] = start
            end = start + tensor.nbytes
        return offsets

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the flat image, a multiple of 64."""
        last = self.tensors[-1]
        return -(-(self.offsets[last.name] + last.nbytes) // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES

    @cached_property
    def fingerprint(self) -> int:
        """63-bit digest of names, dtypes, shapes and order; compared when a process attaches."""
        text = ";".join(f"{tensor.name}:{tensor.dtype}:{tensor.shape}" for tensor in self.tensors)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def views(self, buffer: memoryview | Array, offset: int = 0) -> dict[str, Array]:
        """Arrays of the tensors inside a flat image that begins ``offset`` bytes into ``buffer``.

        bfloat16 and float8 tensors are unsigned integers of the same size.
        """
        # np.ndarray(buffer=memoryview) exports nothing, so that the memory could be unmapped under it; np.frombuffer
        # does.
        flat = np.frombuffer(buffer, np.uint8)
        return {
            tensor.name: np.ndarray(
                tensor.shape, storage_dtype(tensor.dtype), buffer=flat, offset=offset + self.offsets[tensor.name]
            )
            for tensor in self.tensors
        }
