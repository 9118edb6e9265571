"""The ways that other people move slots from one process to another, for comparison with the library's ring."""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.transport_arms import BYTES_PER_ENV, CAPACITY, PER_ENV, Arm, Array
from numa_collectors.rings.layout import build_arrays, ring_bytes
from numa_collectors.shm import Region


class DictArm(Arm):
    """An arm whose two sides keep their arrays by field."""

    def open_producer(self) -> None:
        self.source = self.values()

    def open_consumer(self) -> None:
        self.target = self.copies()


class QueueArm(DictArm):
    """A queue that pickles a dictionary of arrays."""

    def __init__(self, num_envs: int, name: str, queue: Any) -> None:
        super().__init__(num_envs)
        self.name = name
        self.queue = queue

    def produce(self, num_slots: int) -> None:
        for _ in range(num_slots):
            self.queue.put(self.source)

    def consume(self, num_slots: int) -> None:
        for index in range(num_slots):
            for name, value in self.queue.get().items():
                self.target[name][index % CAPACITY] = value

    def close(self) -> None:
        self.queue.close()


class PipeArm(DictArm):
    """A pipe, pickled or as raw bytes of each field."""

    def __init__(self, num_envs: int, *, raw: bool) -> None:
        super().__init__(num_envs)
        self.name = "pipe, raw bytes" if raw else "pipe, pickled"
        self.raw = raw
        self.receiver, self.sender = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def produce(self, num_slots: int) -> None:
        for _ in range(num_slots):
            if self.raw:
                for value in self.source.values():
                    self.sender.send_bytes(value.data.cast("B"))
            else:
                self.sender.send(self.source)

    def consume(self, num_slots: int) -> None:
        for index in range(num_slots):
            if self.raw:
                for array in self.target.values():
                    self.receiver.recv_bytes_into(array[index % CAPACITY].data.cast("B"))
            else:
                for name, value in self.receiver.recv().items():
                    self.target[name][index % CAPACITY] = value

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


class TorchQueueArm(QueueArm):
    """torch.multiprocessing.Queue: each tensor's storage travels as a shared-memory descriptor."""

    def produce(self, num_slots: int) -> None:
        torch = importlib.import_module("torch")
        for _ in range(num_slots):
            self.queue.put({name: torch.from_numpy(value.copy()) for name, value in self.source.items()})


class MotrixArm(Arm):
    """motrix's ring of shared torch tensors, waiting as it waits: half a millisecond's sleep."""

    name = "motrix ring"
    polling_s = 0.0005

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        module = importlib.import_module("motrix_rl_builtin.fastsac.async_impl.transport.ring")
        self.ring = module.SharedTransitionRing(CAPACITY, num_envs, 56, 56, 12)

    def open_producer(self) -> None:
        torch = importlib.import_module("torch")
        self.source = [torch.from_numpy(value) for value in self.values().values()]

    def open_consumer(self) -> None:
        torch = importlib.import_module("torch")
        self.target = [torch.from_numpy(array) for array in self.copies().values()]

    def produce(self, num_slots: int) -> None:
        for _ in range(num_slots):
            while not self.ring.push(*self.source):
                time.sleep(self.polling_s)

    def consume(self, num_slots: int) -> None:
        while num_slots:
            count, fields = self.ring.read_span()
            if not count:
                time.sleep(self.polling_s)
                continue
            for array, field in zip(self.target, fields, strict=True):
                array[:count].copy_(field)
            self.ring.commit_reads(count)
            num_slots -= count


def _bytes_of(source: dict[str, Array]) -> bytes:
    return b"".join(value.data for value in source.values())


def _untouched(received: Any) -> Any:
    return received


class RawFifoArm(QueueArm):
    """faster_fifo without pickling: the fields' bytes joined, and copied apart at the other side."""

    def consume(self, num_slots: int) -> None:
        for index in range(num_slots):
            received = np.frombuffer(self.queue.get(), np.uint8)
            start = 0
            for array in self.target.values():
                one = array[index % CAPACITY].reshape(-1).view(np.uint8)
                one[...] = received[start : start + one.nbytes]
                start += one.nbytes


