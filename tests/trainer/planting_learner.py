"""The learner in which faults can be planted; see ``planting``."""

from __future__ import annotations

from typing import Any

from numa_collectors.learner import LearnerContext
from tests.trainer.planting import Plan
from tests.trainer.toys import WEIGHTS, CountingLearner


class PlantedLearner(CountingLearner):
    """A :class:`CountingLearner` in which faults can be planted."""

    weight_spec = WEIGHTS

    def __init__(self, ctx: LearnerContext, **options: Any) -> None:
        super().__init__(ctx, **options)
        self.plan = Plan()
        self.plan.register("learner-0")
        self.num_saves = 0
        self.plan.at("learner", 0, "boot")

    def update(self, num_updates: int) -> dict[str, float]:
        if self.updates == 0:
            self.plan.at("learner", 0, "first update")
        if self.updates >= 60:
            self.plan.at("learner", 0, "training")
        return super().update(num_updates)

    def state_dict(self) -> dict[str, Any]:
        self.num_saves += 1
        if self.num_saves == 2:
            self.plan.at("learner", 0, "second checkpoint")
        self.plan.at("learner", 0, "checkpoint")
        return super().state_dict()
