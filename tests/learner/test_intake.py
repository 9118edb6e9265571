"""Spans to tensors: views on the CPU, and one batch a round from all rings where they are copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from numa_collectors.exchange import Exchange
from numa_collectors.learner import DeviceIntake, _RoundCopier
from numa_collectors.rings import RING_LAYOUTS, Field, Schema, Span

SCHEMA = Schema(
    [
        Field("obs", "float32", (3,)),
        Field("image", "uint8", (2, 5)),
        Field("reward", "float64"),
        Field("next_obs", "float32", (3,)),
        Field("ended", "bool"),
    ]
)
"""Slots of three environments that are not a multiple of a cache line, so that a run of them has gaps."""

SHARDS = (3, 2, 4)
CAPACITY = 5


@contextmanager
def rings(layout: str) -> Iterator[tuple[Exchange, list[Any]]]:
    with ExitStack() as stack:
        made = [
            stack.enter_context(RING_LAYOUTS[layout].create(SCHEMA.with_leading(num_envs), capacity=CAPACITY))
            for num_envs in SHARDS
        ]
        exchange = Exchange(made, [])
        yield exchange, [ring.producer() for ring in made]
        exchange.close()


def push(producer: Any, num_envs: int, index: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([index, rank])
    slot = {}
    for field in SCHEMA.with_leading(num_envs).fields:
        slot[field.name] = (rng.random(field.shape) * 100).astype(field.dtype)
    assert producer.push(slot, step=index, timeout_s=0)
    return slot


def check(batch: dict[str, torch.Tensor], slots: Sequence[dict[str, np.ndarray]]) -> None:
    assert list(batch) == list(SCHEMA.names)
    for name, tensor in batch.items():
        expected = np.stack([slot[name] for slot in slots])
        assert (tuple(tensor.shape), tensor.numpy().dtype) == (expected.shape, expected.dtype)
        assert np.array_equal(tensor.numpy(), expected), name


@pytest.mark.parametrize("layout", ["plain", "compact"])
def test_on_the_cpu_tensors_are_the_rings_own_pages(layout: str) -> None:
    with rings(layout) as (exchange, producers):
        intake = DeviceIntake(exchange, "cpu")
        for index in range(2 * CAPACITY + 3):
            written = [push(producers[rank], SHARDS[rank], index, rank) for rank in range(len(SHARDS))]
            for rank, span in exchange.drain(load=intake.load):
                batch = intake.tensors(rank, span)
                check(batch, [written[rank]])
                for name, tensor in batch.items():
                    assert np.shares_memory(tensor.numpy(), span[name])
            batch, tensor = {}, None
        intake.close()


@pytest.mark.parametrize("pinned_sources", [False, True])
@pytest.mark.parametrize("layout", ["plain", "compact"])
def test_a_round_is_one_copy_of_all_rings(layout: str, pinned_sources: bool) -> None:
    """The path of a device, with the CPU as the device: what was copied outlives the slots and later rounds."""
    rng = np.random.default_rng(0)
    with rings(layout) as (exchange, producers):
        intake = DeviceIntake(exchange, "cpu")
        intake._copier = _RoundCopier(torch.device("cpu"), pinned_sources=pinned_sources)
        pending: list[list[dict[str, np.ndarray]]] = [[] for _ in SHARDS]
        kept: list[tuple[dict[str, torch.Tensor], list[dict[str, np.ndarray]]]] = []
        pushed = 0
        for _ in range(12):
            for rank, num_envs in enumerate(SHARDS):
                for _ in range(min(int(rng.integers(0, 3)), CAPACITY - len(pending[rank]))):
                    pending[rank].append(push(producers[rank], num_envs, pushed, rank))
                    pushed += 1
            for rank, span in exchange.drain(3, load=intake.load):
                slots = [pending[rank].pop(0) for _ in range(span.num_slots)]
                kept.append((intake.tensors(rank, span), slots))
        assert len(kept) > 12
        for batch, slots in kept:
            check(batch, slots)
        intake.close()


def test_a_span_that_was_not_loaded_is_brought_over_alone() -> None:
    with rings("plain") as (exchange, producers):
        intake = DeviceIntake(exchange, "cpu")
        intake._copier = _RoundCopier(torch.device("cpu"), pinned_sources=False)
        for index in range(2 * CAPACITY):  # the ring gives the same span object again after a lap
            written = push(producers[0], SHARDS[0], index, 0)
            for rank, span in exchange.drain():
                check(intake.tensors(rank, span), [written])
        intake.close()


def test_a_round_has_one_span_of_each_ring_and_what_a_body_did_not_finish_comes_again() -> None:
    rounds: list[list[tuple[int, int]]] = []

    def load(spans: Sequence[tuple[int, Span]]) -> None:
        rounds.append([(rank, span.num_slots) for rank, span in spans])

    with rings("plain") as (exchange, producers):
        for index in range(3):  # three slots on, so that five more wrap around the end
            for rank, num_envs in enumerate(SHARDS[:2]):
                push(producers[rank], num_envs, index, rank)
        assert [(rank, span.steps.tolist()) for rank, span in exchange.drain()] == [(1, [0, 1, 2]), (0, [0, 1, 2])]
        for index in range(3, 8):
            push(producers[0], SHARDS[0], index, 0)
        push(producers[1], SHARDS[1], 3, 1)
        for rank, _ in exchange.drain(4, load=load):
            if rank == 1:
                break  # of which ring 1 keeps its slot, while ring 0 has given back the one before
        assert rounds == [[(0, 2), (1, 1)]]
        rest = [(rank, span.steps.tolist()) for rank, span in exchange.drain(4, load=load)]
        assert sorted(rest) == [(0, [5, 6, 7]), (1, [3])]
        assert rounds[1:] == [[(0, 3), (1, 1)]]
