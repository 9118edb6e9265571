"""A learner that keeps the books of what it takes in, and may end its own process in the middle of a publication."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from numa_collectors.learner import LearnerContext
from numa_collectors.snapshots import SnapshotPublisher
from tests.chaos.payload import WEIGHTS, HalfCopy, Ledger

__all__ = ["ChaosLearner"]


class ChaosLearner:
    """Appends ``[its pid, rank, first serial, last serial]`` of each span to ``books`` before it checks the span.

    ``orders``: a directory with one file for each learner that is to end itself; the next learner takes one away.
    """

    def __init__(self, ctx: LearnerContext, *, books: Path, orders: Path, seed: int) -> None:
        self._books = os.open(books, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._ledger = Ledger(ctx.num_collectors, begun=False)
        self._updates = 0
        self._num_publications = 0
        left = sorted(orders.iterdir())
        if left:
            left[0].unlink()
            copies = random.Random(f"{seed} {len(left)}").randrange(10, 150)
            _die_within_a_publication(copies, books.with_name("publications"))

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        span = {name: tensor.cpu().numpy() for name, tensor in batch.items()}
        serials = span["serial"].reshape(len(span["serial"]), -1)[:, 0]
        os.write(self._books, f"{json.dumps([os.getpid(), rank, int(serials[0]), int(serials[-1])])}\n".encode())
        self._ledger.take(rank, span)

    def update(self, num_updates: int) -> dict[str, float]:
        self._updates += num_updates
        return {"updates": float(self._updates)}

    def weights(self) -> dict[str, torch.Tensor]:
        # A value that no other publication of the run has: the version is not for the learner to know.
        self._num_publications += 1
        value = os.getpid() * 1_000_000 + self._num_publications
        return {name: torch.full((60_000,), value, dtype=torch.int64) for name in WEIGHTS.names}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]


def _die_within_a_publication(copies: int, notes: Path) -> None:
    """Have the process end when half of the weights are copied to a collector, after ``copies`` whole ones; note it."""
    publish_bytes = SnapshotPublisher.publish_bytes
    done = [0]

    def counting(publisher: SnapshotPublisher, flat: memoryview, version: int) -> None:
        done[0] += 1
        if done[0] > copies:
            with notes.open("a") as file:
                file.write("one more\n")
            publisher._flat = [HalfCopy(array) for array in publisher._flat]  # type: ignore[misc]
        publish_bytes(publisher, flat, version)

    SnapshotPublisher.publish_bytes = counting  # type: ignore[method-assign]
