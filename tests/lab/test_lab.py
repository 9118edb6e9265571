"""Boots the lab's machines and holds them to their tests; and how a lab run ends when something is wrong."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
from numalab.topologies import TOPOLOGIES

LAB = Path(__file__).parent
X86 = [topology.name for topology in TOPOLOGIES.values() if topology.arch == "x86_64"]


def guest_names(name: str) -> list[str]:
    """The guests that share a topology's tests."""
    number = TOPOLOGIES[name].num_shards
    return [name] if number == 1 else [f"{name}-{index + 1}of{number}" for index in range(number)]


def run_lab(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the lab's command line."""
    # The lab has its own deadlines, longer than a test's.
    faulthandler.cancel_dump_traceback_later()
    return subprocess.run(
        [sys.executable, str(LAB), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
    )


@dataclass(frozen=True)
class Run:
    """One run of several topologies."""

    results: Path
    output: str


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Boot, two at a time, the topologies that the selected tests ask for."""
    wanted: list[str] = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_guest_tests_pass_on"
    ]
    results = tmp_path_factory.mktemp("lab")
    result = run_lab("run", ",".join(wanted), "-j", "2", "--results", str(results))
    if result.returncode == 77:
        pytest.skip(result.stderr.strip())
    return Run(results, result.stdout + result.stderr)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", X86)
def test_guest_tests_pass_on(name: str, run: Run) -> None:
    for guest in guest_names(name):
        _check(guest, run)


def _check(name: str, run: Run) -> None:
    report = run.results / f"{name}.xml"
    assert report.exists(), run.output
    output = (run.results / f"{name}.output.txt").read_text()
    assert report.read_text(), f"{name}: no report\n{output}"
    suites = list(ElementTree.parse(report).iter("testsuite"))
    bad = sum(int(suite.get("failures", 0)) + int(suite.get("errors", 0)) for suite in suites)
    assert bad == 0, f"{name}: {bad} tests failed\n{output}"
    assert sum(int(suite.get("tests", 0)) - int(suite.get("skipped", 0)) for suite in suites) > 0, output
    assert "LAB-EXIT 0 " in output, f"{name}:\n{output}"


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("exit 4", 1, "exited with 4"),
        ("echo c >/proc/sysrq-trigger", 3, "died without an exit code"),
        ("sleep 1000", 3, "hung: no end after 5 s"),
    ],
)
def test_how_a_guests_end_is_told(command: str, code: int, says: str) -> None:
    result = run_lab("run", "2n", "--timeout-s", "5", "--shell", command)
    if result.returncode == 77:
        pytest.skip(result.stderr.strip())
    assert result.returncode == code, result.stdout + result.stderr
    assert says in result.stdout


def test_without_an_emulator_the_lab_says_so(tmp_path: Path) -> None:
    # mke2fs and ldconfig live in sbin, which is searched in any case; an emulator does not.
    empty = {"PATH": str(tmp_path), "NUMA_COLLECTORS_LAB_CACHE": str(tmp_path / "cache")}
    result = run_lab("run", "2n", NUMA_COLLECTORS_LAB_REQUIRE="", **empty)
    assert result.returncode == 77, result.stdout + result.stderr
    assert "qemu-system-x86_64 is not installed (apt-get install qemu-system-x86)" in result.stderr
    assert run_lab("run", "2n", NUMA_COLLECTORS_LAB_REQUIRE="1", **empty).returncode == 1


def test_a_missing_kernel_is_told(tmp_path: Path) -> None:
    if not any(os.access(Path(folder) / "qemu-system-x86_64", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("qemu-system-x86_64 is not installed, which is told before the kernel's absence")
    missing = str(tmp_path / "vmlinuz")
    result = run_lab("run", "2n", NUMA_COLLECTORS_LAB_REQUIRE="", NUMA_COLLECTORS_LAB_KERNEL=missing)
    assert result.returncode == 77
    assert f"{missing} is not a file" in result.stderr


@pytest.mark.parametrize("arguments", [["run", "3n"], ["run"], ["fly"], ["run", "2n", "--jobs", "many"]])
def test_bad_usage_is_2(arguments: list[str]) -> None:
    result = run_lab(*arguments)
    assert result.returncode == 2
    assert "usage" in result.stderr


def test_every_topology_is_listed_with_what_it_is() -> None:
    lines = run_lab("list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(TOPOLOGIES)
    assert all(len(line.split()) > 3 for line in lines)
