"""Boots a topology, runs a job inside, and brings output, junit and exit code back.

The job goes in as a raw tar on the guest's second disk, results come back as a raw tar on the third, output over the
second serial line, whose last line carries the exit code.  QEMU's own exit status says nothing: it is 0 after a kernel
panic too.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from numalab.cache import cache_dir, need_tool
from numalab.errors import EXIT_FAILED, EXIT_GUEST_DIED, EXIT_OK, Stopped
from numalab.topologies import GuestTopology, topology_args

__all__ = ["Guest", "Outcome", "pytest_command", "run_guest"]

# A quiet host boots in 4 to 6 seconds; about one boot in a hundred was seen to hang under multi-threaded emulation, never
# yet with thread=single.
BOOT_TIMEOUT_S = float(os.environ.get("NUMA_COLLECTORS_LAB_BOOT_TIMEOUT_S", "90"))
BOOT_TRIES = 3
TEST_TIMEOUT_S = 300
_RESULT_BYTES = 8 << 20
_BLOCK_BYTES = 4096
_CMDLINE = (
    "loglevel=4 panic=-1 mitigations=off numa_balancing=disable root=/dev/nvme0n1 rw rootwait init=/sbin/lab-init"
)


@dataclass(frozen=True)
class Guest:
    """What boots: a topology, its kernel and disk, and the interpreter inside."""

    topology: GuestTopology
    kernel: Path
    image: Path
    python: str
    pythonpath: str = "/job"
    shard: int = 0
    num_shards: int = 1

    @property
    def name(self) -> str:
        """``2n``, or ``2n-1of2`` for the first of two guests that share the tests."""
        name = self.topology.name
        return name if self.num_shards == 1 else f"{name}-{self.shard + 1}of{self.num_shards}"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``code`` is one of the exit codes, ``reason`` says why in words, ``counts`` are junit's."""

    name: str
    code: int
    reason: str
    output: str
    console: str
    junit: str
    wall_s: float
    boot_s: float
    counts: dict[str, int] = field(default_factory=dict)


def pytest_command(guest: Guest, pytest_args: Sequence[str]) -> str:
    """The shell command that runs pytest in the guest."""
    words = [guest.python, "-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--color=no"]
    # Emulation is 25 times slower than the machine it runs on, and that one may be busy.
    words += [f"--timeout={TEST_TIMEOUT_S}", "-o", "faulthandler_timeout=0"]
    words += ["--junitxml=/run/results/junit.xml", *pytest_args]
    return shlex.join(words)


def _job_script(guest: Guest, command: str) -> str:
    """The shell script that the guest runs; its exit code is the command's."""
    return (
        f"export NUMA_COLLECTORS_LAB_TOPOLOGY={guest.topology.name}\n"
        f"export NUMA_COLLECTORS_LAB_SHARD={guest.shard}/{guest.num_shards}\n"
        f"export PYTHONPATH={guest.pythonpath} PYTHONUTF8=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\n"
        "export TMPDIR=/run/tmp COLUMNS=120\n"
        # Through a pipe, so that pytest does not write for a terminal.
        f"{{ ( {command} ); echo $? >/run/code; }} 2>&1 | cat\n"
        "exit $(cat /run/code)\n"
    )


