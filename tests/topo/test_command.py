"""The command as users run it: what it prints, its exit codes, its errors in one line, and what it must not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from numa_collectors.testing.machines import MACHINES, topology_of
from numa_collectors.topo import Topology
from numa_collectors.topo.__main__ import main

COMMAND = [sys.executable, "-m", "numa_collectors.topo"]


@pytest.fixture
def dump(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(name: str) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(topology_of(name).to_json())
        return str(path)

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_tree(capsys: pytest.CaptureFixture[str], dump) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "--load", dump("epyc-nps4-8gpu"))
    assert code == 0
    assert out.startswith("2 packages, 8 NUMA nodes, 128 cores, 256 CPUs (SMT2), 1.5 TiB\n")
    assert "node 3  CPUs 48-63,176-191 (16 cores)  192 GiB" in out
    assert "gpu 0000:01:00.0  NVIDIA H200  = gpu:0" in out
    assert "distances" in out


def test_advice_and_exit_code(capsys: pytest.CaptureFixture[str], dump) -> None:  # type: ignore[no-untyped-def]
    for name, code, words in (
        ("cgroup2-nested", 3, ("cpuset-hides-cpus", "cpuset-hides-memory", "quota-below-cpuset", "remedy: ")),
        ("gpu-unknown-node", 3, ("gpu-locality-unknown", "learner_node")),
        ("isolcpus", 3, ("isolated-cpus",)),
        ("unreadable", 3, ()) if os.geteuid() else ("distances-truncated", 3, ("unreadable", "expected 2 numbers")),
        ("threadripper-2990wx", 0, ("no-local-memory",)),
        ("gh200", 0, ("one-node", "no remote memory to avoid")),
        ("epyc-nps1", 0, ()),
    ):
        found, out, _ = run(capsys, "--load", dump(name))
        assert found == code, (name, out)
        assert all(word in out for word in words), (name, out)


def test_numa_balancing_is_advised_against(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = MACHINES["sparse-ids"]().write(tmp_path)
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/numa_balancing").write_text("1\n")
    code, out, _ = run(capsys, "--root", str(root))
    assert code == 3
    assert "sysctl -w kernel.numa_balancing=0" in out


def test_plan(capsys: pytest.CaptureFixture[str], dump) -> None:  # type: ignore[no-untyped-def]
    _, out, _ = run(capsys, "--load", dump("epyc-nps4-8gpu"), "--plan", "8", "--near", "gpu:5")
    lines = [line.split() for line in out.splitlines() if line.startswith(("learner", "collector["))]
    assert lines[0][:2] == ["learner", "6"]
    assert len(lines) == 9
    assert "GPU 5 (0000:51:00.0) is on node 6" in out


def test_json_holds_machine_plan_and_advice(capsys: pytest.CaptureFixture[str], dump) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "--load", dump("cgroup2-nested"), "--plan", "2", "--json")
    data = json.loads(out)
    assert code == 3
    assert Topology.from_json(out) == topology_of("cgroup2-nested")
    assert [item["code"] for item in data["advice"]][:2] == ["cpuset-hides-cpus", "cpuset-hides-memory"]
    assert len(data["plan"]["collectors"]) == 2


def test_dump_and_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first = run(
        capsys, "--root", str(MACHINES["sparse-ids"]().write(tmp_path / "root")), "--dump", str(tmp_path / "d.json")
    )
    second = run(capsys, "--load", str(tmp_path / "d.json"))
    assert first == second
    assert first[0] == 0


@pytest.mark.parametrize(
    "name", ["epyc-nps4-8gpu", "gb200", "one-cpu", "cpus-2048", "mi300x", "gpu-unknown-node", "arm-big-little"]
)
def test_svg(capsys: pytest.CaptureFixture[str], tmp_path: Path, dump, name: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "machine.svg"
    number = 1 if name == "one-cpu" else 6
    code, _, _ = run(capsys, "--load", dump(name), "--plan", str(number), "--svg", str(path))
    assert code in (0, 3)
    texts = [
        element.text or ""
        for element in ET.fromstring(path.read_text()).iter()
        if element.tag.endswith(("text", "title"))
    ]
    topology = topology_of(name)
    for node in topology.nodes:
        alone = any(text.split(" · ")[0] == f"node {node.id}" for text in texts)
        assert alone is (node.kind != "empty")
    assert any(text.startswith("empty nodes 3-9,11-17,19-25,27-33:") for text in texts) is (name == "gb200")
    assert sum(text.startswith("CPU ") and ":" in text for text in texts) == len(topology.online)
    assert sum("collector[0]" in text for text in texts) >= 2
    for device in topology.devices:
        if device.kind == "gpu":
            assert any(device.pci in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--root", "/nonexistent"], "give the directory that stands for /"),
        (["--root", "/proc"], "give the directory that stands for /"),
        (["--load", "/nonexistent.json"], "No such file"),
        (["--load", "/proc/self/status"], "got no JSON"),
        (["--load", "/"], "directory"),
        (["--plan", "0"], "at least 1, got '0'"),
        (["--plan", "-3"], "got '-3'"),
        (["--plan", "many"], "got 'many'"),
        (["--plan", "100000"], "short"),
        (["--plan", "1", "--near", "cpu:0"], "expected gpu:K"),
        (["--plan", "1", "--near", "gpu:x"], "at least 0, got 'x'"),
        (["--plan", "1", "--nodes", "3-1"], "rising range"),
        (["--plan", "1", "--nodes", "77777"], "does not exist"),
        (["--plan", "1", "--cpus-per-collector", "0"], "at least 1"),
        (["--near", "gpu:0"], "need --plan"),
        (["--verify", "0"], "at least 1"),
        (["--verify", "abc"], "got 'abc'"),
        (["--verify", "4194305"], "there is none"),
        (["--svg", "/nonexistent/x.svg"], "No such file"),
        (["--dump", "/nonexistent/x.json"], "No such file"),
    ],
)
def test_wrong_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_dump_of_another_version(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"schema": "numa-collectors/topology/9"}')
    code, _, err = run(capsys, "--load", str(path))
    assert code == 2
    assert "topology/9" in err
    assert "make a new dump" in err


def test_broken_pipe_is_no_traceback() -> None:
    process = subprocess.Popen([*COMMAND, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 3)
    assert errors == b""


def test_standard_library_only() -> None:
    """On a machine with several nodes or one: neither the tree, the plan nor the picture loads anything heavy."""
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'pydantic', 'psutil', 'rich', 'tensorboard'): sys.modules[name] = None\n"
        "from numa_collectors.topo.__main__ import main\n"
        "sys.exit(main(['--plan', '1', '--svg', '/dev/null']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (0, 3), done.stderr


def test_verify_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(60,), name="idle")
    thread.start()
    try:
        code, out, _ = run(capsys, "--verify", str(os.getpid()))
    finally:
        release.set()
        thread.join()
    assert code in (0, 3)
    assert out.startswith(f"process {os.getpid()} (")
    assert "private pages: node 0" in out or "unverified" in out


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs root to become another user")
def test_verify_another_users_process(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        os.seteuid(65534)
        code, _, err = run(capsys, "--verify", "1")
    finally:
        os.seteuid(0)
    assert code == 2
    assert "run as its user, or with CAP_SYS_PTRACE" in err
    assert err.count("\n") == 1
