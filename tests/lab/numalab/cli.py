"""Command line of the lab: ``python tests/lab list|image|run NAMES|all [-j N] [--results DIR] [-- pytest arguments]``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from types import FrameType

from numalab.boot import Guest, Outcome, pytest_command, run_guest
from numalab.cache import kernel, need_tool
from numalab.errors import EXIT_FAILED, EXIT_GUEST_DIED, EXIT_OK, EXIT_UNAVAILABLE, Stopped, Unavailable
from numalab.image import guest_python, image
from numalab.topologies import TOPOLOGIES, GuestTopology

__all__ = ["main"]

SOURCE = Path(__file__).resolve().parents[3]
_CONSOLE_LINES = 40


def _guest(topology: GuestTopology) -> Guest:
    """What boots ``topology``; raises ``Unavailable`` where something is missing here."""
    if topology.arch == "aarch64":
        from numalab.arm import arm_guest

        return arm_guest(topology)
    need_tool("qemu-system-x86_64", "qemu-system-x86")
    return Guest(topology, kernel("x86_64"), image(), guest_python())


def _shards(guest: Guest) -> list[Guest]:
    number = guest.topology.num_shards
    return [replace(guest, shard=index, num_shards=number) for index in range(number)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tests/lab",
        description="Run tests inside emulated machines with several NUMA nodes.",
        epilog="exit status: 0 passed, 1 tests failed, 3 a guest died or hung, 77 cannot run here (1 with "
        "NUMA_COLLECTORS_LAB_REQUIRE=1), 2 bad usage",
    )
    parser.add_argument("command", choices=("list", "image", "run", "all"), help="all: every x86-64 topology")
    parser.add_argument("names", nargs="?", default="", metavar="NAME[,NAME...]", help="topologies (run, image)")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="guests at a time (default 1)")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="keep NAME.xml, NAME.output.txt, NAME.console.txt here"
    )
    parser.add_argument("--shell", metavar="COMMAND", help="run this in the guest's shell in place of pytest")
    parser.add_argument("--timeout-s", type=float, default=900.0, metavar="S", help="a guest's time after boot (900)")
    return parser


def _chosen(command: str, names: str) -> list[GuestTopology]:
    if command == "all":
        return [topology for topology in TOPOLOGIES.values() if topology.arch == "x86_64"]
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in TOPOLOGIES]
    if unknown or (command == "run" and not wanted):
        raise KeyError(f"expected topologies out of {', '.join(TOPOLOGIES)}, got {', '.join(unknown) or 'none'}")
    return [TOPOLOGIES[name] for name in wanted]


def _report(outcome: Outcome, results: Path | None) -> None:
    word = "ok" if outcome.code == EXIT_OK else "FAILED"
    print(f"===== {outcome.name}: {word}: {outcome.reason} (boot {outcome.boot_s:.1f} s, all {outcome.wall_s:.1f} s)")
    print(outcome.output.strip())
    if outcome.code == EXIT_GUEST_DIED or "killed by signal" in outcome.reason:
        print(f"----- {outcome.name}: end of the console")
        print("\n".join(outcome.console.strip().splitlines()[-_CONSOLE_LINES:]))
    sys.stdout.flush()
    if results:
        results.mkdir(parents=True, exist_ok=True)
        for suffix, text in (("xml", outcome.junit), ("output.txt", outcome.output), ("console.txt", outcome.console)):
            (results / f"{outcome.name}.{suffix}").write_text(text)


def _run(jobs: Sequence[tuple[Guest, str]], options: argparse.Namespace) -> list[Outcome]:
    """Run each guest's command, ``options.jobs`` at a time; a signal ends the emulators first."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    outcomes: list[Outcome] = []
    try:
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            futures: list[Future[Outcome]] = [
                pool.submit(run_guest, guest, SOURCE, command, timeout_s=options.timeout_s, stop=stop)
                for guest, command in jobs
            ]
            for future in as_completed(futures):
                outcomes.append(future.result())
                _report(outcomes[-1], options.results)
    finally:
        stop.set()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return outcomes


def _summarise(outcomes: Sequence[Outcome]) -> int:
    """Print one line a topology and one for all; the worst outcome is the exit code."""
    print("===== summary")
    passed = failed = skipped = 0
    for outcome in outcomes:
        counts = outcome.counts
        bad = counts.get("failures", 0) + counts.get("errors", 0)
        good = counts.get("tests", 0) - bad - counts.get("skipped", 0)
        passed, failed, skipped = passed + good, failed + bad, skipped + counts.get("skipped", 0)
        print(f"{outcome.name:10} {outcome.reason:50} {good:4} passed {outcome.wall_s:7.1f} s")
    codes = {outcome.code for outcome in outcomes}
    code = EXIT_GUEST_DIED if EXIT_GUEST_DIED in codes else EXIT_FAILED if EXIT_FAILED in codes else EXIT_OK
    if code != EXIT_OK:
        failed = max(failed, 1)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return code


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cut the arguments at the first ``--``."""
    if "--" not in arguments:
        return list(arguments), []
    cut = arguments.index("--")
    return list(arguments[:cut]), list(arguments[cut + 1 :])


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    own, pytest_args = _split(arguments)
    parser = _parser()
    options = parser.parse_args(own)
    if options.command == "list":
        for topology in TOPOLOGIES.values():
            print(f"{topology.name:10} {topology.summary}")
        return EXIT_OK
    try:
        chosen = _chosen(options.command, options.names)
    except KeyError as error:
        parser.error(error.args[0])
    try:
        guests = [_guest(topology) for topology in chosen]
        if options.command == "image":
            print(image() if not guests else "\n".join(str(guest.image) for guest in guests))
            return EXIT_OK
        if not pytest_args and not options.shell:
            guests = [shard for guest in guests for shard in _shards(guest)]
        chosen_tests = pytest_args or ["tests/guest", "--durations=5"]
        jobs = [(guest, options.shell or pytest_command(guest, chosen_tests)) for guest in guests]
        return _summarise(_run(jobs, options))
    except Unavailable as error:
        print(f"the lab cannot run here: {error}", file=sys.stderr)
        return EXIT_FAILED if os.environ.get("NUMA_COLLECTORS_LAB_REQUIRE") == "1" else EXIT_UNAVAILABLE
    except Stopped:
        print("stopped", file=sys.stderr)
        return 130
