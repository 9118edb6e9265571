"""The replay memory by collector: their buffers, fed and sampled apart."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip(
    "motrix_fastsac", reason="motrix is not installed here: `make demo-motrix` makes an environment that has it"
)
import numpy as np
import torch
from motrix_fastsac.collector import Task
from motrix_fastsac.learner import ShardedReplay
from motrix_rl_builtin.fastsac.config import FastSacAgentCfg, FastSacCfg


def slots(first: int, num_slots: int, num_envs: int, base: float = 0.0, **flags: Any) -> dict[str, torch.Tensor]:
    """Return slots whose observation is ``base + 100 * env + step``."""
    step = torch.arange(first, first + num_slots, dtype=torch.float32).view(-1, 1)
    value = base + 100.0 * torch.arange(num_envs, dtype=torch.float32) + step
    no = torch.zeros(num_slots, num_envs, dtype=torch.bool)
    batch = {"obs": value[..., None].repeat(1, 1, 2), "critic_obs": value[..., None].repeat(1, 1, 3)}
    batch |= {"action": value[..., None], "reward": value, "final_obs": batch["obs"] + 0.5}
    batch |= {"final_critic_obs": batch["critic_obs"] + 0.5}
    return batch | {name: no.clone() for name in ("terminated", "truncated", "begins", "final")} | flags


def replay(*num_envs: int, n_steps: int = 1) -> ShardedReplay:
    cfg = FastSacCfg(agent=FastSacAgentCfg(buffer_size=50, num_steps=n_steps, gamma=0.5))
    task = Task(None, cfg, (2, 3, 1), np.ones(1, np.float32), np.zeros(1, np.float32))
    return ShardedReplay(num_envs, task, torch.device("cpu"))


def test_collectors_are_sampled_by_their_environments_and_successors_are_their_own() -> None:
    memory = replay(3, 1)
    memory.extend(0, slots(0, 20, 3))
    memory.extend(1, slots(0, 7, 1, base=1000.0))  # a collector that is behind holds up nothing
    sample = memory.sample(8)
    assert sample["obs"].shape == (32, 2)
    assert int((sample["obs"][:, 0] >= 1000.0).sum()) == 8
    assert torch.equal(sample["next_obs"], sample["obs"] + 1)
    assert torch.equal(sample["next_critic_obs"], sample["critic_obs"] + 1)


def test_a_collector_without_data_is_left_out_and_the_batch_keeps_its_size() -> None:
    memory = replay(2, 3)
    memory.extend(0, slots(0, 5, 2))
    sample = memory.sample(4)
    assert sample["obs"].shape == (20, 2)
    assert bool((sample["obs"] < 1000.0).all())
    with pytest.raises(RuntimeError, match="no complete transitions"):
        replay(2, 3).sample(4)


def test_one_collector_samples_the_bits_of_their_buffer() -> None:
    from motrix_rl_builtin.fastsac.buffer import SimpleReplayBuffer

    memory, plain = replay(3), SimpleReplayBuffer(3, 50, 2, 1, 3, 1, 0.5)
    batch = slots(0, 30, 3)
    memory.extend(0, batch)
    for step in range(30):
        names = ("obs", "critic_obs", "action", "reward", "terminated", "truncated")
        plain.extend(*(batch[name][step] for name in names))
    samples = []
    for source in (memory, plain):
        torch.manual_seed(1)
        samples.append(source.sample(16))
    assert all(torch.equal(samples[0][name], samples[1][name]) for name in samples[1])


def test_final_observations_are_the_successors_of_truncated_rows() -> None:
    memory = replay(2)
    truncated = torch.zeros(10, 2, dtype=torch.bool)
    truncated[4, 1] = True
    memory.extend(0, slots(0, 10, 2, truncated=truncated, final=truncated.clone()))
    sample = memory.sample(200)
    ended = sample["truncations"] == 1
    assert int(ended.sum()) > 0
    assert torch.equal(sample["next_obs"], sample["obs"] + torch.where(ended, 0.5, 1.0)[:, None])
    assert torch.equal(sample["next_critic_obs"], sample["critic_obs"] + torch.where(ended, 0.5, 1.0)[:, None])


@pytest.mark.parametrize("n_steps", [1, 3])
def test_no_sample_bridges_the_restart_of_a_collector(n_steps: int) -> None:
    memory = replay(2, n_steps=n_steps)
    memory.extend(0, slots(0, 10, 2))
    begins = torch.zeros(10, 2, dtype=torch.bool)
    begins[0] = True
    memory.extend(0, slots(0, 10, 2, base=1000.0, begins=begins))
    sample = memory.sample(400)
    gap = sample["next_obs"][:, 0] - sample["obs"][:, 0]
    assert bool((gap <= n_steps).all())
    # Row 9 has no successor and is gone; row 8 leads to row 9 and the trajectory stops there.
    assert 9.0 not in sample["obs"][:, 0]
    last = sample["obs"][:, 0] == 8.0
    assert bool(last.any())
    assert bool((sample["next_obs"][last, 0] == 9.0).all())
    assert bool((sample["truncations"][last] == 1).all())
