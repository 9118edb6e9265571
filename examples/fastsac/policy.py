"""FastSAC on the collectors' side: act, and take up weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import EnvSpec, FastSACConfig
from .networks import Actor, bind_flat
from .normalizer import RunningNormalizer


def policy_weights(actor: Actor, normalizer: RunningNormalizer) -> dict[str, Tensor]:
    """What a collector needs to act, all float32: actor parameters, then the normaliser's mean and std."""
    weights = {f"actor.{name}": tensor.detach() for name, tensor in actor.named_parameters()}
    weights["normalizer.mean"] = normalizer.mean
    weights["normalizer.std"] = normalizer.std
    return weights


class FastSACPolicy:
    """Acts with the weights last loaded.

    The weights are one flat vector whose parts the networks use in place: loading a version writes into it, on a device
    with a single copy. The number of threads is torch's own: a bound worker has it set in its environment before
    torch loads.

    Args:
        spec: sizes of the environment.
        config: settings of the algorithm, as the learner's.
        device: where the policy is evaluated.
        seed: of the sampled actions. torch's global generator is left alone.
        deterministic: act with the mean.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: FastSACConfig,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.deterministic = deterministic
        self.version = 0
        self._normalize = config.normalize_obs
        self._generator = torch.Generator(self.device).manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Actor(spec, config).requires_grad_(False).to(self.device)
        self.normalizer = RunningNormalizer(spec.obs_dim).to(self.device)
        weights = policy_weights(self.actor, self.normalizer)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self._flat = bind_flat([*self.actor.parameters(), self.normalizer.mean, self.normalizer.std])
        self._host = self._flat.cpu()
        self._host_views = self._split(self._host.numpy())

    def act(self, obs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return actions (N, A) in the environment's units for observations (N, O)."""
        with torch.inference_mode():
            x = torch.tensor(obs, dtype=torch.float32, device=self.device)
            mean, log_std = self.actor(self.normalizer(x) if self._normalize else x)
            if self.deterministic:
                return self._to_numpy(self.actor.to_env(torch.tanh(mean)))
            noise = torch.randn(mean.shape, generator=self._generator, device=self.device)
            return self._to_numpy(self.actor.to_env(torch.tanh(mean + log_std.exp() * noise)))

    def load_weights(self, weights: Mapping[str, npt.NDArray[Any]], version: int) -> None:
        """Take up a version, bit for bit; ``weights`` may be reused once this returns.

        Raises:
            ValueError: names or shapes are not those of ``policy_weights``; nothing was changed.
        """
        got = {name: tuple(array.shape) for name, array in weights.items()}
        if got != self._shapes:
            names = sorted(n for n in self._shapes.keys() | got.keys() if self._shapes.get(n) != got.get(n))
            expected, given = {n: self._shapes.get(n) for n in names}, {n: got.get(n) for n in names}
            raise ValueError(
                f"weights do not fit this policy: expected {expected}, got {given}; "
                f"learner and collectors must be built from the same EnvSpec and FastSACConfig"
            )
        for name, view in self._host_views.items():
            np.copyto(view, weights[name], casting="no")
        if self._host.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(self._host)
        self.version = version

    def _split(self, flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        views, offset = {}, 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            views[name] = flat[offset : offset + size].reshape(shape)
            offset += size
        return views

    @staticmethod
    def _to_numpy(action: Tensor) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = action.cpu().numpy()
        return array
