"""Replay memory by collector: order, shares, and n-step returns against a naive loop."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from examples.fastsac import ReplayMemory
from examples.fastsac.replay import Batch
from tests.examples.fastsac._reference import naive_n_step, transitions


def tag(batch: Mapping[str, Tensor], start: float) -> dict[str, Tensor]:
    """Make the first action component a number that names the transition."""
    tagged = {name: tensor.clone() for name, tensor in batch.items()}
    names = start + torch.arange(batch["reward"].numel(), dtype=torch.float32)
    tagged["action"][..., 0] = names.view(batch["reward"].shape)
    return tagged


def sampled_tags(memory: ReplayMemory, size: int, rng: torch.Generator) -> Tensor:
    return memory.sample(size, n_step=1, gamma=0.9, generator=rng).action[:, 0]


def test_it_keeps_the_newest_slots_of_each_collector(rng: torch.Generator) -> None:
    memory = ReplayMemory([2, 3], capacity=20, obs_dim=3, action_dim=2)  # 4 slots a collector
    first = tag(transitions(7, 2, generator=rng), 0.0)
    second = tag(transitions(3, 3, generator=rng), 1000.0)
    for slot in range(7):
        memory.extend(0, {name: tensor[slot : slot + 1] for name, tensor in first.items()})
    memory.extend(1, second)
    assert memory.held() == (8, 9)
    assert memory.num_transitions == 17
    seen = set(sampled_tags(memory, 2000, rng).tolist())
    assert seen == set(first["action"][3:, :, 0].flatten().tolist()) | set(second["action"][..., 0].flatten().tolist())


@pytest.mark.parametrize("num_slots", [[11], [3, 4, 4], [4, 7], [1] * 11, [2, 9]])
def test_slots_in_any_grouping_end_in_the_same_memory(num_slots: list[int], rng: torch.Generator) -> None:
    """Spans wrap around the buffer's end or exceed it; one slot at a time is the reference."""
    batch = tag(transitions(11, 2, generator=rng), 0.0)
    reference, memory = (ReplayMemory([2], capacity=10, obs_dim=3, action_dim=2) for _ in range(2))
    for slot in range(11):
        reference.extend(0, {name: tensor[slot : slot + 1] for name, tensor in batch.items()})
    start = 0
    for count in num_slots:
        memory.extend(0, {name: tensor[start : start + count] for name, tensor in batch.items()})
        start += count
    by_tag = [dict(zip(_tags(m), _rows(m), strict=True)) for m in (reference, memory)]
    assert by_tag[0] == by_tag[1]


def _tags(memory: ReplayMemory) -> list[float]:
    tags: list[float] = memory.state_dict()["shards"][0]["action"][:, 0].tolist()
    return tags


def _rows(memory: ReplayMemory) -> list[tuple[list[float], bool]]:
    shard = memory.state_dict()["shards"][0]
    return list(zip(shard["obs"].tolist(), shard["ends"].tolist(), strict=True))


def test_a_collector_is_drawn_from_in_proportion_to_what_it_holds(rng: torch.Generator) -> None:
    memory = ReplayMemory([2, 1, 4], capacity=7000, obs_dim=3, action_dim=2)
    for rank, (num_slots, num_envs) in enumerate([(300, 2), (100, 1), (75, 4)]):
        batch = transitions(num_slots, num_envs, generator=rng)
        batch["action"][..., 0] = float(rank)
        memory.extend(rank, batch)
    drawn = torch.bincount(sampled_tags(memory, 100_000, rng).long()) / 100_000
    # The standard deviation of a share is below 0.0016.
    torch.testing.assert_close(drawn, torch.tensor([0.6, 0.1, 0.3]), atol=0.008, rtol=0.0)


def test_a_collector_that_delivers_nothing_holds_up_nobody(rng: torch.Generator) -> None:
    memory = ReplayMemory([2, 2], capacity=100, obs_dim=3, action_dim=2)
    batch = tag(transitions(5, 2, generator=rng), 0.0)
    memory.extend(1, batch)
    assert set(sampled_tags(memory, 500, rng).tolist()) == set(range(10))


@pytest.mark.parametrize("n_step", [1, 2, 3, 5])
def test_n_step_transitions_equal_the_naive_loop(n_step: int, rng: torch.Generator) -> None:
    memory = ReplayMemory([3, 2], capacity=1000, obs_dim=3, action_dim=2)
    batches = []
    for rank, (num_slots, num_envs) in enumerate([(40, 3), (25, 2)]):
        batch = tag(transitions(num_slots, num_envs, generator=rng), rank * 1000.0)
        memory.extend(rank, {name: tensor[:17] for name, tensor in batch.items()})
        memory.extend(rank, {name: tensor[17:] for name, tensor in batch.items()})
        batches.append(batch)
    sample = memory.sample(400, n_step=n_step, gamma=0.9, generator=rng)
    assert _check_against_naive(sample, batches, n_step) == {0, 1}


