"""Binding a thread and reading it back, on this machine as it is."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from numa_collectors import _mempolicy, _nodes, binding
from numa_collectors.binding import BindRequest, _inspect
from numa_collectors.errors import BindingError

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not _mempolicy.supported(), reason="needs memory policies")

MASK = tuple(sorted(os.sched_getaffinity(0))) if sys.platform == "linux" else (0,)
CPU = MASK[-1]
NODE = (_nodes.allowed_nodes() or (0,))[0]
DEADLINE_S = 30.0
several_cpus = pytest.mark.skipif(len(MASK) < 2, reason="needs two CPUs")


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


def state() -> tuple[set[int], tuple[int, tuple[int, ...]]]:
    return os.sched_getaffinity(0), _mempolicy.get_mempolicy()


@pytest.mark.parametrize(
    "arguments",
    [
        {"cpus": "0-3"},
        {"cpus": ()},
        {"cpus": (-1,)},
        {"cpus": (0, "1")},
        {"cpus": (True,)},
        {"memory_nodes": (1.0,)},
        {"memory_nodes": ()},
        {"policy": "membind"},
        {"mode": "maybe"},
        {"num_threads": 0},
    ],
)
def test_rubbish_is_refused_before_anything_happens(arguments: dict[str, Any]) -> None:
    with pytest.raises(BindingError, match="expected") as caught:
        BindRequest(**arguments)
    assert caught.value.code == "bad-request"


def test_request_sorts_and_names_its_target() -> None:
    assert BindRequest(cpus=(3, 1, 1)).cpus == (1, 3)
    assert BindRequest().target == "none"
    assert BindRequest(cpus=(0,)).target == "cpu"
    assert BindRequest(cpus=(0,), policy="local").target == "policy+cpu"
    assert BindRequest(cpus=(0,), memory_nodes=(0,)).target == "policy+cpu"
    assert BindRequest(cpus=(0,), memory_nodes=(0,), policy="none").target == "cpu"
    assert BindRequest(cpus=(0,), memory_nodes=(0,), mode="off").target == "none"
    assert BindRequest(memory_nodes=(0, 1)).kernel_policy() == (_mempolicy.MPOL_PREFERRED_MANY, (0, 1))


@pytest.mark.parametrize("policy", ["preferred", "bind", "interleave", "local", "none"])
def test_only_the_calling_thread_is_bound(policy: Any) -> None:
    before = state()
    request = BindRequest(cpus=(CPU,), memory_nodes=None if policy == "local" else (NODE,), policy=policy)
    report, inside = in_thread(lambda: (binding.apply(request), state()))
    assert state() == before
    assert inside[0] == {CPU}
    if policy == "none":
        assert inside[1] == before[1]
    else:
        assert inside[1] == request.kernel_policy()
    assert (report.applied, report.verified, report.code) == (request.target, True, None)
    assert (report.cpus, report.requested) == ((CPU,), request)


BORN = """
import json, os
from numa_collectors import binding
request = binding.BindRequest(cpus=({cpu},), memory_nodes=({node},), policy="bind")
report = binding.inspect(request)
again = binding.recheck(request, report)
print(json.dumps([report.to_dict(), str(report), len(again), len(os.listdir("/proc/self/task"))]))
"""


def test_child_is_born_bound(child: Callable[..., Any]) -> None:
    request = BindRequest(cpus=(CPU,), memory_nodes=(NODE,), policy="bind")

    def start() -> Any:
        binding.apply(request)
        return child(BORN.format(cpu=CPU, node=NODE))

    report, text, num_drifts, num_threads = in_thread(start)
    assert (report["applied"], report["verified"], report["reason"]) == ("policy+cpu", True, None)
    assert (report["policy"], report["policy_nodes"], report["cpus"]) == ("bind", [NODE], [CPU])
    assert report["pages_on_node"] == report["pages_total"] > 500
    assert report["num_threads_checked"] == num_threads == 1
    assert (report["evidence"], num_drifts) == ("move_pages", 0)
    assert text.startswith(f"policy+cpu, CPUs {CPU}, memory bind:{NODE}, ")
    assert text.endswith("on their nodes, verified")


@several_cpus
def test_binding_twice_and_unbinding() -> None:
    before = state()

    def body() -> list[Any]:
        seen = []
        for request in (
            BindRequest(cpus=(MASK[0],), memory_nodes=(NODE,), policy="bind"),
            BindRequest(cpus=(CPU,)),
            BindRequest(memory_nodes=(NODE,)),
            BindRequest(),
            BindRequest(cpus=(CPU,), memory_nodes=(NODE,), mode="off"),
        ):
            report = binding.apply(request)
            seen.append((report.applied, *state()))
        return seen

    default = before[1]
    assert in_thread(body) == [
        ("policy+cpu", {MASK[0]}, (_mempolicy.MPOL_BIND, (NODE,))),
        ("cpu", {CPU}, default),
        ("policy+cpu", set(MASK), (_mempolicy.MPOL_PREFERRED, (NODE,))),
        ("none", set(MASK), default),
        ("none", set(MASK), default),
    ]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (BindRequest(cpus=(CPU, 4_000)), "cpu-missing"),
        (BindRequest(cpus=(CPU,), memory_nodes=(900,)), "node-missing"),
        (BindRequest(cpus=(CPU,), memory_nodes=(NODE, 5_000), policy="bind"), "node-missing"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_what_does_not_exist_is_an_error_and_changes_nothing(request_: BindRequest, code: str, mode: Any) -> None:
    first = BindRequest(cpus=(CPU,), memory_nodes=(NODE,))

    def body() -> Any:
        binding.apply(first)
        before = state()
        with pytest.raises(BindingError) as caught:
            binding.apply(BindRequest(request_.cpus, request_.memory_nodes, request_.policy, mode))
        return caught.value.code, state() == before

    assert in_thread(body) == (code, True)


NARROW = """
import json, os, threading
from numa_collectors import binding
from numa_collectors.errors import BindingError
os.sched_setaffinity(0, {{{first}}})
found = []
def body():
    for cpus in (({first}, {last}), ({last},)):
        for mode in ("auto", "require"):
            try:
                report = binding.apply(binding.BindRequest(cpus=cpus, mode=mode))
                found.append([report.applied, report.verified, report.code, report.reason])
            except BindingError as error:
                found.append([error.code, str(error)])
            found.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=body)
