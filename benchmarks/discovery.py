"""Time of discovery against ``lstopo`` on the same snapshots, and against ``numactl -H`` on this machine, interleaved.

    python -m benchmarks.discovery [--machines DIR] [--rounds N] [--synthetic NAME ...]

Each round runs every program once, so that drift of the machine meets all alike; medians of wall time, start to finish.
``lstopo`` reads a snapshot through ``HWLOC_FSROOT``; ``numactl`` can read the live machine only and is compared there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from numa_collectors.testing.machines import MACHINES

SNAPSHOTS = ("2arm-2c", "32intel64-2p8co2t+8ve", "nvidiagpunumanodes", "256ia64-64n2s2c", "128arm-2pa2n8cluster4co")
SYNTHETIC = ("epyc-nps4-8gpu", "cpus-2048", "nodes-1024")


def wall_ms(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Return how long ``command`` took, in ms; exit codes other than 0 and 3 (advice) are errors."""
    start = time.perf_counter()
    done = subprocess.run(command, env=dict(env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    elapsed = (time.perf_counter() - start) * 1e3
    if done.returncode not in (0, 3):
        raise RuntimeError(
            f"{' '.join(command)}: exit {done.returncode}: {done.stderr.decode(errors='replace')[-300:]}"
        )
    return elapsed


def contenders(root: str | None) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the programs that can read ``root`` (None: this machine), with their environments."""
    env = dict(os.environ)
    topo = [sys.executable, "-m", "numa_collectors.topo"]
    found = {"topo": (topo if root is None else [*topo, "--root", root], env)}
    if shutil.which("lstopo-no-graphics"):
        hwloc = env if root is None else {**env, "HWLOC_FSROOT": root, "HWLOC_THISSYSTEM": "0"}
        found["lstopo"] = (["lstopo-no-graphics", "--of", "console", "--whole-io"], hwloc)
    if root is None and shutil.which("numactl"):
        found["numactl -H"] = (["numactl", "-H"], env)
    return found


def measure(name: str, root: str | None, rounds: int) -> None:
    """Print one line of medians."""
    programs = contenders(root)
    times: dict[str, list[float]] = {program: [] for program in programs}
    for _ in range(rounds + 1):
        for program, (command, env) in programs.items():
            times[program].append(wall_ms(command, env))
    # The first round fills the page cache.
    cells = [f"{program} {statistics.median(values[1:]):7.1f} ms" for program, values in times.items()]
    print(f"{name:28} " + "   ".join(cells), flush=True)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "machines"
    parser.add_argument("--machines", type=Path, default=default, help="folder of NAME.tar.xz snapshots")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--synthetic", nargs="*", default=list(SYNTHETIC), help="machines of the project's own catalogue"
    )
    arguments = parser.parse_args()
    measure("this machine", None, arguments.rounds)
    for name in SNAPSHOTS:
        archive = arguments.machines / f"{name}.tar.xz"
        if not archive.exists():
            print(f"{name}: skipped, {archive} is not there")
            continue
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(["tar", "-xf", str(archive), "-C", directory], check=True)
            measure(name, str(Path(directory) / name), arguments.rounds)
    for name in arguments.synthetic:
        with tempfile.TemporaryDirectory() as directory:
            measure(name, str(MACHINES[name]().write(directory)), arguments.rounds)


if __name__ == "__main__":
    main()
