"""The policy calls, and py-libnuma present, absent and broken in every way that is known: the same results."""

from __future__ import annotations

import ctypes
import errno
import mmap
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from numa_collectors import _mempolicy, _nodes

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not _mempolicy.supported(), reason="needs memory policies")

NODE = (_nodes.allowed_nodes() or (0,))[0]


def in_thread(action: Callable[[], object]) -> object:
    """Run ``action`` in a thread whose policy dies with it."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(action()))
    thread.start()
    thread.join()
    assert found, "the action raised"
    return found[0]


@pytest.mark.parametrize(
    ("mode", "nodes", "seen"),
    [
        (_mempolicy.MPOL_PREFERRED, (NODE,), (_mempolicy.MPOL_PREFERRED, (NODE,))),
        (_mempolicy.MPOL_BIND, (NODE,), (_mempolicy.MPOL_BIND, (NODE,))),
        (_mempolicy.MPOL_INTERLEAVE, (NODE,), (_mempolicy.MPOL_INTERLEAVE, (NODE,))),
        (_mempolicy.MPOL_LOCAL, (), (_mempolicy.MPOL_LOCAL, ())),
        (_mempolicy.MPOL_DEFAULT, (), (_mempolicy.MPOL_DEFAULT, ())),
    ],
)
def test_policy_reads_back_and_belongs_to_its_thread(mode: int, nodes: tuple[int, ...], seen: object) -> None:
    before = _mempolicy.get_mempolicy()

    def action() -> object:
        _mempolicy.set_mempolicy(mode, nodes)
        return _mempolicy.get_mempolicy()

    assert in_thread(action) == seen
    assert _mempolicy.get_mempolicy() == before


# 1,023 and 4,095 are above any configuration here, 4,096 is above the mask, 5 has no memory on this machine.
@pytest.mark.parametrize("nodes", [(1023,), (4095,), (4096,), (-1,), (5,), ()])
def test_impossible_nodes_are_an_error_and_change_nothing(nodes: tuple[int, ...]) -> None:
    if nodes == (5,) and 5 in _nodes.memory_nodes():
        pytest.skip("this machine has a node 5")
    before = _mempolicy.get_mempolicy()
    with pytest.raises(OSError, match="set_mempolicy") as caught:
        _mempolicy.set_mempolicy(_mempolicy.MPOL_BIND, nodes)
    assert caught.value.errno == errno.EINVAL
    assert _mempolicy.get_mempolicy() == before


def test_mbind_refuses_an_unaligned_address() -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with pytest.raises(OSError, match="mbind") as caught:
            _mempolicy.mbind(address + 1, mmap.PAGESIZE, _mempolicy.MPOL_BIND, (NODE,))
        assert caught.value.errno == errno.EINVAL
        _mempolicy.mbind(address, mmap.PAGESIZE, _mempolicy.MPOL_BIND, (NODE,))
        assert _mempolicy.get_mempolicy(address) == (_mempolicy.MPOL_BIND, (NODE,))


def test_page_status_tells_known_from_unknown() -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as pages:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        pages[0] = 1
        touched, untouched = _mempolicy.move_pages_status([address, address + mmap.PAGESIZE])
    assert touched in _nodes.online_nodes()
    assert untouched in (-errno.ENOENT, -errno.EFAULT)


def test_page_status_over_several_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_mempolicy, "_PAGES_PER_QUERY", 3)
    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as pages:
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for index in (0, 4, 7):
            pages[index * mmap.PAGESIZE] = 1
        statuses = _mempolicy.move_pages_status([address + index * mmap.PAGESIZE for index in range(8)])
    assert [index for index, status in enumerate(statuses) if status >= 0] == [0, 4, 7]


def test_mems_allowed_is_what_proc_says() -> None:
    assert _mempolicy.mems_allowed() == _nodes.allowed_nodes()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_import_and_refuse(child: Callable[..., Any], platform: str) -> None:
    found = child(f"""
import json, sys
sys.platform = {platform!r}
from numa_collectors import _mempolicy, binding
if sys.platform != "win32":
    import numa_collectors.shm
errors = []
for call in (_mempolicy.get_mempolicy, _mempolicy.mems_allowed, lambda: _mempolicy.set_mempolicy(2, (0,))):
    try:
        call()
    except OSError as error:
        errors.append(error.errno)
report = binding.apply(binding.BindRequest(cpus=(0,), memory_nodes=(0,)))
seen = binding.inspect(report.requested)
try:
    binding.apply(binding.BindRequest(cpus=(0,), mode="require"))
except binding._apply.BindingError as error:
    errors.append(error.code)
print(json.dumps([_mempolicy.supported(), errors, report.applied, report.reason, seen.verified, seen.applied,
                  binding.probe_ladder(), binding.recheck(report.requested, seen)]))
""")
    enosys = errno.ENOSYS
    assert found[:3] == [False, [enosys, enosys, enosys, "platform-unsupported"], "none"]
    assert platform in found[3]
    assert found[4:] == [False, "none", "none", []]


# What every variant must give: who writes is last, all before it must be alike.
RESULTS = f"""
import ctypes, json, mmap, threading
from numa_collectors import _mempolicy, binding
from numa_collectors.errors import BindingError
from numa_collectors.shm import Region

