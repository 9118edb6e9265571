"""Reading masks, policies and pages of a process that a test wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from numa_collectors.errors import TopologyError
from numa_collectors.testing.machines import topology_of
from numa_collectors.topo.verify import parse_numa_maps, verify_process

MAPS = """\
00400000 default file=/usr/bin/python3.11 mapped=700 N0=500 N1=200 kernelpagesize_kB=4
02000000 prefer:1 heap anon=100 dirty=100 N1=99 N0=1 kernelpagesize_kB=4
7f0000000000 prefer (many):0-1 anon=10 dirty=10 N1=10 kernelpagesize_kB=4
7f1000000000 bind:1 file=/memfd:ring\\040(deleted) dirty=512 N1=512 kernelpagesize_kB=4
7f2000000000 bind=static:0-1 file=/anon_hugepage\\040(deleted) huge anon=2 dirty=2 N0=2 kernelpagesize_kB=2048
7f3000000000 interleave:0-3 anon=4 dirty=4 N0=1 N1=1 N2=1 N3=1 kernelpagesize_kB=4
7f4000000000 weighted interleave:0-1
7f5000000000 local stack anon=5 dirty=5 active=0 N1=5 kernelpagesize_kB=4
7f6000000000 default
7f7000000000 default file=/usr/lib/libc.so.6 anon=2 dirty=2 mapped=9 N0=7 N1=2 kernelpagesize_kB=4
not a line of numa_maps
"""


def process(root: Path, threads: dict[int, tuple[str, str]], maps: str | None, pid: int = 4242) -> str:
    directory = root / f"proc/{pid}"
    (directory / "task").mkdir(parents=True)
    (directory / "comm").write_text("collector\n")
    if maps is not None:
        (directory / "numa_maps").write_text(maps)
    for tid, (name, cpus) in threads.items():
        (directory / f"task/{tid}").mkdir()
        (directory / f"task/{tid}/status").write_text(f"Name:\t{name}\nCpus_allowed_list:\t{cpus}\n")
        if maps is not None:
            (directory / f"task/{tid}/numa_maps").write_text(maps)
    return str(root)


def test_policies_with_and_without_spaces() -> None:
    mappings = parse_numa_maps(MAPS)
    assert [mapping.policy for mapping in mappings] == [
        "default",
        "prefer:1",
        "prefer (many):0-1",
        "bind:1",
        "bind=static:0-1",
        "interleave:0-3",
        "weighted interleave:0-1",
        "local",
        "default",
        "default",
    ]


def test_kinds_and_sizes() -> None:
    mappings = parse_numa_maps(MAPS)
    assert [mapping.kind for mapping in mappings] == [
        "file", "private", "private", "shared", "shared", "private", "private", "private", "private", "private",
    ]  # fmt: skip
    assert mappings[1].bytes_by_node == {1: 99 * 4096, 0: 4096}
    assert mappings[4].bytes_by_node == {0: 4 << 20}


def test_a_bound_process_has_no_findings(tmp_path: Path) -> None:
    maps = "02000000 prefer:1 heap anon=100 dirty=100 N1=99 N0=1 kernelpagesize_kB=4\n"
    root = process(tmp_path, {4242: ("python", "8-15,24-31"), 4243: ("openblas", "8,24")}, maps)
    report = verify_process(topology_of("distances-missing"), 4242, root)
    assert report.findings == ()
    assert report.threads[1].policy == "prefer:1"
    assert "private pages: node 0 1.0% (4 KiB), node 1 99.0% (396 KiB)" in report.render()


def test_drift_and_strays_are_named(tmp_path: Path) -> None:
    maps = "02000000 default heap anon=100 dirty=100 N1=60 N0=40 kernelpagesize_kB=4\n"
    root = process(tmp_path, {4242: ("python", "8-15"), 4250: ("omp", "0-31")}, maps)
    report = verify_process(topology_of("distances-missing"), 4242, root)
    assert report.findings[0].startswith("drift: ")
    assert "4250 omp (0-31)" in report.findings[0]
    assert report.findings[1].startswith("40.0% of its private pages are not on node 1")


def test_a_process_on_several_nodes_is_not_bound(tmp_path: Path) -> None:
    root = process(tmp_path, {4242: ("python", "0-31")}, None)
    report = verify_process(topology_of("distances-missing"), 4242, root)
    assert report.findings == ("not bound to a node: its CPUs are on nodes 0-1",)
    assert not report.pages_known
    assert "unverified" in report.render()


def test_no_such_process(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="got 77"):
        verify_process(topology_of("one-cpu"), 77, str(tmp_path))