thread.start()
thread.join()
print(json.dumps(found))
"""


@several_cpus
def test_foreign_narrower_mask_is_respected_and_named(child: Callable[..., Any]) -> None:
    first, last = MASK[0], MASK[-1]
    found = child(NARROW.format(first=first, last=last))
    trimmed, _, required, _, outside, _, refused, _ = found
    assert all(mask == [first] for mask in found[1::2])
    assert trimmed[:3] == ["cpu", False, "affinity-trimmed"]
    assert f"CPUs {first}-{last} were asked for, {first} were given" in trimmed[3] or len(MASK) > 2
    assert required[0] == "affinity-trimmed"
    assert "taskset" in required[1]
    assert outside[:3] == ["none", False, "cpus-not-allowed"]
    assert refused[0] == "cpus-not-allowed"


STRAY = """
import json, os, threading
from numa_collectors import binding
request = binding.BindRequest(cpus=({first},), memory_nodes=({node},))
binding.apply(request)
start = binding.inspect(request)
ready, done = threading.Event(), threading.Event()
def library():
    os.sched_setaffinity(0, {{{first}, {last}}})
    ready.set()
    done.wait(30)
thread = threading.Thread(target=library, name="blas")
thread.start()
ready.wait(30)
now = binding.inspect(request)
drift = [str(one) for one in binding.recheck(request, start)]
known = [str(one) for one in binding.recheck(request, now)]
done.set()
thread.join()
os.sched_setaffinity(0, {{{last}}})
binding._apply._mempolicy.set_mempolicy(2, ({node},))
main = [(one.kind, one.before, one.now) for one in binding.recheck(request, start)]
print(json.dumps([start.verified, now.verified, now.code, now.num_threads_checked, str(now), drift, known, main]))
"""


@several_cpus
def test_thread_that_resets_its_mask_is_found_and_drift_is_named(child: Callable[..., Any]) -> None:
    first, last = MASK[0], MASK[-1]
    before, now, code, num_threads, text, drift, known, main = child(STRAY.format(first=first, last=last, node=NODE))
    assert (before, now, code, num_threads) == (True, False, "threads-astray", 2)
    assert "may run on CPUs" in text
    assert len(drift) == 1
    assert f"CPUs {first} before, CPUs {first}" in drift[0]
    assert known == []
    assert main == [
        ["affinity", f"CPUs {first}", f"CPUs {last}"],
        ["policy", f"preferred:{NODE}", f"bind:{NODE}"],
    ]


def test_unknown_pages_are_no_yes_and_no_no(monkeypatch: pytest.MonkeyPatch) -> None:
    request = BindRequest(cpus=MASK)
    good = binding.inspect(request)
    assert good.verified
    unknown = [-errno.EFAULT, -errno.ENOENT]
    monkeypatch.setattr(_mempolicy, "move_pages_status", lambda addresses: (unknown * len(addresses))[: len(addresses)])
    report = binding.inspect(request)
    assert (report.verified, report.pages_total, report.pages_on_node) == (False, 0, 0)
    assert report.pages_unknown > 0
    assert report.local_fraction is None
    assert binding.recheck(request, good) == ()


def test_pages_elsewhere_are_counted_and_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    request = BindRequest(cpus=MASK, memory_nodes=(NODE,), policy="none")
    good = binding.inspect(request)
    other = NODE + 1
    monkeypatch.setattr(
        _mempolicy, "move_pages_status", lambda addresses: [NODE if n % 10 else other for n in range(len(addresses))]
    )
    report = binding.inspect(request)
    assert not report.verified
    assert report.pages_per_node[other] == report.pages_total - report.pages_on_node > 0
    assert f"away from node {NODE}" in str(report.reason)
    assert [drift.kind for drift in binding.recheck(request, good)] == ["pages"]


def test_nothing_asked_is_nothing_claimed() -> None:
    for request in (BindRequest(), BindRequest(cpus=(CPU,), mode="off")):
        report = binding.inspect(request)
        assert (report.applied, report.verified, report.pages_total) == ("none", False, 0)
        assert report.reason in ("nothing was asked for", "binding is off")
        assert not report.stepped_down
        report.check()


def test_required_binding_that_does_not_hold_raises() -> None:
    request = BindRequest(cpus=(CPU,), memory_nodes=(NODE,), policy="bind", mode="require")
    with pytest.raises(BindingError, match="required, but does not hold") as caught:
        binding.inspect(request).check()
    assert caught.value.code in ("affinity-trimmed", "policy-not-applied")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.code, str(copy)) == (caught.value.code, str(caught.value))


def test_report_is_plain_and_picklable() -> None:
    report = binding.inspect(BindRequest(cpus=MASK))
    assert pickle.loads(pickle.dumps(report)) == report
    assert json.loads(json.dumps(report.to_dict()))["applied"] == "cpu"


def test_another_process_is_read_from_outside() -> None:
    request = BindRequest(cpus=(CPU,), memory_nodes=(NODE,), policy="bind")

    def start() -> Any:
        binding.apply(request)
        command = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    with in_thread(start) as process:
        assert process.stdout.readline() == b"up\n"
        report = binding.inspect(request, pid=process.pid)
        process.communicate(timeout=DEADLINE_S)
    assert (report.applied, report.evidence, report.policy, report.cpus) == ("policy+cpu", "numa_maps", "bind", (CPU,))
    with pytest.raises(ProcessLookupError):
        binding.inspect(request, pid=process.pid)


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("7f00 default file=/lib/x mapped=1", (_mempolicy.MPOL_DEFAULT, ())),
        ("7f00 bind:1 anon=3 N1=3", (_mempolicy.MPOL_BIND, (1,))),
        ("7f00 bind:0-1,8", (_mempolicy.MPOL_BIND, (0, 1, 8))),
        ("7f00 bind=static:1 heap", (_mempolicy.MPOL_BIND, (1,))),
        ("7f00 bind=relative|balancing:0-1", (_mempolicy.MPOL_BIND, (0, 1))),
        ("7f00 prefer:1 stack", (_mempolicy.MPOL_PREFERRED, (1,))),
        ("7f00 prefer (many):0-1 anon=1", (_mempolicy.MPOL_PREFERRED_MANY, (0, 1))),
        ("7f00 prefer=static:0", (_mempolicy.MPOL_PREFERRED, (0,))),
        ("7f00 local anon=1 N0=1", (_mempolicy.MPOL_LOCAL, ())),
        ("7f00 interleave:0-3", (_mempolicy.MPOL_INTERLEAVE, (0, 1, 2, 3))),
        ("7f00 weighted interleave:0-1 anon=1", None),
        ("rubbish", None),
        ("", None),
    ],
)
def test_policies_as_numa_maps_writes_them(line: str, policy: object) -> None:
    assert _inspect.parse_policy(line + "\n") == policy


def test_sampling_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [(0x1000, 0x1000 + 4096 * 10), (1 << 30, (1 << 30) + 4096 * 100_000)]
    assert sum(pages for _, pages in _inspect._windows(ranges)) <= _inspect._MAX_ENTRIES + 256
    monkeypatch.setattr(_inspect, "_MAX_ENTRIES", 1 << 20)
    assert sum(pages for _, pages in _inspect._windows(ranges)) == 100_010


def test_thread_caps_leave_what_the_user_set() -> None:
    caps = binding.thread_caps(3, {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": ""})
    assert caps["MKL_NUM_THREADS"] == caps["OPENBLAS_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in caps
    assert caps.kept == {"OMP_NUM_THREADS": "8"}
    assert binding.thread_caps(None) == {}
    with pytest.raises(ValueError, match="at least 1"):
        binding.thread_caps(0)