def _left_out(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name or member.name.startswith("tests/lab") else member


def _write_job(path: Path, source: Path, script: str) -> None:
    """Pack the library, its tests and the script, padded to whole disk blocks."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name in ("numa_collectors", "tests", "pyproject.toml"):
            tar.add(source / name, arcname=name, filter=_left_out)
        member = tarfile.TarInfo("job.sh")
        member.size = len(script.encode())
        tar.addfile(member, io.BytesIO(script.encode()))
    size = path.stat().st_size
    os.truncate(path, (size + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES)


def _read_junit(path: Path) -> str:
    """The junit file out of the result disk; empty where the guest did not get that far."""
    try:
        with tarfile.open(path, "r:") as tar:
            member = tar.extractfile("results/junit.xml")
            return member.read().decode(errors="replace") if member else ""
    except (tarfile.ReadError, KeyError):  # the guest died before it wrote results, or pytest before its report
        return ""


def _count(junit: str) -> dict[str, int]:
    if not junit:
        return {}
    suites = ElementTree.fromstring(junit).iter("testsuite")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for key in totals:
            totals[key] += int(suite.get(key, "0"))
    return totals


def _qemu_args(guest: Guest, work: Path) -> list[str]:
    topology = guest.topology
    if topology.arch == "aarch64":
        program = need_tool("qemu-system-aarch64", "qemu-system-arm")
        machine, console, out = "virt,gic-version=3", "ttyAMA0", "ttyS0"
        serial = ["-chardev", f"file,id=out,path={work / 'output.txt'}", "-device", "pci-serial,chardev=out"]
        extra = ""
    else:
        program = need_tool("qemu-system-x86_64", "qemu-system-x86")
        machine, console, out = "q35", "ttyS0", "ttyS1"
        serial = ["-serial", f"file:{work / 'output.txt'}"]
        extra = "no_timer_check "  # on a busy host the timer self-test may panic
    append = f"console={console} lab_out={out} {extra}{_CMDLINE} {topology.cmdline}".strip()
    args = [program, "-accel", "tcg,thread=single", "-machine", machine, "-display", "none", "-nodefaults"]
    args += ["-no-user-config", "-no-reboot", "-kernel", str(guest.kernel), "-append", append]
    args += ["-serial", f"file:{work / 'console.txt'}", *serial, *topology_args(topology)]
    args += ["-device", "nvme,id=nvme,serial=lab,bus=pcie.0"]
    disks = (f"{guest.image},snapshot=on", f"{work / 'job.tar'},readonly=on", f"{work / 'results.tar'},cache=unsafe")
    for number, disk in enumerate(disks, start=1):
        args += ["-drive", f"if=none,id=disk{number},format=raw,file={disk}"]
        args += ["-device", f"nvme-ns,bus=nvme,drive=disk{number},nsid={number}"]
    setpriv = shutil.which("setpriv")
    # With its starter gone an emulator would go on burning a core until its guest ends.
    return [setpriv, "--pdeathsig", "KILL", *args] if setpriv else args


@contextmanager
def _emulator(args: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (
        open(log, "wb") as file,
        subprocess.Popen(args, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def _text(path: Path) -> str:
    return path.read_text(errors="replace").replace("\r", "") if path.exists() else ""


@dataclass
class _Attempt:
    """What one boot gave: ``state`` is "exited", "no boot" (worth another try), "died" or "timeout"."""

    state: str
    code: int = 0
    boot_s: float = 0.0


def _attempt(guest: Guest, work: Path, timeout_s: float, stop: threading.Event) -> _Attempt:
    for name in ("console.txt", "output.txt"):
        (work / name).write_text("")
    with open(work / "results.tar", "wb") as file:
        file.truncate(_RESULT_BYTES)
    start = time.monotonic()
    boot_s = 0.0
    with _emulator(_qemu_args(guest, work), work / "qemu.txt") as process:
        while True:
            ended = process.poll() is not None
            output = _text(work / "output.txt")
            now = time.monotonic() - start
            if not boot_s and "LAB-BOOT" in output:
                boot_s = now
            exit_line = re.search(r"^LAB-EXIT (\d+) ", output, re.MULTILINE)
            if exit_line and (ended or _wait(process)):
                return _Attempt("exited", int(exit_line.group(1)), boot_s)
            if ended:
                return _Attempt("died" if boot_s else "no boot", boot_s=boot_s)
            if stop.is_set():
                raise Stopped
            if now > (boot_s + timeout_s if boot_s else BOOT_TIMEOUT_S):
                return _Attempt("timeout" if boot_s else "no boot", boot_s=boot_s)
            stop.wait(0.1)


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Give a guest that has said its last line a moment to power off; results are on disk already."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
    return True


def _verdict(attempt: _Attempt, timeout_s: float, counts: dict[str, int]) -> tuple[int, str]:
    """Exit code and reason of the last attempt."""
    if attempt.state == "no boot":
        return EXIT_GUEST_DIED, f"the guest did not boot in {BOOT_TIMEOUT_S:.0f} s, {BOOT_TRIES} tries"
    if attempt.state == "timeout":
        return EXIT_GUEST_DIED, f"the guest hung: no end after {timeout_s:.0f} s"
    if attempt.state == "died":
        return EXIT_GUEST_DIED, "the guest died without an exit code (panic?)"
    if attempt.code == 0:
        return EXIT_OK, "passed"
    if attempt.code > 128:
        return EXIT_FAILED, f"killed by signal {attempt.code - 128} (9: the guest ran out of memory)"
    if not counts:
        return EXIT_FAILED, f"the command exited with {attempt.code} and left no report"
    if not counts["tests"]:
        return EXIT_FAILED, "no test was collected"
    bad = counts["failures"] + counts["errors"]
    return EXIT_FAILED, f"{bad} of {counts['tests']} tests failed (pytest exited with {attempt.code})"


def run_guest(guest: Guest, source: Path, command: str, *, timeout_s: float, stop: threading.Event) -> Outcome:
    """Boot ``guest``, run a shell command in it beside the library and tests of ``source``, and return the outcome.

    A guest that does not reach its init is booted again, twice at most; a job is never run twice.  Raises ``Stopped``
    when ``stop`` is set meanwhile; the emulator never outlives the call.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="run-", dir=cache_dir()) as folder:
        work = Path(folder)
        _write_job(work / "job.tar", source, _job_script(guest, command))
        for _ in range(BOOT_TRIES):
            attempt = _attempt(guest, work, timeout_s, stop)
            if attempt.state != "no boot":
                break
        junit = _read_junit(work / "results.tar")
        counts = _count(junit)
        code, reason = _verdict(attempt, timeout_s, counts)
        return Outcome(
            name=guest.name,
            code=code,
            reason=reason,
            output=_text(work / "output.txt"),
            console=_text(work / "console.txt") + _text(work / "qemu.txt"),
            junit=junit,
            wall_s=time.monotonic() - start,
            boot_s=attempt.boot_s,
            counts=counts,
        )
