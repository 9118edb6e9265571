"""Checks of a slot before it is committed: nothing that is not finite reaches a buffer or a normaliser."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from numa_collectors.collector.context import CollectorContext, NonFiniteError

__all__ = ["FiniteCheck", "first_nonfinite", "first_observation_digests"]


def first_nonfinite(array: np.ndarray, scratch: np.ndarray | None = None) -> tuple[int, ...] | None:
    """Return the index of the first NaN or infinity in ``array``, or None.  ``scratch``: bool array of its shape to
    work in."""
    finite = np.isfinite(array, out=scratch) if scratch is not None else np.isfinite(array)
    if finite.all():
        return None
    return tuple(int(i) for i in np.argwhere(~finite)[0])


class FiniteCheck:
    """Checks every floating-point field of a slot, ``(num_envs, ...)`` each, at 2 to 5 us a field of a few kB."""

    def __init__(self, ctx: CollectorContext) -> None:
        self._ctx = ctx
        self._scratch: dict[str, np.ndarray] | None = None

    def poison(self, slot: Mapping[str, np.ndarray]) -> None:
        """Fill the floating-point fields with NaN, so that a field which the collector never writes is found."""
        for array in slot.values():
            if array.dtype.kind == "f":
                array.fill(np.nan)

    def check(self, slot: Mapping[str, np.ndarray], step: int) -> None:
        """Raise :class:`NonFiniteError` for the first value that is not finite."""
        scratch = self._scratch
        if scratch is None:
            scratch = {name: np.empty(a.shape, np.bool_) for name, a in slot.items() if a.dtype.kind == "f"}
            self._scratch = scratch
        for name, buffer in scratch.items():
            index = first_nonfinite(slot[name], buffer)
            if index is not None:
                self._raise(slot[name], index, name, step)

    def _raise(self, array: np.ndarray, index: tuple[int, ...], name: str, step: int) -> None:
        ctx, row = self._ctx, index[0]
        num_bad = int(np.count_nonzero(~np.isfinite(array)))
        where = f" at index {list(index[1:])}" if len(index) > 1 else ""
        never = (
            "; the whole field is NaN, as the slot was before the collector ran: it was never written"
            if (num_bad == array.size and np.isnan(array).all())
            else ""
        )
        raise NonFiniteError(
            f"{ctx.describe(row, step, name)}: expected finite values, got {array[index]}{where} ({num_bad} of "
            f"{array.size} values of this field are not finite{never}); the slot was not committed. Mend the "
            "environment or the policy, or set check_finite=false to let it through",
            rank=ctx.rank,
            env=ctx.env_offset + row,
            step=step,
            field=name,
        )


def first_observation_digests(slot: Mapping[str, np.ndarray]) -> list[int]:
    """Return one 48-bit digest for each environment of the observations (fields ``obs`` and ``obs/...``) in ``slot``.

    Equal digests of two environments right after reset mean that their first observations are equal byte for byte: the
    environment ignores its seed, or always starts in the same state.
    """
    fields = [array for name, array in slot.items() if name == "obs" or name.startswith("obs/")]
    if not fields:
        return []
    digests = []
    for row in range(len(fields[0])):
        digest = hashlib.blake2b(digest_size=6)
        for array in fields:
            digest.update(np.ascontiguousarray(array[row]).tobytes())
        digests.append(int.from_bytes(digest.digest(), "little"))
    return digests
