"""How many slots each collector shall commit: words that the parent writes and the collectors read before every slot."""

from __future__ import annotations

from numa_collectors.shm import Region

__all__ = ["SharedQuota"]


class SharedQuota:
    """The quota of collector ``rank``, in a region with one 8-byte word a collector; picklable while spawning."""

    def __init__(self, region: Region, rank: int) -> None:
        self._region = region
        self._rank = rank
        self._words = region.buf.cast("q")

    def __call__(self) -> int | None:
        """Return the slots to commit over all generations, None for no end."""
        quota = self._words[self._rank]
        return None if quota < 0 else int(quota)

    def set(self, quota: int | None) -> None:
        """Change it; only the parent does."""
        self._words[self._rank] = -1 if quota is None else quota

    def close(self) -> None:
        """Let go of the region's memory; idempotent."""
        self._words.release()

    def __reduce__(self) -> tuple[object, ...]:
        return (SharedQuota, (self._region, self._rank))
