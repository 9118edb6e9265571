"""The table, the verdicts and the picture of benchmarks/convergence.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLORS = {"sync": "tab:blue", "strict-2": "tab:orange", "bound-2": "tab:green", "slow-2": "tab:red"}
# Of the final evaluation, in returns: below it a run has not learned what the synchronous one learns.
LEARNED_MARGIN = 9.0
Runs = list[dict[str, Any]]

HEAD = """# Convergence

Does a run with two collectors learn as the synchronous one does? Same settings, same seeds; synchronous is the inline mode: one
process, collector and learner in turn (on the motrix task it gives the bits of motrix's own synchronous trainer, which a test
checks).

    make convergence        # runs what is missing in docs/convergence.json, one run at a time, and writes this page

The area is the mean over iterations of the mean return of the last 100 episodes taken in. The final evaluation is the
deterministic policy over fixed-seed episodes; it saturates, so the area is the sensitive figure. Standard deviations are over
seeds. `OMP_NUM_THREADS=1`. CPU time is of all processes of a run, start-up and evaluation included.
"""


def write_report(results: Mapping[str, dict[str, Any]], words: Mapping[str, str]) -> bool:
    """Write docs/convergence.md and one picture a task; returns whether every criterion that has its runs is met."""
    parts, met = [HEAD], True
    for case in sorted({result["case"] for result in results.values()}, reverse=True):
        groups = {
            mode: sorted(
                (r for r in results.values() if (r["case"], r["mode"]) == (case, mode)), key=lambda r: r["seed"]
            )
            for mode in words
        }
        groups = {mode: runs for mode, runs in groups.items() if runs}
        verdicts = judge(groups)
        met = met and all(holds for holds, _ in verdicts)
        picture = plot(case, groups, words)
        parts.append(f"## {case}\n\n![learning curves]({picture.name})\n\n{table(groups, words)}\n")
        parts.append("".join(f"- {'met' if holds else '**not met**'}: {text}\n" for holds, text in verdicts))
    (DOCS / "convergence.md").write_text("\n".join(parts), encoding="utf-8")
    print("\n".join(parts[1:]))
    return met


def table(groups: Mapping[str, Runs], words: Mapping[str, str]) -> str:
    rows = [
        "| mode | seed | area | final evaluation | env steps | updates | waiting for data | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mode, runs in groups.items():
        for run in runs:
            wait = "" if run["wait_data_pct"] is None or mode == "sync" else f"{run['wait_data_pct']:.1f} %"
            steps, updates = run["got"]
            rows.append(
                f"| {words[mode]} | {run['seed']} | {run['auc']:.1f} | {run['eval']:.1f} | {steps:,} | {updates:,} "
                f"| {wait} | {run['cpu_s']:.0f} |"
            )
        if len(runs) > 1:
            rows.append(f"| **{words[mode]}** | all | **{spread(runs, 'auc')}** | **{spread(runs, 'eval')}** | | | | |")
    return "\n".join(rows) + "\n"


def spread(runs: Runs, key: str) -> str:
    values = [run[key] for run in runs]
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def judge(groups: Mapping[str, Runs]) -> list[tuple[bool, str]]:
    """Return (holds, words) for every criterion whose runs exist."""
    verdicts: list[tuple[bool, str]] = []
    sync, strict = groups.get("sync", []), groups.get("strict-2", [])
    exact = [run for mode in ("sync", "strict-2") for run in groups.get(mode, [])]
    if exact:
        verdicts.append(
            (all(run["got"] == run["expected"] for run in exact), "env steps and updates exact to the unit")
        )
    if len(sync) > 1 and len(strict) > 1:
        verdicts += [_judge_eval(sync, strict), _judge_area(sync, strict)]
    for mode, words in (("bound-2", "learner_bound"), ("slow-2", "learner_bound with slow environments")):
        waits = [run["wait_data_pct"] for run in groups.get(mode, [])]
        if waits:
            verdicts.append(
                (max(waits) < 2.0, f"{words}: the learner waits {max(waits):.2f} % of its time (limit 2 %)")
            )
    bound = [run["eval"] for run in groups.get("bound-2", [])]
    if bound and sync:
        limit = statistics.fmean(run["eval"] for run in sync) - LEARNED_MARGIN
        text = f"learner_bound with utd_min evaluates to {min(bound):.1f} at least, synchronous mean less {LEARNED_MARGIN:.0f}"
        verdicts.append((min(bound) >= limit, f"{text} {limit:.1f}"))
    return verdicts


def _judge_eval(sync: Runs, strict: Runs) -> tuple[bool, str]:
    values = [run["eval"] for run in sync]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    worst = min(run["eval"] for run in strict)
    limit = mean - 3.0 * deviation
    return (
        worst >= limit,
        f"lowest final evaluation of strict {worst:.1f}, synchronous mean less 3 deviations {limit:.1f}",
    )


def _judge_area(sync: Runs, strict: Runs) -> tuple[bool, str]:
    means, errors = [], []
    for runs in (sync, strict):
        values = [run["auc"] for run in runs]
        means.append(statistics.fmean(values))
        errors.append(statistics.variance(values) / len(values))
    error = math.sqrt(sum(errors))
    limit = means[0] - 2.0 * error
    text = f"mean area: strict {means[1]:.1f}, synchronous {means[0]:.1f} less 2 standard errors of the difference: {limit:.1f}"
    return means[1] >= limit, text


def plot(case: str, groups: Mapping[str, Runs], words: Mapping[str, str]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for mode, runs in groups.items():
        for index, run in enumerate(runs):
            label = f"{words[mode]} ({len(runs)} seeds)" if index == 0 else None
            axes.plot(*zip(*run["curve"], strict=True), color=COLORS[mode], alpha=0.6, linewidth=1.2, label=label)
    axes.set(xlabel="iterations (steps of all environments)", ylabel="mean return of the last 100 episodes", title=case)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    path = DOCS / f"convergence_{case.split('-')[0].lower()}.png"
    figure.savefig(path, dpi=120)
    return path
