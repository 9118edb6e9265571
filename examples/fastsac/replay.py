"""Replay memory kept by collector: each fills its own circular buffer at its own pace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """B sampled transitions.

    ``reward`` is the discounted sum over the steps taken, ``next_obs`` the observation after the last of them and
    ``discount`` what its value is multiplied by: gamma to the number of steps, or 0 if that step terminated.
    """

    obs: Tensor
    action: Tensor
    reward: Tensor
    next_obs: Tensor
    discount: Tensor


class _Shard:
    """The part of the memory that one collector writes: rows ``base`` to ``base + num_rows``."""

    def __init__(self, base: int, capacity_slots: int, num_envs: int) -> None:
        self.base = base
        self.capacity_slots = capacity_slots
        self.num_envs = num_envs
        self.num_rows = capacity_slots * num_envs
        self.num_slots = 0
        self.cursor = 0

    def rows(self, first_slot: int, num_slots: int) -> slice:
        start = self.base + first_slot * self.num_envs
        return slice(start, start + num_slots * self.num_envs)


class ReplayMemory:
    """One circular buffer a collector, sampled as one.

    A slot holds one transition of each environment of a collector. Transitions are complete: ``next_obs`` is the
    observation that the step led to, also where the episode ended, so no transition needs its successor and no
    collector needs another. All buffers lie in one allocation a field, so that sampling costs one gather a field
    whatever the number of collectors.

    For n-step returns a transition is joined to the next slot's only where the episode goes on: not after a
    termination or truncation, and not where the next slot starts from another observation than this one led to (the
    collector was restarted, or slots were discarded).

    Args:
        num_envs: environments of each collector, by rank.
        capacity: transitions kept; shared out by environments, so that every environment keeps as many slots.
        obs_dim, action_dim: O and A.
    """

    def __init__(
        self,
        num_envs: Sequence[int],
        capacity: int,
        obs_dim: int,
        action_dim: int,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        if not num_envs or min(num_envs) < 1:
            raise ValueError(f"every collector must have at least one environment, got {list(num_envs)}")
        capacity_slots = capacity // sum(num_envs)
        if capacity_slots < 1:
            raise ValueError(f"a capacity of {capacity} transitions holds no slot of {sum(num_envs)} environments")
        device = torch.device(device)
        self._shards: list[_Shard] = []
        num_rows = 0
        for count in num_envs:
            self._shards.append(_Shard(num_rows, capacity_slots, count))
            num_rows += capacity_slots * count
        self._fields = {
            "obs": torch.zeros(num_rows, obs_dim, device=device),
            "action": torch.zeros(num_rows, action_dim, device=device),
            "reward": torch.zeros(num_rows, device=device),
            "terminated": torch.zeros(num_rows, dtype=torch.bool, device=device),
            "truncated": torch.zeros(num_rows, dtype=torch.bool, device=device),
            "next_obs": torch.zeros(num_rows, obs_dim, device=device),
        }
        # True where the next slot does not continue this one; the newest slot of a shard always ends.
        self._ends = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._base = torch.tensor([s.base for s in self._shards], device=device)
        self._num_envs = torch.tensor([s.num_envs for s in self._shards], device=device)
        self._num_rows = torch.tensor([s.num_rows for s in self._shards], device=device)
        self._note_held()

    @property
    def num_transitions(self) -> int:
        """Transitions held, over all collectors."""
        return sum(self.held())

    def held(self) -> tuple[int, ...]:
        """Transitions held of each collector."""
        return tuple(s.num_slots * s.num_envs for s in self._shards)

    def extend(self, rank: int, batch: Mapping[str, Tensor]) -> None:
        """Append slots of one collector, oldest first; the oldest that it holds give way.

        Args:
            batch: ``obs`` and ``next_obs`` (S, N, O), ``action`` (S, N, A), ``reward``, ``terminated`` and
                ``truncated`` (S, N), where N is this collector's number of environments. Other fields are left alone.

        Raises:
            ValueError: N is not this collector's number of environments.
        """
        shard = self._shards[rank]
        num_slots, num_envs = batch["reward"].shape
        if num_envs != shard.num_envs:
            raise ValueError(f"collector[{rank}] has {shard.num_envs} environments, got a batch of {num_envs}")
        start = max(0, num_slots - shard.capacity_slots)
        while start < num_slots:
            stop = min(num_slots, start + shard.capacity_slots - shard.cursor)
            self._write(shard, {name: batch[name][start:stop] for name in self._fields})
            start = stop
        self._note_held()

    def _write(self, shard: _Shard, run: Mapping[str, Tensor]) -> None:
        """Write slots that do not wrap, and settle where the slot before them ends."""
        num_slots = run["reward"].shape[0]
        rows = shard.rows(shard.cursor, num_slots)
        if shard.num_slots > 0:
            newest = shard.rows((shard.cursor - 1) % shard.capacity_slots, 1)
            leads_elsewhere = (self._fields["next_obs"][newest] != run["obs"][0]).any(-1)
            self._ends[newest] = self._done(newest) | leads_elsewhere
        for name, field in self._fields.items():
            field[rows] = run[name].reshape(-1, *field.shape[1:])
        ends = torch.ones_like(self._ends[rows]).view(num_slots, shard.num_envs)
        ends[:-1] = (run["next_obs"][:-1] != run["obs"][1:]).any(-1)
        self._ends[rows] = ends.view(-1) | self._done(rows)
        shard.cursor = (shard.cursor + num_slots) % shard.capacity_slots
        shard.num_slots = min(shard.num_slots + num_slots, shard.capacity_slots)

    def _done(self, rows: slice) -> Tensor:
        return self._fields["terminated"][rows] | self._fields["truncated"][rows]

    def _layout(self) -> list[list[int]]:
        return [[s.capacity_slots, s.num_envs] for s in self._shards]

    def _note_held(self) -> None:
        self._held_ends = torch.tensor(self.held(), device=self._ends.device).cumsum(0)

    def sample(self, batch_size: int, *, n_step: int, gamma: float, generator: torch.Generator) -> Batch:
        """Draw transitions uniformly over all that is held, with replacement.

        A collector is therefore drawn from in proportion to what it has delivered.

        Raises:
            ValueError: nothing is held.
        """
        total = self.num_transitions
        if total == 0:
            raise ValueError("the replay memory holds no transition yet; call ingest before update")
        picks = torch.randint(total, (batch_size,), generator=generator, device=self._ends.device)
        rank = torch.bucketize(picks, self._held_ends, right=True)
        # A shard fills its rows from its base and then overwrites them, so what it holds is its first rows.
        local = picks - self._held_ends[rank - 1].masked_fill(rank == 0, 0)
        first = self._base[rank] + local
        reward = self._fields["reward"][first]
        discount = torch.full_like(reward, gamma)
        last, goes_on = first, ~self._ends[first]
        for step in range(1, n_step):
            local = torch.where(goes_on, (local + self._num_envs[rank]) % self._num_rows[rank], local)
            last = self._base[rank] + local
            reward = reward + goes_on * gamma**step * self._fields["reward"][last]
            discount = torch.where(goes_on, gamma ** (step + 1), discount)
            goes_on = goes_on & ~self._ends[last]
        return Batch(
            obs=self._fields["obs"][first],
            action=self._fields["action"][first],
            reward=reward,
            next_obs=self._fields["next_obs"][last],
            discount=discount.masked_fill(self._fields["terminated"][last], 0.0),
        )

    def state_dict(self) -> dict[str, Any]:
        """What is held, as copies: for each collector its cursor, its number of slots and its rows."""
        shards = []
        for shard in self._shards:
            rows = shard.rows(0, shard.num_slots)
            fields = {name: field[rows].clone() for name, field in self._fields.items()}
            fields["ends"] = self._ends[rows].clone()
            shards.append({"cursor": shard.cursor, "num_slots": shard.num_slots, **fields})
        return {"layout": self._layout(), "shards": shards}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave.

        Raises:
            ValueError: it was saved with other shards or another capacity.
        """
        if state["layout"] != self._layout():
            raise ValueError(
                f"the replay memory was saved with (slots, environments) {state['layout']} a collector, this one has "
                f"{self._layout()}; keep num_envs, num_collectors and replay_capacity, or resume without it"
            )
        for shard, saved in zip(self._shards, state["shards"], strict=True):
            shard.cursor, shard.num_slots = saved["cursor"], saved["num_slots"]
            rows = shard.rows(0, shard.num_slots)
            self._ends[rows] = saved["ends"].to(self._ends.device)
            for name, field in self._fields.items():
                field[rows] = saved[name].to(field.device)
        self._note_held()
