"""Binding on several nodes: workers are born local, refusals step down, drift has a name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from guest_support import (
    ROOT,
    cpuset,
    get_mempolicy,
    join,
    private_pages,
    refuse_policy_calls,
    run_python,
    write_kernel_file,
)

from numa_collectors import binding
from numa_collectors.binding import BindRequest
from numa_collectors.errors import BindingError

DEADLINE_S = 120.0


def in_thread(action: Callable[[], Any]) -> Any:
    """Run ``action`` in a thread whose binding dies with it; raise what it raises."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(DEADLINE_S)
    if failed:
        raise failed[0]
    return found[0]


def waiting_python(before: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """Start an interpreter that is up and waits for the end of its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=before,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


# The oracle (guest_support) shares no code with the library.
WORKER = """
import json, os, sys
from guest_support import private_pages, anonymous_mappings
first = private_pages() if {oracle} else anonymous_mappings()
from numa_collectors import binding
request = binding.BindRequest({request})
report = binding.inspect(request)
print(json.dumps([first, report.to_dict(), sorted(os.sched_getaffinity(0))]))
"""


def born(request: BindRequest, oracle: bool = True) -> tuple[dict[int, int], dict[str, Any], list[int]]:
    """Start a worker from a thread bound by ``request``; return its pages by node at birth, its report, its mask."""
    words = ", ".join(f"{name}={getattr(request, name)!r}" for name in ("cpus", "memory_nodes", "policy", "mode"))

    def start() -> Any:
        binding.apply(request)
        return run_python(WORKER.format(oracle=oracle, request=words))

    pages, report, mask = in_thread(start)
    return {int(node): count for node, count in pages.items()}, report, mask


@pytest.mark.guest("2n", "2n-arm", "sparse")
@pytest.mark.parametrize("policy", ["preferred", "bind"])
def test_no_private_page_is_remote_when_user_code_begins(topology_name: str, policy: Any) -> None:
    node, cpus = (2, (4, 5)) if topology_name == "sparse" else (1, (2, 3))
    if topology_name == "sparse":
        cpus = tuple(sorted(os.sched_getaffinity(0) & set(node_cpus(2))))
    before = os.sched_getaffinity(0), get_mempolicy()
    pages, report, mask = born(BindRequest(cpus=cpus, memory_nodes=(node,), policy=policy))
    assert set(pages) == {node}
    assert pages[node] > 500
    assert mask == list(cpus)
    assert (report["applied"], report["verified"], report["reason"]) == ("policy+cpu", True, None)
    assert report["pages_on_node"] == report["pages_total"] > 500
    assert (os.sched_getaffinity(0), get_mempolicy()) == before


def node_cpus(node: int) -> tuple[int, ...]:
    from numa_collectors._nodes import node_cpus as read

    return read(node)


@pytest.mark.guest("2n", "4n", "8n")
def test_every_node_gets_its_worker(topology_name: str) -> None:
    for node in range(int(topology_name[0]))[-2:]:
        request = BindRequest(cpus=node_cpus(node), memory_nodes=(node,), policy="bind")
        pages, report, _ = born(request)
        assert set(pages) == {node}
        assert report["verified"]


@pytest.mark.guest("2n")
def test_a_worker_that_is_not_where_it_should_be_is_not_verified() -> None:
    code = WORKER.format(oracle=True, request="cpus=(2, 3), memory_nodes=(1,), policy='bind'")
    pages, report, _ = in_thread(
        lambda: (binding.apply(BindRequest(cpus=(0, 1), memory_nodes=(0,))), run_python(code))[1]
    )
    assert set(pages) == {"0"}
    assert (report["applied"], report["verified"], report["pages_on_node"]) == ("none", False, 0)
    assert "away from node 1" in report["reason"]
    # CPUs of node 1, memory of node 0: the mask holds, the pages do not.
    bound = BindRequest(cpus=(2, 3), memory_nodes=(0,), policy="bind")
    pages, report, _ = in_thread(lambda: (binding.apply(bound), run_python(code))[1])
    assert set(pages) == {"0"}
    assert (report["applied"], report["verified"], report["code"]) == ("cpu+first-touch", False, "policy-not-applied")


@pytest.mark.guest("memonly")
def test_memory_only_node() -> None:
    pages, report, mask = born(BindRequest(cpus=(0, 1), memory_nodes=(2,), policy="bind"))
    assert set(pages) == {2}
    assert (report["applied"], report["verified"], mask) == ("policy+cpu", True, [0, 1])


@pytest.mark.guest("memless")
def test_cpu_only_node_works_with_borrowed_memory_and_refuses_its_own() -> None:
    pages, report, mask = born(BindRequest(cpus=(2, 3), memory_nodes=(0,), policy="bind"))
    assert set(pages) == {0}
    assert (report["verified"], mask) == (True, [2, 3])
    for mode in ("auto", "require"):
        with pytest.raises(BindingError, match="which has none") as caught:
            in_thread(lambda mode=mode: binding.apply(BindRequest(cpus=(2,), memory_nodes=(1,), mode=mode)))
        assert caught.value.code == "node-without-memory"


@pytest.mark.guest("sparse")
def test_hole_in_the_node_ids() -> None:
    with pytest.raises(BindingError, match=r"online NUMA node \(0,2\), got 1") as caught:
        in_thread(lambda: binding.apply(BindRequest(memory_nodes=(1,))))
    assert caught.value.code == "node-missing"


REFUSED = """
import json, threading
from guest_support import refuse_policy_calls, run_python
from numa_collectors import binding
from numa_collectors.errors import BindingError
refuse_policy_calls({error})
request = binding.BindRequest(cpus=(2, 3), memory_nodes=(1,), policy="bind")
found = []
def body():
    found.append(binding.apply(request).to_dict())
    found.append(run_python({worker!r}))
    binding.apply(binding.BindRequest(cpus=(0, 1), memory_nodes=(0,)))
    crossed = binding.BindRequest(cpus=(0, 1), memory_nodes=(1,))
    found.append(binding.apply(crossed).applied)
    try:
        binding.apply(binding.BindRequest(cpus=(2, 3), memory_nodes=(1,), mode="require"))
    except BindingError as error:
        found.append([error.code, error.errno])
thread = threading.Thread(target=body)
thread.start()
thread.join()
print(json.dumps(found))
"""


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.parametrize(("error", "code"), [(errno.EPERM, "mempolicy-refused"), (errno.ENOSYS, "mempolicy-missing")])
def test_container_filter_leaves_98_percent_local(error: int, code: str) -> None:
    worker = WORKER.format(oracle=False, request="cpus=(2, 3), memory_nodes=(1,), policy='bind'")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    environment.pop("NUMA_COLLECTORS_BINDING_WARNED", None)
    result = subprocess.run(
        [sys.executable, "-c", REFUSED.format(error=error, worker=worker)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=True,
    )
    import json

    applied, (pages, report, _), crossed, required = json.loads(result.stdout.strip().splitlines()[-1])
    assert (applied["applied"], applied["code"], applied["errno"]) == ("cpu+first-touch", code, error)
    assert pages["1"] >= 0.98 * sum(pages.values()) > 0
    assert (report["applied"], report["verified"], report["evidence"]) == ("cpu+first-touch", True, "numa_maps")
    assert crossed == "cpu"
    assert required == [code, error]
    assert result.stderr.count("binding steps down") == 1


@pytest.mark.guest("2n")
def test_filter_seen_from_outside_by_the_parent() -> None:
    """The oracle of the test above, by move_pages, which the filtered worker itself cannot call."""

    def start() -> Any:
        os.sched_setaffinity(0, {2, 3})
        return waiting_python(lambda: refuse_policy_calls(errno.EPERM))

    with in_thread(start) as process:
        request = BindRequest(cpus=(2, 3), memory_nodes=(1,))
        pages = private_pages(process.pid)
        report = binding.inspect(request, pid=process.pid)
        process.communicate(timeout=DEADLINE_S)
    assert pages[1] >= 0.98 * sum(pages.values())
    assert (report.applied, report.verified, report.policy) == ("cpu+first-touch", True, "default")


CPUSET = """
import json, os
from guest_support import join
from numa_collectors import binding
from numa_collectors.errors import BindingError
from pathlib import Path
join(Path({group!r}))
found = []
for mode in ("auto", "require"):
    try:
        report = binding.apply(binding.BindRequest(cpus={cpus}, memory_nodes={nodes}, policy="bind", mode=mode))
        found.append([report.applied, report.code, report.cpus, report.policy])
    except BindingError as error:
        found.append([error.code, str(error)])
found.append(binding.probe_ladder())
print(json.dumps(found))
"""


@pytest.mark.guest("2n")
def test_cpuset_that_hides_a_node_is_respected_and_named() -> None:
    with cpuset(cpus="0-3", mems="0") as group:
        auto, required, rung = run_python(CPUSET.format(group=str(group), cpus=(2, 3), nodes=(1,)))
    assert auto == ["cpu+first-touch", "node-not-allowed", [2, 3], "default"]
    assert required[0] == "node-not-allowed"
    assert "cpuset.mems" in required[1]
    assert rung == "policy+cpu"
    # Half of it allowed: the kernel would trim the mask silently.
    with cpuset(cpus="0-1", mems="0") as group:
        auto, required, _ = run_python(CPUSET.format(group=str(group), cpus=(1, 2), nodes=(0, 1)))
    assert auto[:3] == ["cpu", "affinity-trimmed", [1]] or auto[:3] == ["cpu+first-touch", "affinity-trimmed", [1]]
    assert required[0] == "affinity-trimmed"


# Joining a cpuset resets the mask, so the worker joins first, binds, and is born again by exec.
JOIN_AND_BIND = """
import sys
from pathlib import Path
from guest_support import join
from numa_collectors import binding
join(Path({group!r}))
request = binding.BindRequest(cpus=(2, 3), memory_nodes=(1,), policy="bind")
binding.exec_bound([sys.executable, "-c", {code!r}], request)
"""
DRIFT = """
import json
from pathlib import Path
from guest_support import write_kernel_file
from numa_collectors import binding
group = Path({group!r})
request = binding.BindRequest(cpus=(2, 3), memory_nodes=(1,), policy="bind")
start = binding.inspect(request)
write_kernel_file(group / "cpuset.mems", "0")
write_kernel_file(group / "cpuset.cpus", "0-2")
shrunk = [[one.kind, one.before, one.now] for one in binding.recheck(request, start)]
write_kernel_file(group / "cpuset.mems", "0-1")
write_kernel_file(group / "cpuset.cpus", "0-3")
grown = [[one.kind, one.before, one.now] for one in binding.recheck(request, start)]
print(json.dumps([start.to_dict(), shrunk, grown]))
"""


@pytest.mark.guest("2n", "2n-arm")
def test_drift_is_named_when_the_cpuset_shrinks_and_stays_when_it_grows_back() -> None:
    with cpuset(cpus="0-3", mems="0-1") as group:
        code = DRIFT.format(group=str(group))
        start, shrunk, grown = run_python(JOIN_AND_BIND.format(group=str(group), code=code))
    assert (start["applied"], start["verified"]) == ("policy+cpu", True)
    kinds = {kind: (before, now) for kind, before, now in shrunk}
    # Linux 6.1 forgets the mask and gives the whole cpuset; since 6.2 it keeps what is left of the mask.
    assert kinds["affinity"][0] == "CPUs 2-3"
    assert kinds["affinity"][1] in ("CPUs 0-2", "CPUs 2")
    assert kinds["policy"] == ("bind:1", "bind:0")
    assert kinds["nodes"] == ("0-1", "0")
    assert kinds["pages"][0] == "100.0 %"
    kinds = {kind: (before, now) for kind, before, now in grown}
    # The kernel remembers nothing: the policy stays rewritten, the mask is not the old one.
    assert kinds["policy"] == ("bind:1", "bind:0")
    assert "nodes" not in kinds


@pytest.mark.guest("2n")
def test_process_moved_into_a_cpuset_from_outside() -> None:
    request = BindRequest(cpus=(2, 3), memory_nodes=(1,), policy="bind")

    def start() -> Any:
        binding.apply(request)
        return waiting_python()

    with cpuset(cpus="0-1", mems="0") as group, in_thread(start) as process:
        since = binding.inspect(request, pid=process.pid)
        write_kernel_file(group / "cgroup.procs", str(process.pid))
        drift = binding.recheck(request, since, pid=process.pid)
        process.communicate(timeout=DEADLINE_S)
    assert since.verified
    assert {one.kind for one in drift} == {"affinity", "policy", "nodes", "pages"}
    assert "0-1" in {one.now.removeprefix("CPUs ") for one in drift if one.kind == "affinity"}


@pytest.mark.guest("2n")
def test_a_joined_cpuset_narrows_the_parent_only_inside_the_child() -> None:
    mask = os.sched_getaffinity(0)
    with cpuset(cpus="0-1", mems="0") as group:
        result = run_python(
            "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))", before=lambda: join(group)
        )
    assert result == [0, 1]
    assert os.sched_getaffinity(0) == mask