def _check_against_naive(sample: Batch, batches: list[dict[str, Tensor]], n_step: int) -> set[int]:
    ranks = set()
    for row in range(sample.reward.shape[0]):
        rank, index = divmod(int(sample.action[row, 0]), 1000)
        batch = batches[rank]
        slot, env = divmod(index, batch["reward"].shape[1])
        reward, next_obs, discount = naive_n_step(batch, slot, env, n_step, 0.9)
        assert torch.equal(sample.obs[row], batch["obs"][slot, env])
        assert torch.equal(sample.next_obs[row], next_obs)
        assert sample.reward[row].item() == pytest.approx(reward, abs=1e-5)
        assert sample.discount[row].item() == pytest.approx(discount, abs=1e-6)
        ranks.add(rank)
    return ranks


@pytest.mark.parametrize("cuts", [(0, 6, 9, 13), (0, 4, 9, 13), (0, 13)])
def test_n_step_stops_where_a_restarted_collector_begins_anew(cuts: tuple[int, ...], rng: torch.Generator) -> None:
    """No flag marks a restart or a discarded slot: the next slot starts from elsewhere."""
    memory = ReplayMemory([2], capacity=1000, obs_dim=3, action_dim=2)
    generations = [transitions(count, 2, generator=rng, done_share=0.0) for count in (6, 7)]
    whole = tag({name: torch.cat([g[name] for g in generations]) for name in generations[0]}, 0.0)
    for start, stop in itertools.pairwise(cuts):
        memory.extend(0, {name: tensor[start:stop] for name, tensor in whole.items()})
    sample = memory.sample(300, n_step=4, gamma=0.9, generator=rng)
    _check_against_naive(sample, [whole], 4)
    crossing = sample.action[:, 0].long() // 2
    assert (sample.discount[crossing == 5] == 0.9).all()
    assert sample.discount[crossing == 8].tolist() == pytest.approx([0.9**4] * int((crossing == 8).sum()))


def test_n_step_does_not_run_from_the_newest_slot_into_the_oldest(rng: torch.Generator) -> None:
    memory = ReplayMemory([1], capacity=5, obs_dim=3, action_dim=2)
    batch = tag(transitions(8, 1, generator=rng, done_share=0.0), 0.0)
    # The oldest slot that is kept starts exactly where the newest ends.
    batch["next_obs"][7] = batch["obs"][3]
    for slot in range(8):
        memory.extend(0, {name: tensor[slot : slot + 1] for name, tensor in batch.items()})
    sample = memory.sample(300, n_step=3, gamma=0.9, generator=rng)
    _check_against_naive(sample, [batch], 3)
    assert (sample.discount[sample.action[:, 0] == 7] == 0.9).all()
    # Slot 4 lies in the last row and goes on in the first.
    assert sample.discount[sample.action[:, 0] == 4][0].item() == pytest.approx(0.9**3)


def test_truncation_bootstraps_and_termination_does_not(rng: torch.Generator) -> None:
    memory = ReplayMemory([2], capacity=10, obs_dim=3, action_dim=2)
    batch = tag(transitions(1, 2, generator=rng, done_share=0.0), 0.0)
    batch["terminated"][0, 0] = batch["truncated"][0, 1] = True
    memory.extend(0, batch)
    sample = memory.sample(50, n_step=1, gamma=0.9, generator=rng)
    assert (sample.discount == torch.where(sample.action[:, 0] == 0, 0.0, 0.9)).all()


def test_it_copies_what_it_is_given(rng: torch.Generator) -> None:
    memory = ReplayMemory([2], capacity=10, obs_dim=3, action_dim=2)
    batch = tag(transitions(2, 2, generator=rng), 0.0)
    memory.extend(0, batch)
    batch["action"].fill_(-1.0)
    assert set(sampled_tags(memory, 100, rng).tolist()) == {0.0, 1.0, 2.0, 3.0}


def test_an_empty_memory_a_wrong_shard_and_no_room_are_errors(rng: torch.Generator) -> None:
    memory = ReplayMemory([2], capacity=10, obs_dim=3, action_dim=2)
    with pytest.raises(ValueError, match="no transition yet"):
        memory.sample(4, n_step=1, gamma=0.9, generator=rng)
    with pytest.raises(ValueError, match=r"collector\[0\] has 2 environments, got a batch of 3"):
        memory.extend(0, transitions(1, 3, generator=rng))
    with pytest.raises(ValueError, match="holds no slot"):
        ReplayMemory([2, 2], capacity=3, obs_dim=3, action_dim=2)


def test_its_state_goes_on_where_it_was(rng: torch.Generator) -> None:
    memory, restored = (ReplayMemory([2, 1], capacity=15, obs_dim=3, action_dim=2) for _ in range(2))
    memory.extend(0, transitions(7, 2, generator=rng))
    memory.extend(1, transitions(3, 1, generator=rng))
    restored.load_state_dict(memory.state_dict())
    more = transitions(2, 2, generator=rng)
    for each in (memory, restored):
        each.extend(0, more)
    samples = [
        m.sample(64, n_step=3, gamma=0.9, generator=torch.Generator().manual_seed(1)) for m in (memory, restored)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*samples, strict=True))
    with pytest.raises(ValueError, match="was saved with"):
        ReplayMemory([2, 1], capacity=30, obs_dim=3, action_dim=2).load_state_dict(memory.state_dict())
