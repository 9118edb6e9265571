"""Two learners that average their gradients, each with collectors of its own on the cores of its rank.

    torchrun --standalone --nproc-per-node=2 -m examples.ddp

Every rank has a whole trainer for the task of ``quickstart.py``; what crosses between ranks is the all-reduce of
``DistributedDataParallel`` in the backward pass of each update.  In strict mode every rank makes the same number of updates,
so that no all-reduce waits for a rank that has ended.  All ranks have the same weights after each update, bit for bit, and
check it now and then.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import sys
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.quickstart import SCHEMA, PointCollector, PointLearner, make_actor
from numa_collectors.config import load_config
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.learner import LearnerContext
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer

CHECK_INTERVAL_UPDATES = 20
# Each of them is of one rank: two ranks step twice as many environments.
RUN = {
    "num_envs": 16,
    "num_collectors": 2,
    "total_env_steps": 12_800,
    "learning_starts": 640,
    "log_interval_s": 1.0,
    "oversubscribe": True,
    "run_dir": "runs/ddp",
    "learner_device": "cpu",
    "collector_inference_device": "cpu",
}


class DDPPointLearner(PointLearner):
    """The quickstart's learner with both networks wrapped; memory and sampling stay each rank's own.

    Collectives stand in ``update`` alone, the same in each single update: ``ingest``, ``weights`` and ``state_dict`` are called
    at other moments in every rank.
    """

    def __init__(self, ctx: LearnerContext, capacity: int) -> None:
        super().__init__(ctx, capacity)
        # Address, rank and number of ranks are in the variables that torchrun sets.
        dist.init_process_group("gloo")
        atexit.register(dist.destroy_process_group)
        # Wrapping gives every rank the parameters of rank 0.
        self.ddp_actor, self.ddp_critic = DistributedDataParallel(self.actor), DistributedDataParallel(self.critic)
        self.updates = 0

    def update(self, num_updates: int) -> Mapping[str, float]:
        for _ in range(num_updates):
            rows = self.memory[torch.randint(min(self.stored, len(self.memory)), (128,))]
            obs, reward = rows[:, :2], rows[:, 4]
            critic_loss = nn.functional.mse_loss(self.ddp_critic(rows[:, :4]).squeeze(-1), reward)
            self._descend(self.critic_optimizer, critic_loss)
            self._descend(self.actor_optimizer, -self.critic(torch.cat((obs, self.ddp_actor(obs)), -1)).mean())
            self.updates += 1
            if self.updates % CHECK_INTERVAL_UPDATES == 0:
                self.check()
        return {"critic_loss": critic_loss.item(), "checked_at": self.updates // CHECK_INTERVAL_UPDATES}

    def check(self) -> None:
        """Raise ``RuntimeError`` unless the weights are the same bits in all ranks."""
        tensors = [*self.actor.parameters(), *self.critic.parameters()]
        bits = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
        digests = [""] * dist.get_world_size()
        dist.all_gather_object(digests, hashlib.blake2b(bits, digest_size=8).hexdigest())
        if len(set(digests)) > 1:
            raise RuntimeError(f"expected the same weights in all ranks after {self.updates} updates, got {digests}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train with averaged gradients; start it with torchrun.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of RunConfig")
    try:
        trainer = FanOutTrainer(
            load_config(RUN, overrides=parser.parse_args().overrides),
            collector=PointCollector,
            learner=partial(DDPPointLearner, capacity=20_000),
            schema=SCHEMA,
            weights=WeightSpec.like(make_actor().state_dict()),
        )
        result = trainer.run()
    except NumaCollectorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"rank {trainer.setup.ranks.rank}: {result.summary()}", flush=True)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
