"""Which side holds the run back, from how the learner and the collectors spend their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Bottleneck", "find_bottleneck"]

Kind = Literal["environments", "learner", "transport", "balanced", "unknown"]

# Below this share of the learner's time nothing has been shown to hold it back.
_LEAST_PCT = 20.0

_STAGE_ADVICE = {
    "act": "a faster policy or another collector_inference_device",
    "push": "fewer or smaller observations",
    "sync": "a longer weight_poll_interval",
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The slowest part and one line that says why and what to turn."""

    kind: Kind
    text: str


def find_bottleneck(scalars: Mapping[str, float], stage_ms: Mapping[str, float]) -> Bottleneck:
    """Judge one log point.  ``stage_ms`` is the time of each collector stage for one slot."""
    learn = scalars.get("perf/learn_pct")
    if learn is None:
        return Bottleneck("unknown", "no report of the learner yet")
    wait = scalars.get("wait/data_pct", 0.0)
    publish = scalars.get("transport/publish_pct", 0.0)
    transport = scalars.get("transport/ingest_pct", 0.0) + publish
    space = scalars.get("wait/space_pct", 0.0)
    if max(learn, wait, transport) < _LEAST_PCT:
        return Bottleneck(
            "unknown", f"updates {learn:.0f} %, waiting {wait:.0f} %, transport {transport:.0f} % of the learner"
        )
    if wait >= max(learn, transport):
        return Bottleneck("environments", _environments_text(wait, stage_ms))
    if transport > learn:
        remedy = (
            "raise weight_publish_interval"
            if publish > transport / 2
            else "raise max_ingest_per_iter, shrink observations"
        )
        return Bottleneck("transport", f"transport: {transport:.0f} % of the learner moves data and weights; {remedy}")
    if space < 5.0:
        return Bottleneck(
            "balanced", f"balanced: the learner updates {learn:.0f} % of its time, collectors hardly wait"
        )
    remedy = "lower num_updates, make update() faster, or give its CPUs to it (fewer collectors)"
    return Bottleneck("learner", f"learner: updates {learn:.0f} %, collectors wait for space {space:.0f} %; {remedy}")


def _environments_text(wait: float, stage_ms: Mapping[str, float]) -> str:
    text = f"environments: the learner waits for data {wait:.0f} % of its time; "
    if not stage_ms or sum(stage_ms.values()) <= 0:
        return text + "more collectors or environments"
    stage = max(stage_ms, key=lambda name: stage_ms[name])
    share = 100 * stage_ms[stage] / sum(stage_ms.values())
    advice = _STAGE_ADVICE.get(stage, "more collectors or environments, or a faster environment")
    return text + f"{stage} takes {share:.0f} % of a slot: {advice}"
