"""The table, the verdicts and the picture of benchmarks/convergence.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.pendulum_optimum import bounds

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLORS = {
    "sync": "tab:blue",
    "strict-2": "tab:orange",
    "strict-2-lead-4": "tab:purple",
    "bound-2": "tab:green",
    "slow-2": "tab:red",
}
# Of the synchronous mean: below it a run has not learned what the synchronous one learns (165 where that is 174.3).
LEARNED_SHARE = 165.0 / 174.3
Runs = list[dict[str, Any]]
Verdict = tuple[bool | None, str]

HEAD = """# Convergence

Does a run with two collectors learn as the synchronous one does? Same settings, same seeds; synchronous is the inline mode: one
process, collector and learner in turn (on the motrix task it gives the bits of motrix's own synchronous trainer, which a test
checks).

    make convergence        # runs what is missing in docs/convergence.json, one run at a time, and writes this page

The area is the mean over iterations of the mean return of the last 100 episodes taken in. The final evaluation is the
deterministic policy over fixed-seed episodes (64 on the motrix task, 20 on the others; the same for every run), so that what is
left of noise is the training's; it saturates, and the area is the sensitive figure. Standard deviations are over seeds.
`OMP_NUM_THREADS=1`. CPU time is of all processes of a run, start-up and evaluation included, on a crowded machine.
"""

SCALE = """This pendulum is the example's own (the published motrix packages have none), and so is its scale: from its initial
states uniform torques score {uniform:.1f} and the best torques there are score {best:.1f}, by dynamic programming
(`python -m benchmarks.pendulum_optimum`). Returns of other pendulums do not compare with these.
"""

FASTSAC = """Learning curves of `examples/fastsac/`, with the settings of `python -m examples.fastsac.train --task {case}`.
"""

NOTES = {
    "pendulum-ms": """
Reading. Strict with two collectors learns as fast, and every final policy is within three deviations of the synchronous
mean, by a few tenths of a percent below it on average. What is left is the age of the acting weights: one round of updates
instead of none. With `max_lead_slots=4` it is four, the final policies are worse by twice as much, and three of seven leave
the spread; with `learner_bound` it is the ring's capacity and they are worse still. That is why strict leads by one slot.
Ruled out as causes: final observations (this task hands over none, so that both bootstrap alike); seeds and warm-up (the
first collector's numbers are those of the synchronous run); the normaliser (its statistics travel with the weights, and the
evaluation takes the learner's own); damaged transitions (25,472 of two processes follow the pendulum's equations to 4e-8).
Seed 4 of strict waited for data because another program had one of its CPUs at times; what it has learnt does not depend on
that.
""",
    "InvertedDoublePendulum-v5": """
Reading. A final evaluation of 9,359 is a pole that stays up for all 1,000 steps. One run in eight has a final policy that
lets it fall from fresh resets, in either mode (synchronous seed 4, strict seed 3). The synchronous one keeps it up in
training: none of its eight environments fell in its last 730 iterations, yet its final policy falls after 45 to 93 steps,
with noise as without. Either its very last updates spoilt it or it has lost the states that follow a reset, which it had not
met for so long. The spread of these evaluations is that of such runs, so only the area compares.
""",
    "InvertedPendulum-v5": """
Reading. The return is the number of steps that the pole stays up, 1,000 at most.
""",
}


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
        verdicts = judge(groups, words)
        met = met and all(holds is not False for holds, _ in verdicts)
        picture = plot(case, groups, words)
        parts.append(f"## {case}\n")
        if case == "pendulum-ms":
            uniform, best = bounds()
            parts.append(SCALE.format(uniform=uniform, best=best))
        else:
            parts.append(FASTSAC.format(case=case))
        parts.append(f"![learning curves]({picture.name})\n\n{table(groups, words)}")
        marks = {True: "met", False: "**not met**", None: "figures"}
        parts.append("".join(f"- {marks[holds]}: {text}\n" for holds, text in verdicts))
        parts.append(NOTES.get(case, "").lstrip())
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


def judge(groups: Mapping[str, Runs], words: Mapping[str, str]) -> list[Verdict]:
    """Return (holds, words) for every criterion whose runs exist; None where it is no criterion."""
    verdicts: list[Verdict] = []
    sync, strict = groups.get("sync", []), groups.get("strict-2", [])
    exact = [run for mode in ("sync", "strict-2") for run in groups.get(mode, [])]
    if exact:
        verdicts.append(
            (all(run["got"] == run["expected"] for run in exact), "env steps and updates exact to the unit")
        )
    if len(sync) > 1 and len(strict) > 1:
        verdicts += [_judge_eval(sync, strict), _judge_area(sync, strict)]
    for mode in ("strict-2", "strict-2-lead-4"):
        if len(sync) > 1 and len(groups.get(mode, [])) > 1:
            verdicts.append((None, f"{words[mode]} less synchronous: {_difference(sync, groups[mode])}"))
    for mode, name in (("bound-2", "learner_bound"), ("slow-2", "learner_bound with slow environments")):
        waits = [run["wait_data_pct"] for run in groups.get(mode, [])]
        if waits:
            verdicts.append((max(waits) < 2.0, f"{name}: the learner waits {max(waits):.2f} % of its time (limit 2 %)"))
    bound = [run["eval"] for run in groups.get("bound-2", [])]
    if bound and sync:
        limit = statistics.fmean(run["eval"] for run in sync) * LEARNED_SHARE
        text = f"learner_bound with utd_min evaluates to {min(bound):.1f} at least, {LEARNED_SHARE:.1%} of the synchronous mean"
        verdicts.append((min(bound) >= limit, f"{text}: {limit:.1f}"))
    return verdicts


def _difference(sync: Runs, other: Runs) -> str:
    """Return, for both figures, the difference of the means with its standard error (Welch's: the spreads may differ)."""
    parts = []
    for key, name in (("eval", "final evaluation"), ("auc", "area")):
        values = [[run[key] for run in runs] for runs in (other, sync)]
        error = math.sqrt(sum(statistics.variance(each) / len(each) for each in values))
        change = statistics.fmean(values[0]) - statistics.fmean(values[1])
        parts.append(f"{name} {change:+.1f} ± {error:.1f} ({change / error:+.1f} standard errors)")
    return ", ".join(parts)


def _judge_eval(sync: Runs, strict: Runs) -> Verdict:
    values = [run["eval"] for run in sync]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    worst = min(run["eval"] for run in strict)
    limit = mean - 3.0 * deviation
    below = sum(run["eval"] < limit for run in strict)
    text = f"lowest final evaluation of strict {worst:.1f}, synchronous mean less 3 deviations {limit:.1f}"
    return worst >= limit, f"{text}; {below} of {len(strict)} seeds are below"


def _judge_area(sync: Runs, strict: Runs) -> Verdict:
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