def outcome(action):
    try:
        return action()
    except OSError as error:
        return ["errno", error.errno]
    except BindingError as error:
        return ["code", error.code]

results = []
def body():
    for mode, nodes in ((2, [{NODE}]), (1, [{NODE}]), (3, [{NODE}]), (2, [1023]), (2, []), (99, [{NODE}]), (0, [])):
        results.append(outcome(lambda: _mempolicy.set_mempolicy(mode, nodes)))
        results.append(_mempolicy.get_mempolicy())
    results.append(outcome(lambda: binding.apply(binding.BindRequest(memory_nodes=(1023,)))))
    report = binding.apply(binding.BindRequest(memory_nodes=({NODE},), policy="bind", mode="require"))
    results.append([report.applied, report.verified, report.policy, report.policy_nodes])
thread = threading.Thread(target=body)
thread.start()
thread.join()
with Region.create("ring", 1 << 16, node={NODE}) as region:
    results.append([region.report.method, region.report.verified, _mempolicy.get_mempolicy(region.address)])
results.append(outcome(lambda: _mempolicy.mbind(1, 4096, 2, [{NODE}])))
print(json.dumps([results, _mempolicy.backend(), _mempolicy.backend_reason()]))
"""

FAKES = {
    "absent": None,
    "import error": "raise ImportError('no such thing')",
    "syntax error": "def :",
    "any error": "raise RuntimeError('broken on purpose')",
    "wrong library": "import ctypes\nLIBNUMA = ctypes.CDLL('libm.so.6')",
    "no library": "LIBNUMA = None",
    "library without its file": "class LIBNUMA:\n    _name = '/nowhere/libnuma.so.1'",
    # As py-libnuma itself fails without libnuma.so: CDLL(None) has no numa_num_possible_nodes.
    "libnuma missing": "import ctypes\nLIBNUMA = ctypes.CDLL(None)\nLIBNUMA.numa_num_possible_nodes()",
}


def _fake(folder: Path, source: str | None) -> Path:
    (folder / "numa").mkdir()
    text = "raise ModuleNotFoundError(\"No module named 'numa'\", name='numa')" if source is None else source
    (folder / "numa" / "__init__.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """What the kernel itself gives on this machine."""
    bind, preferred = [_mempolicy.MPOL_BIND, [NODE]], [_mempolicy.MPOL_PREFERRED, [NODE]]
    interleave, refused = [_mempolicy.MPOL_INTERLEAVE, [NODE]], ["errno", errno.EINVAL]
    sets: list[Any] = [None, bind, None, preferred, None, interleave]
    sets += [refused, interleave] * 3
    sets += [None, [_mempolicy.MPOL_DEFAULT, []]]
    return [*sets, ["code", "node-missing"], ["policy+cpu", True, "bind", [NODE]], ["mbind", True, bind], refused]


def test_with_py_libnuma_as_installed(child: Callable[..., Any], expected: list[Any]) -> None:
    results, backend, reason = child(RESULTS)
    assert results == expected
    assert backend in ("libnuma", "syscall"), reason


@pytest.mark.parametrize("variant", FAKES)
def test_broken_py_libnuma_gives_the_same_results(
    child: Callable[..., Any], expected: list[Any], tmp_path: Path, variant: str
) -> None:
    results, backend, reason = child(RESULTS, path=_fake(tmp_path, FAKES[variant]))
    assert results == expected
    assert backend == "syscall"
    assert "py-libnuma is not usable" in reason


LIARS = {
    "says yes to everything": "return 0;",
    "says no to everything": "errno = 1; return -1;",
}


@pytest.mark.parametrize("variant", LIARS)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc) to build a library that lies")
def test_library_that_lies_is_found_out(
    child: Callable[..., Any], expected: list[Any], tmp_path: Path, variant: str
) -> None:
    source, library = tmp_path / "liar.c", tmp_path / "liar.so"
    body = LIARS[variant]
    source.write_text(
        "#include <errno.h>\n"
        f"long set_mempolicy(int m, const unsigned long *n, unsigned long w) {{ {body} }}\n"
        f"long mbind(void *a, unsigned long l, int m, void *n, unsigned long w, unsigned f) {{ {body} }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    fake = _fake(tmp_path, f"import ctypes\nLIBNUMA = ctypes.CDLL({str(library)!r})")
    results, backend, reason = child(RESULTS, path=fake)
    assert results == expected
    assert backend == "syscall"
    assert "do not do what the kernel's do" in reason


def test_worker_that_only_reads_back_loads_no_libnuma(child: Callable[..., Any]) -> None:
    found = child("""
import json, sys
from numa_collectors import binding
report = binding.inspect(binding.BindRequest(cpus=(0, 1), memory_nodes=(0,)))
libraries = open("/proc/self/maps")
with libraries:
    print(json.dumps([report.pages_total > 0, "numa" in sys.modules, "libnuma" in libraries.read()]))
""")
    assert found == [True, False, False]
