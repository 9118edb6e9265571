"""What a learner is, and how batches and weights cross between host and device.

torch is imported here and in user code only.  A learner is any object with the five methods of :class:`Learner`; it is built in
its own process by a picklable factory ``(ctx) -> Learner``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from numa_collectors.errors import ConfigError, SchemaMismatchError
from numa_collectors.exchange import Exchange
from numa_collectors.rings import CompactSpan, Consumer, Span
from numa_collectors.rings.layout import build_arrays
from numa_collectors.snapshots import WeightSpec

__all__ = [
    "DeviceIntake",
    "Learner",
    "LearnerContext",
    "LearnerFactory",
    "WeightStager",
    "resolve_device",
    "use_device",
]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LearnerContext:
    """What a learner factory is given.

    ``num_envs`` holds the shard of each of this learner's collectors (the index is the ``rank`` that ``ingest`` gets); ``cpus``
    and ``node`` are ``None`` where nothing is bound.  ``rank`` of ``world_size``: this learner among those of the run, as
    ``torchrun`` counts them; seeds differ by rank.
    """

    device: str
    num_collectors: int
    num_envs: tuple[int, ...]
    seed: int
    cpus: tuple[int, ...] | None = None
    node: int | None = None
    resumed: bool = False
    rank: int = 0
    world_size: int = 1


@runtime_checkable
class Learner(Protocol):
    """The algorithm.

    A learner whose checkpoint holds its replay memory also has an attribute ``num_transitions``: what it holds at the start
    of a session counts towards ``learning_starts``.

    ``ingest`` gets tensors of shape ``(num_slots, num_envs_of_rank, *field_shape)`` on the learner's device, in the order in
    which that collector produced them, and must copy what it keeps: the memory is reused when it returns.
    """

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        """Take the transitions of this learner's collector ``rank``."""

    def update(self, num_updates: int) -> Mapping[str, float]:
        """Make exactly ``num_updates`` gradient updates and return scalars to be logged."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return what the collectors need to act; names, shapes and dtypes never change during a run."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs: tensors, numbers, strings, lists and dicts of them."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


class LearnerFactory(Protocol):
    """A picklable callable that builds the learner inside the learner's process."""

    def __call__(self, ctx: LearnerContext) -> Learner: ...


