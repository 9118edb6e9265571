"""A collector over Gymnasium environments, in all three autoreset modes.

Autoreset and what a slot then holds (``done`` = terminated or truncated):

- *same step*: the environment resets in the step that ends an episode and hands over the true last observation in
  ``infos["final_obs"]``; ``next_obs`` is that one.
- *disabled*: the environments in ``done`` are reset at once, by ``reset(options={"reset_mask": done})``.
- *next step*: the step after ``done`` ignores its action and returns the reset's observation: no transition took
  place.  A slot has one row an environment, always, and the other environments did step, so such a row cannot be left
  out: it gets ``valid`` = False and repeats the transition that ended the episode.  A learner that forgets the mask
  then trains on a real transition twice, never on one from a last observation to a reset's.

Prefer same-step where there is a choice: no row is lost.  A single-environment factory, or a list of them, gets it.

*Not covered.*  Gymnasium's own vector environments do not copy the last observation before they reset.  Of an environment
that reuses its buffer they hand over the reset's observation instead: refused for SyncVectorEnv, not to be told from here for
AsyncVectorEnv.  Give single environments, or use another mode.

Thread pools.  The process is bound before the environment is made, so threads that it starts stay on its CPUs; how
*many* it starts is the environment's business.  Take ``ctx`` in ``make_env`` and pass on ``ctx.cpus`` (None: not
bound):

- EnvPool: ``num_threads=len(ctx.cpus)``, ``thread_affinity_offset=ctx.cpus[0]`` (it pins thread i to CPU offset + i,
  so only with consecutive CPUs; otherwise leave it at -1), inside a ``gymnasium.vector.VectorEnv`` of your own;
- motrixsim: ``init_thread_pool(len(ctx.cpus))`` before the first world is made;
- numba: ``numba.set_num_threads(len(ctx.cpus))`` (NUMBA_NUM_THREADS is capped for the worker already);
- MuJoCo in a ``ThreadPoolExecutor`` (``mujoco.rollout``): ``nthread=len(ctx.cpus)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numa_collectors.collector.checks import first_nonfinite
from numa_collectors.collector.context import Collector, CollectorContext, CollectorError, Episode, Policy
from numa_collectors.collector.spaces import GymSpec, Leaf, action_leaf, leaves, slot_schema
from numa_collectors.errors import NumaCollectorsError, SchemaMismatchError

__all__ = ["GymCollector", "gym_schema"]


def _spec(env: Any, mode: str, float_dtype: str | None, limit: int | None) -> GymSpec:
    obs = leaves(env.single_observation_space, float_dtype)
    action = action_leaf(env.single_action_space, float_dtype)
    return GymSpec(
        schema=slot_schema(obs, action, valid=mode == "NextStep"),
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
        autoreset_mode=mode,
        obs_leaves=obs,
        action=action,
        max_episode_steps=limit,
    )


def gym_schema(
    make_env: Any,
    *,
    float_dtype: str | None = "float32",
    autoreset_mode: str | None = None,
    ctx: CollectorContext | None = None,
) -> GymSpec:
    """Make one environment, read its spaces and its autoreset mode, close it, and return what the slots will hold.

    ``make_env`` and ``autoreset_mode``: as for :class:`GymCollector`.  ``float_dtype``: what floating-point
    observations and actions are stored as; ``None`` keeps the space's dtype.  ``ctx``: what a factory that asks for
    it is given.
    """
    from numa_collectors.collector import _vectorize

    env = _vectorize.build(make_env, CollectorContext() if ctx is None else ctx, probe=True)
    try:
        mode = _vectorize.autoreset_mode(env, autoreset_mode)
        return _spec(env, mode, float_dtype, _vectorize.max_episode_steps(env))
    finally:
        env.close()


class GymCollector(Collector):
    """Steps Gymnasium environments.  ``functools.partial(GymCollector, make_env=..., make_policy=...)`` is a
    collector factory.

    make_env: an environment id; a callable that returns one ``gymnasium.Env`` (called ``num_envs`` times) or a
        ``gymnasium.vector.VectorEnv`` of ``ctx.num_envs`` environments; or a list with one such single-environment
        callable for each environment of the run, of which the collector takes its shard.  A callable with a
        parameter ``num_envs``, or with one named ``ctx`` or one required parameter, gets these.
    make_policy: callable ``(ctx, spec: GymSpec) -> Policy``.
    autoreset_mode: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``, for vector environments whose metadata do not say.

    Environments are seeded once, by ``reset(seed=...)`` with one seed each (``ctx.env_seeds()``; a vector
    environment that is not Gymnasium's Sync- or AsyncVectorEnv gets ``ctx.seed``).  While fewer than
    ``ctx.learning_starts_slots`` slots were collected, counting earlier generations, actions are drawn from the
    action space by a seeded generator. Episode returns sum the rewards as the slots hold them.  Stages: ``act``,
    ``env_step``.
    """

    def __init__(
        self,
        ctx: CollectorContext,
        make_env: Any,
        make_policy: Callable[[CollectorContext, GymSpec], Policy],
        *,
        autoreset_mode: str | None = None,
    ) -> None:
        from numa_collectors.collector import _vectorize

        self._ctx = ctx
        self._step = ctx.start_slot
        try:
            self._env = _vectorize.build(make_env, ctx)
        except NumaCollectorsError:
            raise
        except Exception as error:
            raise ctx.error(f"making the environment raised {type(error).__name__}: {error}") from error
        try:
            mode = _vectorize.autoreset_mode(self._env, autoreset_mode)
            self.spec = _spec(self._env, mode, "float32", _vectorize.max_episode_steps(self._env))
            sampler_seed = int(np.random.SeedSequence(ctx.seed, spawn_key=(1,)).generate_state(1)[0])
            self._random = _vectorize.action_sampler(self.spec.action_space, ctx.num_envs, sampler_seed)
            self._seeds: Any = ctx.env_seeds() if _vectorize.takes_seed_list(self._env) else ctx.seed
            self._policy = make_policy(ctx, self.spec)
        except BaseException:
            self._env.close()
            raise
        self._finish = {"SameStep": self._same_step, "NextStep": self._next_step, "Disabled": self._disabled}[mode]
        self._action_dtype = np.dtype(self.spec.action_space.dtype)
        self._obs: Any = None
        self._acting: dict[str, np.ndarray] = {}
        self._ended = np.zeros(ctx.num_envs, np.bool_)
        self._last: dict[str, np.ndarray] = {}
        self._returns = np.zeros(ctx.num_envs)
        self._lengths = np.zeros(ctx.num_envs, np.int64)
        self._episodes: list[Episode] = []

    # -- Collector
    # ----------------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights, version)

    def drain_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def close(self) -> None:
        self._guard("close", self._env.close)

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self._obs is None:
            self._begin(slot)
        # Before the step: environments reuse their buffers in place.
        for leaf in self.spec.obs_leaves:
            name = leaf.field("obs")
            self._write(slot[name], leaf.get(self._obs), name)
            np.copyto(self._acting[leaf.key], slot[name])
        with self._ctx.timer("act"):
            self._act(slot["action"])
        actions = np.array(slot["action"], self._action_dtype)
        with self._ctx.timer("env_step"):
            obs, reward, terminated, truncated, infos = self._guard("step", self._env.step, actions)
        self._write(slot["reward"], reward, "reward")
        self._write(slot["terminated"], terminated, "terminated")
        self._write(slot["truncated"], truncated, "truncated")
        for leaf in self.spec.obs_leaves:
            name = leaf.field("next_obs")
            self._write(slot[name], leaf.get(obs), name)
        self._obs = obs
        done = slot["terminated"] | slot["truncated"]
        self._finish(slot, done, infos)
        self._step += 1

    # -- before the step
    # ----------------------------------------------------------------------------------------------------

    def _begin(self, slot: Mapping[str, np.ndarray]) -> None:
        self._check_schema(slot)
        self._acting = {leaf.key: np.empty_like(slot[leaf.field("obs")]) for leaf in self.spec.obs_leaves}
        self._last = {name: np.empty_like(slot[name]) for name in self.spec.schema.names}
        with self._ctx.timer("env_step"):
            self._obs, _ = self._guard("reset", self._env.reset, seed=self._seeds)

    def _check_schema(self, slot: Mapping[str, np.ndarray]) -> None:
        num_envs = self._ctx.num_envs
        expected = {field.name: (np.dtype(field.dtype), (num_envs, *field.shape)) for field in self.spec.schema.fields}
        problems = [f"field {name!r} is missing" for name in expected if name not in slot]
        problems += [f"field {name!r} is not one that this environment fills" for name in slot if name not in expected]
        for name, (dtype, shape) in expected.items():
            got = slot.get(name)
            if got is not None and (got.shape != shape or not np.can_cast(dtype, got.dtype, "same_kind")):
                problems.append(
                    f"field {name!r}: the environment gives {dtype} {shape}, the slot has {got.dtype} {got.shape}"
                )
        if problems:
            raise SchemaMismatchError(
                f"{self._ctx.name}: the slot does not match the environment: {'; '.join(problems)}. Make the schema "
                "from the same environment: gym_schema(make_env).schema"
            )

    def _act(self, out: np.ndarray) -> None:
        if self._step < self._ctx.learning_starts_slots:
            self._write(out, self._random(), "action")
            return
        single = len(self._acting) == 1 and "" in self._acting
        try:
            actions = self._policy.act(self._acting[""] if single else self._acting)
        except NumaCollectorsError:
            raise
        except Exception as error:
            raise self._error(f"the policy raised {type(error).__name__} in act(): {error}") from error
        self._write(out, actions, "action")
        # A NaN given to a simulator may not come back out of it for many steps, and then at another environment.
        bad = first_nonfinite(out) if out.dtype.kind == "f" else None
        if bad is not None:
            raise self._error(f"the policy gave {out[bad]}: expected finite actions", row=bad[0], field="action")

    # -- after the step
    # -----------------------------------------------------------------------------------------------------

    def _same_step(self, slot: Mapping[str, np.ndarray], done: np.ndarray, infos: Mapping[str, Any]) -> None:
        if not self._count(slot["reward"], done):
            return
        final = infos.get("final_obs", infos.get("final_observation"))
        one_each = isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
        for row in np.flatnonzero(done):
            if final is None or (one_each and final[row] is None):
                raise self._error(
                    "the episode ended in same-step autoreset, but infos['final_obs'] does not hold its last "
                    "observation; without it the value would be bootstrapped from the reset's",
                    row=int(row),
                )
            for leaf in self.spec.obs_leaves:
                name = leaf.field("next_obs")
                value = leaf.get(final[row]) if one_each else leaf.get(final)[row]
                if one_each:
                    self._check_own(leaf, value, int(row))
                self._write(slot[name][row : row + 1], np.asarray(value)[np.newaxis], name, row=int(row))

    def _check_own(self, leaf: Leaf, final: Any, row: int) -> None:
        """Gymnasium's SyncVectorEnv resets before it hands over the last observation, and does not copy it."""
        last = getattr(self._env.unwrapped, "_env_obs", None)
        if last is not None and isinstance(final, np.ndarray) and np.may_share_memory(final, leaf.get(last[row])):
            raise self._error(
                "the environment reuses its observation's buffer, so SyncVectorEnv in same-step mode hands over the "
                "reset's observation as the last one; make the vector environment with another autoreset_mode, or "
                "give make_env single environments",
                row=row,
                field=leaf.field("next_obs"),
            )

    def _disabled(self, slot: Mapping[str, np.ndarray], done: np.ndarray, infos: Mapping[str, Any]) -> None:
        if self._count(slot["reward"], done):
            with self._ctx.timer("env_step"):
                self._obs, _ = self._guard("reset", self._env.reset, options={"reset_mask": done})

    def _next_step(self, slot: Mapping[str, np.ndarray], done: np.ndarray, infos: Mapping[str, Any]) -> None:
        fake = self._ended
        slot["valid"][...] = ~fake
        self._count(slot["reward"], done, ~fake)
        for name, last in self._last.items():
            if name != "valid":
                slot[name][fake] = last[fake]
                last[done] = slot[name][done]
        self._ended = done

    def _count(self, reward: np.ndarray, done: np.ndarray, real: np.ndarray | None = None) -> bool:
        """Add up returns and lengths; return whether any episode ended."""
        if real is None:
            self._returns += reward
            self._lengths += 1
        else:
            self._returns[real] += reward[real]
            self._lengths[real] += 1
        rows = done.nonzero()[0]
        if not len(rows):
            return False
        for row in rows:
            self._episodes.append(Episode(float(self._returns[row]), int(self._lengths[row])))
        self._returns[rows] = 0.0
        self._lengths[rows] = 0
        return True

    # -- what may go wrong
    # --------------------------------------------------------------------------------------------------

    def _write(self, out: np.ndarray, value: Any, name: str, row: int | None = None) -> None:
        """Copy without broadcasting and without a cast that changes the kind of number."""
        if type(value) is np.ndarray and value.dtype == out.dtype and value.shape == out.shape:
            out[...] = value
            return
        array = np.asarray(value)
        if array.shape != out.shape or not np.can_cast(array.dtype, out.dtype, "same_kind"):
            raise SchemaMismatchError(
                f"{self._ctx.describe(row, self._step, name)}: expected {out.dtype} {out.shape}, got {array.dtype} "
                f"{array.shape}; "
                + ("mend the policy" if name == "action" else "the environment does not keep to its own space")
            )
        np.copyto(out, array, casting="same_kind")

    def _guard(self, action: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except CollectorError as error:
            # Raised by one environment of several, which knows itself but not the step.
            raise CollectorError(
                f"{error} (step {self._step})", rank=error.rank, env=error.env, step=self._step, field=error.field
            ) from error.__cause__
        except Exception as error:
            raise self._error(f"the environment raised {type(error).__name__} in {action}(): {error}") from error

    def _error(self, message: str, *, row: int | None = None, field: str | None = None) -> CollectorError:
        return self._ctx.error(message, row=row, step=self._step, field=field)
