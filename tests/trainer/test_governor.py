from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from numa_collectors.trainer._governor import Governor


def pay(governor: Governor) -> int:
    """Make updates as the loop does until nothing is owed."""
    made = 0
    while governor.owed:
        due = governor.due()
        assert 0 < due <= governor.chunk
        governor.done += due
        made += due
    return made


@given(
    num_updates=st.integers(1, 9),
    shards=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    warm_up=st.integers(0, 60),
    order=st.lists(st.integers(0, 4), max_size=80),
)
def test_strict_is_exact_to_the_update_over_any_mix_of_collectors(
    num_updates: int, shards: list[int], warm_up: int, order: list[int]
) -> None:
    num_envs = sum(shards)
    governor = Governor.strict(num_updates=num_updates, num_envs=num_envs, warm_up=warm_up)
    for pick in order:
        governor.ingested += shards[pick % len(shards)]
        pay(governor)
        # Whole updates only, never ahead of the data, never a full update behind.
        assert governor.done == num_updates * max(0, governor.ingested - warm_up) // num_envs
    # Strict waits for data once it has paid.
    assert governor.due() == 0


def test_strict_pays_no_burst_for_the_warm_up() -> None:
    governor = Governor.strict(num_updates=4, num_envs=10, warm_up=100)
    governor.ingested = 100
    assert governor.due() == 0
    governor.ingested = 110
    assert pay(governor) == 4


def test_learner_bound_always_has_work_once_it_has_started() -> None:
    governor = Governor.learner_bound(num_updates=3, warm_up=50)
    governor.ingested = 49
    assert governor.due() == 0
    governor.ingested = 50
    for _ in range(1000):
        assert governor.due() == 3
        governor.done += governor.due()
    assert governor.owed == 0


def test_the_lower_ratio_is_owed_and_the_upper_one_is_not_passed() -> None:
    governor = Governor.learner_bound(num_updates=5, warm_up=0, utd_min=0.1, utd_max=0.2)
    governor.ingested = 100
    assert governor.owed == 10
    assert pay(governor) == 10
    made = 0
    while (due := governor.due()) > 0:
        governor.done += due
        made += due
    assert governor.done == 20
    governor.ingested = 130
    assert governor.owed == 0
    assert governor.due() == 5


@given(
    upper=st.none() | st.floats(0.001, 5.0),
    warm_up=st.integers(0, 60),
    ingested=st.integers(0, 300),
    done=st.integers(0, 40),
)
def test_missing_is_what_makes_an_update_due(upper: float | None, warm_up: int, ingested: int, done: int) -> None:
    governor = Governor.learner_bound(num_updates=2, warm_up=warm_up, utd_max=upper)
    governor.ingested, governor.done = ingested, done
    missing = governor.missing
    assert (missing == 0) == (governor.due() > 0)
    if missing:
        governor.ingested += missing - 1
        assert governor.due() == 0
        governor.ingested += 1
        assert governor.due() > 0
