"""Waiting for any of several workers."""

from __future__ import annotations

import select
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numa_collectors.worker._handle import Handle

__all__ = ["wait_any"]


def wait_any(handles: Iterable[Handle], timeout_s: float | None) -> None:
    """Block until one of the workers has a message or has ended, at most ``timeout_s``, and half a second in any case.

    The bound covers descriptors that another thread closed meanwhile and workers that another thread started.
    """
    poller = select.poll()
    for handle in handles:
        for descriptor in handle.descriptors():
            poller.register(descriptor, select.POLLIN)
    poller.poll(1000 * max(0.0, min(0.5, 0.5 if timeout_s is None else timeout_s)))