def resolve_device(name: str, local_rank: int = 0) -> tuple[str, str | None]:
    """Return ``(device, warning)``: ``cuda`` without an index falls back to the CPU, ``cuda:N`` that is absent is an error.

    On a host with several ranks, ``cuda`` is the GPU of ``local_rank``; a rank that is shown a single GPU takes that.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"expected a torch device such as 'cpu' or 'cuda:0', got {name!r}: {error}") from error
    index: int | None = device.index
    if device.type != "cuda":
        return str(device), None
    if not torch.cuda.is_available():
        if index is None:
            return "cpu", "'cuda' was asked for and no CUDA device is available: the CPU is used"
        raise ConfigError(f"expected a CUDA device for {name!r}, got none: use 'cpu', or 'cuda' to fall back to it")
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise ConfigError(f"expected one of {count} CUDA devices, got {name!r}: use an index below {count}, or 'cuda'")
    if index is not None or local_rank == 0 or count == 1:
        return str(device), None
    if local_rank >= count:
        raise ConfigError(
            f"expected a CUDA device for each local rank, got {count} for local_rank={local_rank}: start fewer ranks on this "
            "host, or name the device of each ('cuda:N')"
        )
    return f"cuda:{local_rank}", None


def use_device(name: str) -> None:
    """Make ``name`` the current device of the calling thread, so that new streams and events belong to it."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class WeightStager:
    """One flat host copy of the learner's weights in the layout of a snapshot: one device-to-host copy for all collectors.

    On CUDA the copy is asynchronous into pinned memory on its own stream; :attr:`ready` says whether it has landed, and it is
    published by a later round, so an update never waits for it.
    """

    def __init__(self, spec: WeightSpec, device: str) -> None:
        self._spec = spec
        self._cuda = torch.device(device).type == "cuda"
        self._host = torch.zeros(spec.nbytes, dtype=torch.uint8, pin_memory=self._cuda)
        self._views = {
            tensor.name: self._host[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype)).view(tensor.shape)
            for tensor in spec.tensors
            for start in (spec.offsets[tensor.name],)
        }
        self._stream = _new_stream() if self._cuda else None
        self._landed: torch.cuda.Event | None = None

    @property
    def buffer(self) -> memoryview:
        """The flat host copy (``spec.nbytes`` bytes)."""
        return memoryview(self._host.numpy())  # type: ignore[arg-type]

    @property
    def ready(self) -> bool:
        """Whether no copy is in flight."""
        return self._landed is None or bool(self._landed.query())  # type: ignore[no-untyped-call]

    def stage(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights`` to the host; returns before the copy has landed where that is asynchronous."""
        self._check(weights)
        if self._stream is None:
            for name, view in self._views.items():
                view.copy_(weights[name].detach())
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, view in self._views.items():
                source = weights[name].detach()
                view.copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._landed.record(self._stream)
        # The next update must not overwrite weights that are still being read; this orders the streams on the device
        # without blocking the host.
        torch.cuda.current_stream().wait_event(self._landed)

    def wait(self) -> None:
        """Block until the staged copy has landed (only the first and the last publish of a run need it)."""
        if self._landed is not None:
            self._landed.synchronize()

    def _check(self, weights: Mapping[str, torch.Tensor]) -> None:
        missing, extra = self._views.keys() - weights.keys(), weights.keys() - self._views.keys()
        if missing or extra:
            raise SchemaMismatchError(
                f"expected the weights {sorted(self._views)}, got {sorted(weights)} (missing {sorted(missing)}, "
                f"unknown {sorted(extra)}): weights() must return what the WeightSpec declares"
            )
        for name, view in self._views.items():
            got = weights[name]
            if got.shape != view.shape or got.dtype != view.dtype:
                raise SchemaMismatchError(
                    f"weight {name!r}: expected {view.dtype} {tuple(view.shape)}, got {got.dtype} {tuple(got.shape)}: "
                    "names, shapes and dtypes of weights() must not change during a run"
                )


class DeviceIntake:
    """Brings the spans of a round to the device as tensors.

    On the CPU the tensors are views of the ring's own pages: no copy at all.  On CUDA the spans of all rings of a round are
    one batch on its way: one event for all, and nobody waits for each.  The ring's pages are registered with the driver where
    it allows, and a slot is released only when the copy out of them has landed; otherwise the batch passes through pinned
    staging memory, and the host does not wait at all.
    """

    def __init__(self, exchange: Exchange, device: str) -> None:
        self._device = torch.device(device)
        self._fields = tuple(_field_tensors(consumer) for consumer in exchange.consumers)
        self._registered: list[int] = []
        cuda = self._device.type == "cuda"
        self.pinned_rings = self._register(exchange.consumers) if cuda else 0
        self._copier = _RoundCopier(self._device, pinned_sources=self.pinned_rings > 0) if cuda else None
        self._loaded: dict[int, tuple[Span, dict[str, torch.Tensor]]] = {}

    def load(self, spans: Sequence[tuple[int, Span]]) -> None:
        """Begin to bring a round's ``(rank, span)``, at most one of each rank, to the device; given to ``Exchange.drain``."""
        if self._copier is not None:
            moved = self._copier.copy([self._views(rank, span) for rank, span in spans])
            self._loaded = {rank: (span, tensors) for (rank, span), tensors in zip(spans, moved, strict=True)}

    def tensors(self, rank: int, span: Span) -> dict[str, torch.Tensor]:
        """Return the fields of ``span`` on the device, shape ``(num_slots, *field_shape)``; valid until its release."""
        if self._copier is None:
            return self._views(rank, span)
        if rank not in self._loaded or self._loaded[rank][0] is not span:
            self.load([(rank, span)])
        return self._loaded.pop(rank)[1]

    def _views(self, rank: int, span: Span) -> dict[str, torch.Tensor]:
        if isinstance(span, CompactSpan):
            return {name: torch.from_numpy(array) for name, array in span.writable.items()}
        return {name: array[span.start : span.start + span.num_slots] for name, array in self._fields[rank].items()}

    def _register(self, consumers: Iterable[Consumer]) -> int:
        """Page-lock the rings for the device; returns how many (0 where the driver refuses: staging is used instead)."""
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for consumer in consumers:
            memory = consumer.memory
            if int(cudart.cudaHostRegister(memory.address, len(memory.data), 0)) != 0:
                self._unregister()
                _forget_cuda_error()
                return 0
            self._registered.append(memory.address)
        return len(self._registered)

    def close(self) -> None:
        """Undo the registration and drop the views of the rings; idempotent."""
        self._fields = ()
        self._loaded = {}
        self._unregister()

    def _unregister(self) -> None:
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop())  # type: ignore[no-untyped-call]


