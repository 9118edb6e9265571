"""The protocols under every interleaving, and the explorer under errors that it must find."""

from __future__ import annotations

import functools

import pytest

from numa_collectors.testing.model import Counterexample, MemoryModel, Program, explore
from numa_collectors.testing.protocols import (
    RING_MUTANTS,
    SNAPSHOT_MUTANTS,
    check_ring,
    check_snapshot,
    explore_all,
)


def test_no_interleaving_breaks_ring_or_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = list(explore_all())
    with capsys.disabled():
        print()
        for name, outcome in outcomes:
            print(f"    {name}: {outcome.num_states} states")
    assert {name: outcome.error for name, outcome in outcomes if outcome.error is not None} == {}
    assert sum(outcome.num_states for _, outcome in outcomes) > 50_000, "something shrank the model"


@functools.cache
def right_ring(model: MemoryModel, kill: bool) -> Counterexample | None:
    return check_ring(model, num_slots=2, capacity=1, kill=kill).error


@pytest.mark.parametrize("mutant", RING_MUTANTS)
def test_the_explorer_finds_what_is_wrong_with_a_ring(mutant: str) -> None:
    model = RING_MUTANTS[mutant]
    kill = "successor" in mutant
    assert check_ring(model, num_slots=2, capacity=1, kill=kill, mutant=mutant).error is not None
    assert right_ring(model, kill) is None


@pytest.mark.parametrize("mutant", SNAPSHOT_MUTANTS)
def test_the_explorer_finds_what_is_wrong_with_a_snapshot(mutant: str) -> None:
    model = SNAPSHOT_MUTANTS[mutant]
    assert check_snapshot(model, num_versions=3, num_polls=2, mutant=mutant).error is not None


def litmus(fenced: bool, swapped: bool = False) -> list[Program]:
    """Two threads that each store one word and load the other's (store buffering), or pass a message."""
    programs = []
    for mine in (0, 1):
        program = Program((-1,), frozenset({0, 1}))
        program.store(mine, 1)
        if fenced:
            program.fence()
        program.load(0, 1 - mine)
        program.store(2 + mine, lambda r: 1 + r[0])
        programs.append(program)
    judge = Program((0, 0), frozenset({2, 3}))
    judge.label("look")
    judge.load(0, 2)
    judge.load(1, 3)
    judge.jump("look", lambda r: 0 in r)
    judge.check(lambda r: r != (1, 1), "both read the old value")
    return [*programs, judge]


def test_store_buffering_is_seen_without_a_fence_and_not_with_one() -> None:
    assert explore(litmus(fenced=False), 4, "tso").error is not None
    assert explore(litmus(fenced=True), 4, "tso").error is None
    assert explore(litmus(fenced=True), 4, "weak").error is None


@pytest.mark.parametrize(
    ("model", "writer_fenced", "reader_fenced", "broken"),
    [
        ("tso", False, False, False),
        ("weak", False, False, True),
        ("weak", True, False, True),
        ("weak", False, True, True),
        ("weak", True, True, False),
    ],
)
def test_message_passing_needs_both_fences_where_order_is_weak(
    model: str, writer_fenced: bool, reader_fenced: bool, broken: bool
) -> None:
    writer = Program((), frozenset())
    writer.store(0, 1)
    if writer_fenced:
        writer.fence()
    writer.store(1, 1)
    reader = Program((0, 0), frozenset({0, 1}))
    reader.load(0, 1)
    if reader_fenced:
        reader.fence()
    reader.load(1, 0)
    reader.check(lambda r: r != (1, 0), "flag without data")
    assert (explore([writer, reader], 2, model).error is not None) == broken  # type: ignore[arg-type]


@pytest.mark.parametrize("fenced", [False, True])
def test_a_read_may_be_done_after_a_later_store_unless_fenced(fenced: bool) -> None:
    """Load buffering: the reason for the fence between reading a slot and releasing it."""
    programs = []
    for mine in (0, 1):
        program = Program((0,), frozenset({0, 1}))
        program.read(0, 1 - mine)
        if fenced:
            program.fence()
        program.store(mine, 1)
        program.fence()
        program.store(2 + mine, lambda r: 1 + r[0])
        programs.append(program)
    judge = Program((0, 0), frozenset({2, 3}))
    judge.label("look")
    judge.load(0, 2)
    judge.load(1, 3)
    judge.jump("look", lambda r: 0 in r)
    judge.check(lambda r: r != (2, 2), "both read the other's later store")
    assert (explore([*programs, judge], 4, "weak").error is None) == fenced


def test_a_lost_wake_up_is_a_deadlock() -> None:
    sleeper, waker = Program((0,), frozenset({0, 1})), Program((0,), frozenset({0, 1}))
    sleeper.load(0, 1)
    sleeper.jump("end", lambda r: r[0] == 1)
    sleeper.sleep(0, 0)
    sleeper.label("end")
    waker.store(1, 1)
    waker.fence()
    waker.wake(0)
    found = explore([sleeper, waker], 2, "tso")
    assert found.error is not None
    assert found.error.message == "deadlock"
    assert found.error.trace[-1] == "0: sleep on [0]: True"


def test_too_many_states_are_an_error_and_not_an_answer() -> None:
    with pytest.raises(MemoryError, match="states"):
        explore(litmus(fenced=False), 4, "tso", max_states=10)
