"""``CollectorPool`` in a loop that the test owns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numa_collectors.errors import WorkerFailedError
from numa_collectors.pool import CollectorPool, PoolOptions
from tests.trainer.toys import SCHEMA, WEIGHTS, make_collector


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), value), "count": torch.tensor(int(value))}


def test_every_slot_comes_once_and_in_order_and_what_is_held_at_the_end_stays_readable() -> None:
    options = PoolOptions(num_envs=5, num_collectors=2, quota_slots=50, max_lead_slots=4)
    seen: list[list[int]] = [[], []]
    with CollectorPool(make_collector(), schema=SCHEMA, weights=WEIGHTS, options=options) as pool:
        # Nobody acts before the first version.
        with pytest.raises(TimeoutError, match=r"no collector delivered a slot for 0\.05 s"):
            next(pool.spans(timeout_s=0.05))
        assert pool.publish(weights(1.0)) == 1
        for rank, span in pool.spans(max_slots=3, timeout_s=60.0):
            batch = pool.tensors(rank, span)
            assert batch["obs"].data_ptr() == span["obs"].ctypes.data  # no copy
            assert batch["obs"].shape == (span.num_slots, options.envs_of(rank), 3)
            seen[rank] += batch["serial"][:, 0].tolist()
            pool.publish(weights(float(pool.exchange.version + 1)))
        assert pool.finished
    # `batch` still holds pages of a ring that is closed: they are unmapped with it, and not under it.
    assert torch.isfinite(batch["obs"]).all()
    assert seen == [list(range(50)), list(range(50))]
    pool.close()


def test_a_loop_that_breaks_is_given_the_span_again() -> None:
    options = PoolOptions(num_envs=2, num_collectors=1, quota_slots=5)
    with CollectorPool(make_collector(), schema=SCHEMA, weights=WEIGHTS, options=options) as pool:
        pool.publish(weights(1.0))
        assert pool.wait(60.0)
        first = [span["serial"][0, 0] for _, span in pool.drain(1)][:1]
        for _, span in pool.spans(1, timeout_s=60.0):
            again = int(span["serial"][0, 0])
            break
        serials = [int(span["serial"][0, 0]) for _, span in pool.spans(1, timeout_s=60.0)]
    assert first == [0]
    assert again == 1
    assert serials == [1, 2, 3, 4]


def test_a_dead_collector_is_an_error_where_the_loop_waits(tmp_path: Path) -> None:
    options = PoolOptions(num_envs=2, num_collectors=1)
    collector = make_collector(fault="raise", fault_step=3)
    with CollectorPool(collector, schema=SCHEMA, weights=WEIGHTS, options=options) as pool:
        pool.publish(weights(1.0))
        with pytest.raises(WorkerFailedError, match="planted failure"):
            list(pool.spans(timeout_s=60.0))


def test_a_quota_that_was_made_can_be_raised() -> None:
    options = PoolOptions(num_envs=2, num_collectors=1, quota_slots=3)
    with CollectorPool(make_collector(), schema=SCHEMA, weights=WEIGHTS, options=options) as pool:
        pool.publish(weights(1.0))
        assert sum(span.num_slots for _, span in pool.spans(timeout_s=60.0)) == 3
        pool.add_to_quotas(4)
        assert sum(span.num_slots for _, span in pool.spans(timeout_s=60.0)) == 2


def test_the_second_of_two_pools_numbers_its_collectors_on_and_counts_from_0_itself() -> None:
    options = PoolOptions(
        num_envs=5, num_collectors=2, quota_slots=20, learner_rank=1, num_learners=2, on_collector_exit="continue"
    )
    collector = make_collector(fault="raise", fault_rank=2, fault_step=5)
    seen: dict[int, list[int]] = {0: [], 1: []}
    envs: dict[int, set[int]] = {0: set(), 1: set()}
    with CollectorPool(collector, schema=SCHEMA, weights=WEIGHTS, options=options) as pool:
        assert [worker.name for worker in pool.collectors] == ["collector[2]", "collector[3]"]
        pool.publish(weights(1.0))
        for rank, span in pool.spans(timeout_s=60.0):
            seen[rank] += span["serial"][:, 0].tolist()
            envs[rank] |= set(span["env"].ravel().tolist())
        assert [failure.name for failure in pool.failures] == ["collector[2]"]
        assert set(pool.stats()) == {0, 1}
    # Environments are numbered over both pools; what the dead one still owed, 15 slots of 3, the other makes: 23 of 2.
    assert envs == {0: {5, 6, 7}, 1: {8, 9}}
    assert seen == {0: list(range(5)), 1: list(range(20 + 23))}