def _faster_fifo(num_envs: int, *, raw: bool) -> Arm:
    module = importlib.import_module("faster_fifo")
    max_size_bytes = max(4 << 20, 2 * CAPACITY * num_envs * BYTES_PER_ENV)
    if raw:
        queue = module.Queue(max_size_bytes=max_size_bytes, dumps=_bytes_of, loads=_untouched)
        return RawFifoArm(num_envs, "faster_fifo, raw bytes", queue)
    return QueueArm(num_envs, "faster_fifo, pickled", module.Queue(max_size_bytes=max_size_bytes))


class IndexArm(DictArm):
    """Slots in shared memory, and their indices through two queues: the usual design made by hand."""

    name = "indices by SimpleQueue"

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        context = multiprocessing.get_context("spawn")
        self.schema = PER_ENV.with_leading(num_envs)
        self.region = Region.create("indices", ring_bytes(self.schema, CAPACITY))
        self.free, self.full = context.SimpleQueue(), context.SimpleQueue()
        for index in range(CAPACITY):
            self.free.put(index)

    def _map(self) -> None:
        arrays = build_arrays(self.schema, CAPACITY, self.region.buf)
        self.slots = [{name: array[index] for name, array in arrays.items()} for index in range(CAPACITY)]

    def open_producer(self) -> None:
        super().open_producer()
        self._map()

    def open_consumer(self) -> None:
        super().open_consumer()
        self._map()

    def produce(self, num_slots: int) -> None:
        for _ in range(num_slots):
            index = self.free.get()
            for name, value in self.source.items():
                self.slots[index][name][...] = value
            self.full.put(index)

    def consume(self, num_slots: int) -> None:
        for number in range(num_slots):
            index = self.full.get()
            for name, view in self.slots[index].items():
                self.target[name][number % CAPACITY] = view
            self.free.put(index)

    def close(self) -> None:
        self.slots = []
        self.free.close()
        self.full.close()
        self.region.close_when_unused()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("num_envs", "schema", "region", "free", "full")}


class TensorDictArm(Arm):
    """TorchRL's way: one tensordict in shared memory, a message that it is written, another that it was read.

    Its own collectors look for the message in a polling loop besides, which costs more than is measured here.
    """

    name = "tensordict, shared"

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        torch = importlib.import_module("torch")
        tensordict = importlib.import_module("tensordict")
        values = {name: torch.from_numpy(value) for name, value in self.values().items()}
        self.shared = tensordict.TensorDict(values, batch_size=[num_envs]).share_memory_()
        context = multiprocessing.get_context("spawn")
        self.written, self.read = context.SimpleQueue(), context.SimpleQueue()

    def open_producer(self) -> None:
        torch = importlib.import_module("torch")
        self.source = importlib.import_module("tensordict").TensorDict(
            {name: torch.from_numpy(value) for name, value in self.values().items()}, batch_size=[self.num_envs]
        )

    def open_consumer(self) -> None:
        self.target = self.shared.clone()

    def produce(self, num_slots: int) -> None:
        for number in range(num_slots):
            self.shared.update_(self.source)
            self.written.put(number)
            self.read.get()

    def consume(self, num_slots: int) -> None:
        for _ in range(num_slots):
            number = self.written.get()
            self.target.update_(self.shared)
            self.read.put(number)

    def close(self) -> None:
        self.written.close()
        self.read.close()


def _torch_queue(num_envs: int) -> Arm:
    module = importlib.import_module("torch.multiprocessing")
    return TorchQueueArm(num_envs, "torch.multiprocessing.Queue", module.get_context("spawn").Queue(CAPACITY))


def peers() -> list[tuple[str, Callable[[int], Arm]]]:
    """Names and makers of the arms that are compared with; a maker raises ImportError or Skipped."""
    context = multiprocessing.get_context("spawn")
    return [
        ("multiprocessing.Queue", lambda envs: QueueArm(envs, "multiprocessing.Queue", context.Queue(CAPACITY))),
        ("SimpleQueue", lambda envs: QueueArm(envs, "SimpleQueue", context.SimpleQueue())),
        ("pipe, pickled", lambda envs: PipeArm(envs, raw=False)),
        ("pipe, raw bytes", lambda envs: PipeArm(envs, raw=True)),
        ("indices by SimpleQueue", IndexArm),
        ("faster_fifo, pickled", lambda envs: _faster_fifo(envs, raw=False)),
        ("faster_fifo, raw bytes", lambda envs: _faster_fifo(envs, raw=True)),
        ("torch.multiprocessing.Queue", _torch_queue),
        ("tensordict, shared", TensorDictArm),
        ("motrix ring", MotrixArm),
    ]