class _RoundCopier:
    """Copies the fields of several spans to ``device``: one allocation a field, and one event for all of them.

    A field goes straight from its sources where these are pinned and have no gaps; otherwise all of them are gathered in
    staging memory, which is one asynchronous copy.
    """

    def __init__(self, device: torch.device, *, pinned_sources: bool) -> None:
        self._device = device
        self._pinned_sources = pinned_sources
        self._stream = _new_stream() if device.type == "cuda" else None
        self._landed: torch.cuda.Event | None = None
        self._staging: dict[str, torch.Tensor] = {}

    def copy(self, spans: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return the same fields on the device, to be used on the calling thread's current stream.

        The sources may be overwritten when this returns.
        """
        if self._landed is not None:
            self._landed.synchronize()  # the last round has left the staging memory
        moved: list[dict[str, torch.Tensor]] = [{} for _ in spans]
        direct = False
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name in spans[0]:
                sources = [span[name] for span in spans]
                here = torch.empty(sum(map(torch.numel, sources)), dtype=sources[0].dtype, device=self._device)
                parts = _parts_like(here, sources)
                if self._pinned_sources and all(source.is_contiguous() for source in sources):
                    direct = True
                    for part, source in zip(parts, sources, strict=True):
                        part.copy_(source, non_blocking=True)
                else:
                    here.copy_(self._gather(name, sources), non_blocking=True)
                for tensors, part in zip(moved, parts, strict=True):
                    tensors[name] = part
        if self._stream is not None:
            self._hand_over(moved, self._stream, wait=direct)
        return moved

    def _gather(self, name: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        size = sum(map(torch.numel, sources))
        staging = self._staging.get(name)
        if staging is None or len(staging) < size:
            staging = torch.empty(size, dtype=sources[0].dtype, pin_memory=self._stream is not None)
            self._staging[name] = staging
        for part, source in zip(_parts_like(staging[:size], sources), sources, strict=True):
            part.copy_(source)
        return staging[:size]

    def _hand_over(self, moved: Iterable[Mapping[str, torch.Tensor]], stream: torch.cuda.Stream, *, wait: bool) -> None:
        current = torch.cuda.current_stream()
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record(stream)
        current.wait_event(self._landed)
        for tensors in moved:
            for tensor in tensors.values():
                tensor.record_stream(current)
        if wait:
            # The slots go back to their producers, so the copies must have left the rings.
            self._landed.synchronize()


def _parts_like(flat: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut ``flat`` into parts of the shapes of ``sources``."""
    parts = torch.split(flat, [source.numel() for source in sources])
    return [part.view(source.shape) for part, source in zip(parts, sources, strict=True)]


def _forget_cuda_error() -> None:
    """Take the pending error of a refused registration, which the next launch would raise for something else."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.info("ring pages could not be registered with CUDA, staging memory is used: %s", error)


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _field_tensors(consumer: Consumer) -> dict[str, torch.Tensor]:
    """Tensors over all slots of a ring, one a field, sharing its pages; they are for reading, though torch cannot say so."""
    memory = consumer.memory
    return {
        name: torch.from_numpy(array)
        for name, array in build_arrays(memory.schema, memory.capacity, memory.data).items()
    }
