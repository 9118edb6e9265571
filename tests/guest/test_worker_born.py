"""Workers of the library's own launcher on several nodes: local when their code begins, and their parent unchanged."""

from __future__ import annotations

import os
from multiprocessing import resource_tracker

import pytest
from guest_support import get_mempolicy
from guest_workers import Reporting

from numa_collectors.binding import BindRequest
from numa_collectors.errors import BindingError
from numa_collectors.worker import WorkerGroup

DEADLINE_S = 240.0


def own_state() -> tuple[set[int], tuple[int, list[int]], dict[str, str]]:
    return os.sched_getaffinity(0), get_mempolicy(), dict(os.environ)


@pytest.mark.guest("2n", "2n-arm")
def test_a_worker_of_each_node_begins_with_no_page_elsewhere_and_the_parent_stays_as_it_is() -> None:
    cpus_of = {0: (0, 1), 1: (2, 3)}
    # One that another test started, perhaps from a bound thread, would say nothing of this launcher.
    resource_tracker._resource_tracker._stop()
    before = own_state()
    requests = [
        BindRequest(cpus=cpus_of[node], memory_nodes=(node,), mode="require", num_threads=len(cpus_of[node]))
        for node in (0, 1)
    ]
    workers = [Reporting(rank=node, bind=request) for node, request in enumerate(requests)]
    with WorkerGroup(workers, shutdown_timeout_s=60.0) as group:
        group.start()
        reports = group.wait_ready(DEADLINE_S)
        assert all(worker.join(DEADLINE_S) for worker in workers)
    for node, (worker, report) in enumerate(zip(workers, reports, strict=True)):
        assert report.applied == "policy+cpu", report
        assert report.verified, report
        assert report.pages_on_node == report.pages_total > 0, report
        # What the worker saw of itself by raw system calls, when its own code began.
        assert set(worker.result["pages"]) == {node}, worker.result
        assert tuple(worker.result["cpus"]) == cpus_of[node]
        assert worker.result["threads"] == "2"
    after = own_state()
    assert after[:2] == before[:2]
    assert "OMP_NUM_THREADS" not in after[2]
    # The tracker of multiprocessing outlives the workers: it must not have been born into their masks.
    assert all(worker.result["tracker_cpus"] == sorted(before[0]) for worker in workers)


@pytest.mark.guest("2n")
def test_a_refused_start_leaves_the_parent_as_it_is() -> None:
    before = own_state()
    worker = Reporting(rank=0, bind=BindRequest(cpus=(0,), memory_nodes=(7,), mode="require"))
    with pytest.raises(BindingError) as caught:
        worker.start()
    assert caught.value.code == "node-missing"
    assert own_state()[:2] == before[:2]
    assert worker.join(1.0)
