"""Consoles and the bottleneck line."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from numa_collectors.metrics import (
    Bottleneck,
    ConsolePanel,
    LagStats,
    LogPoint,
    PlainConsole,
    QuietConsole,
    WorkerView,
    find_bottleneck,
    make_console,
    process_tree,
    process_usage,
)
from numa_collectors.metrics.console import duration_text

FULL = {
    "perf/env_steps_per_s": 1234.0,
    "perf/updates_per_s": 56.7,
    "perf/learn_pct": 81.0,
    "async/policy_lag": 1.5,
    "lag/max": 4.0,
    "async/ring_fill": 0.25,
    "rollout/mean_return": -12.345,
}


def point(scalars: dict[str, float] | None = None, kind: str = "environments") -> LogPoint:
    views = (
        WorkerView("collector[0]", 0, 700.0, 12.0, 0.5, LagStats(0, 1.5, 3, 4), "node 0, CPUs 0-3, 100 % local"),
        WorkerView("collector[1]", 2, None, None, None, None, ""),
    )
    text = f"{kind}: turn this [not markup]"
    bottleneck = Bottleneck(kind, text)  # type: ignore[arg-type]
    return LogPoint(25_000, 77, 100_000, 65.0, 3_661.0, FULL if scalars is None else scalars, views, bottleneck)


def test_plain_lines() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    console.update(point())
    console.update(point())
    console.update(point({}, kind="learner"))
    console.message("done [x]")
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        " 25 %  25,000 of 100,000 steps, 1:05 gone, 1:01:01 left | 1,234 steps/s | 56.7 updates/s | learn 81 % | "
        "lag 1.5 max 4 | fill 25% | return -12.35"
    )
    assert lines[1] == "bottleneck: environments: turn this [not markup]"
    assert lines[2] == lines[0]
    assert "- steps/s" in lines[3]
    assert lines[4].startswith("bottleneck: learner")
    assert lines[5] == "done [x]"
    assert len(lines) == 6


def test_panel_shows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream = io.StringIO()
    console = ConsolePanel(stream, "demo")
    console.update(point())
    console.update(point({}))
    console.message("a line [above]")
    console.close()
    console.close()
    console.update(point())
    text = stream.getvalue()
    assert all("env steps/s" not in line for line in text.splitlines() if "━" in line)
    for words in (
        "demo",
        "25,000 of 100,000",
        "collector[0]",
        "collector[1]",
        "node 0, CPUs 0-3",
        "━━━",
        "turn this [not markup]",
    ):
        assert words in text
    assert "a line [above]" in text


def read_to_end(leader: int) -> bytes:
    """Return what was written to the closed follower; Linux ends a pseudo-terminal's output with EIO."""
    chunks: list[bytes] = []
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            return b"".join(chunks)
        chunks.append(chunk)


def test_panel_in_a_real_terminal_leaves_the_cursor() -> None:
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w") as stream:
            console = make_console("auto", stream)
            assert isinstance(console, ConsolePanel)
            console.update(point())
            console.close()
        output = read_to_end(leader).decode()
    finally:
        os.close(leader)
    assert "collector[0]" in output
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") >= 0


def test_modes() -> None:
    stream = io.StringIO()
    assert isinstance(make_console("auto", stream), PlainConsole)
    assert isinstance(make_console("plain", stream), PlainConsole)
    quiet = make_console("quiet", stream)
    assert isinstance(quiet, QuietConsole)
    quiet.update(point())
    quiet.message("x")
    quiet.close()
    panel = make_console("panel", stream)
    assert isinstance(panel, ConsolePanel)
    panel.close()


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def shares(learn: float, wait: float, ingest: float = 0, publish: float = 0, space: float = 0) -> dict[str, float]:
    return {
        "perf/learn_pct": learn,
        "wait/data_pct": wait,
        "transport/ingest_pct": ingest,
        "transport/publish_pct": publish,
        "wait/space_pct": space,
    }


BOTTLENECKS = [
    ({}, {}, "unknown", "no report"),
    (shares(5, 5), {}, "unknown", "waiting 5 %"),
    (shares(20, 75), {"env_step": 6, "act": 2}, "environments", "env_step takes 75 % of a slot: more collectors"),
    (shares(20, 75), {"env_step": 1, "act": 9}, "environments", "act takes 90 % of a slot: a faster policy"),
    (shares(20, 75), {}, "environments", "more collectors or environments"),
    (shares(90, 2, space=60), {"env_step": 1}, "learner", "collectors wait for space 60 %; lower num_updates"),
    (shares(90, 2, space=1), {"env_step": 1}, "balanced", "collectors hardly wait"),
    (shares(20, 10, ingest=10, publish=50), {}, "transport", "raise weight_publish_interval"),
    (shares(20, 10, ingest=50, publish=10), {}, "transport", "raise max_ingest_per_iter"),
]


@pytest.mark.parametrize(("scalars", "stage_ms", "kind", "words"), BOTTLENECKS)
def test_bottleneck(scalars: dict[str, float], stage_ms: dict[str, float], kind: str, words: str) -> None:
    found = find_bottleneck(scalars, stage_ms)
    assert found.kind == kind
    assert words in found.text
    assert "\n" not in found.text


def test_process_usage_and_tree() -> None:
    usage = process_usage(os.getpid())
    assert usage["cpu_s"] > 0
    assert usage["rss_bytes"] > 1e6
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        tree = process_tree()
        assert child.pid in tree
        assert set(process_tree(child.pid)) < set(tree)
        assert len(process_tree(child.pid)) == 1
        child.communicate(b"\n", timeout=60)
    assert child.pid not in process_tree()
    assert process_usage(child.pid) == {}
    assert process_tree(child.pid) == ()
