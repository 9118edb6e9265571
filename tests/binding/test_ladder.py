"""Stepping down: filters as containers install them, one warning in a tree of processes, codes for ``require``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from numa_collectors import _mempolicy, _nodes, binding

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not _mempolicy.supported(), reason="needs memory policies")

CPU = max(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
OTHER = min(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
NODE = (_nodes.nodes_of_cpus((CPU,)) or (0,))[0]

CODE = f"""
import errno, json, os, subprocess, sys, threading
import kernel_filter
from numa_collectors import binding
from numa_collectors.errors import BindingError

request = binding.BindRequest(cpus=({CPU},), memory_nodes=({NODE},), policy="bind")
INSIDE = '''
import json
from numa_collectors import binding
request = binding.BindRequest(cpus=({CPU},), memory_nodes=({NODE},), policy="bind")
binding.apply(request)
print(json.dumps(binding.inspect(request).to_dict()))
'''
kernel_filter.refuse({{error}}, {{calls}})
before = os.sched_getaffinity(0)
found = []
def body():
    found.append(binding.probe().__dict__)
    found.append(binding.apply(request).to_dict())
    binding.apply(request)
    output = subprocess.run([sys.executable, "-c", INSIDE], check=True, stdout=subprocess.PIPE).stdout
    found.append(json.loads(output))
    mask = os.sched_getaffinity(0)
    try:
        # Its CPU can be had, its policy cannot: the thread must be put back to the first CPU.
        binding.apply(binding.BindRequest(({OTHER},), request.memory_nodes, mode="require"))
    except BindingError as error:
        found.append([error.code, error.errno, str(error), mask == os.sched_getaffinity(0)])
thread = threading.Thread(target=body)
thread.start()
thread.join()
assert os.sched_getaffinity(0) == before
print(json.dumps(found))
"""


def test_this_machine_stands_on_the_first_rung() -> None:
    assert binding.probe_ladder() == "policy+cpu"
    assert binding.probe().code is None


@pytest.mark.parametrize(("error", "code"), [(errno.EPERM, "mempolicy-refused"), (errno.ENOSYS, "mempolicy-missing")])
def test_refused_policy_steps_down_to_first_touch(child: Any, error: int, code: str) -> None:
    probe, applied, inside, required = child(CODE.format(error=error, calls="*kernel_filter.POLICY_CALLS"))
    assert (probe["rung"], probe["errno"], probe["code"]) == ("cpu+first-touch", error, code)
    assert (applied["applied"], applied["cpus"], applied["verified"]) == ("cpu+first-touch", [CPU], False)
    assert (applied["errno"], applied["code"]) == (error, code)
    # The worker itself: what it can still see says that its pages are local.
    assert (inside["applied"], inside["verified"], inside["evidence"]) == ("cpu+first-touch", True, "numa_maps")
    assert inside["pages_on_node"] >= 0.98 * inside["pages_total"] > 0
    assert (inside["errno"], inside["code"], inside["policy"]) == (error, code, "default")
    assert required[:2] == [code, error]
    assert required[3]
    # Three step downs, two of them in one process, one in its child: one warning, with its remedy.
    assert child.log.count("binding steps down") == 1
    assert ("--cap-add SYS_NICE" if error == errno.EPERM else "CONFIG_NUMA") in child.log


def test_without_affinity_nothing_is_bound(child: Any) -> None:
    probe, applied, inside, required = child(CODE.format(error=errno.EPERM, calls="'sched_setaffinity'"))
    assert (probe["rung"], probe["code"]) == ("none", "affinity-refused")
    assert (applied["applied"], applied["code"], applied["errno"]) == ("none", "affinity-refused", errno.EPERM)
    assert (inside["applied"], inside["verified"]) == ("none", False)
    assert required[0] == "affinity-refused"
    assert child.log.count("binding steps down") == 1


def test_write_refused_while_reading_is_allowed(child: Any) -> None:
    probe, applied, inside, required = child(CODE.format(error=errno.EPERM, calls="'set_mempolicy', 'mbind'"))
    assert probe["rung"] == applied["applied"] == inside["applied"] == "cpu+first-touch"
    assert (inside["verified"], inside["evidence"], inside["policy"]) == (True, "move_pages", "default")
    assert required[0] == "mempolicy-refused"


def test_codes_have_remedies(child: Callable[..., Any]) -> None:
    for code in ("mempolicy-refused", "mempolicy-missing", "affinity-refused", "affinity-trimmed", "node-not-allowed"):
        assert binding.remedy(code)
    assert binding.remedy(None) is None
