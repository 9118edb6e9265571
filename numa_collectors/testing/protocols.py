"""The ring's and the snapshot's protocols as small programs for the explorer, with mutants that must be caught.

Each access here has its counterpart in :mod:`numa_collectors.rings` and :mod:`numa_collectors.snapshots`, in the same
order. A slot is two words, so that a copy can tear; a value carries its index and the generation that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator

from numa_collectors.testing.model import Exploration, MemoryModel, Program, Registers, explore

__all__ = ["RING_MUTANTS", "SNAPSHOT_MUTANTS", "check_ring", "check_snapshot", "explore_all"]

# Words of the ring.
_COMMITTED, _RELEASED, _CONSUMER_ASLEEP, _PRODUCER_ASLEEP, _CLOSED, _DATA = range(6)

RING_MUTANTS: dict[str, MemoryModel] = {
    "cursor before data": "tso",
    "release before read": "tso",
    "one slot too many": "tso",
    "no fence between commit and asking": "tso",
    "no fence between release and asking": "tso",
    "consumer sleeps without looking again": "tso",
    "producer sleeps without looking again": "tso",
    "no fence between asleep and looking again": "tso",
    "no wake-up": "tso",
    "wake-up without clearing the word": "tso",
    "successor wakes nobody": "tso",
    "closed before the last commit": "tso",
    "end without looking again": "tso",
    "no fence between data and cursor": "weak",
    "no fence between cursor and read": "weak",
    "no fence between read and release": "weak",
}
"""Errors that the explorer must find in the ring, each with the memory model under which it is one."""


def _fence(program: Program, mutant: str | None, left_out_in: str, *, weak_only: bool = False) -> None:
    if mutant != left_out_in:
        program.fence(weak_only=weak_only)


def _producer(num_slots: int, capacity: int, mutant: str | None, kill: bool) -> Program:
    committed, released, asleep, generation = range(4)
    reads = frozenset({_COMMITTED, _RELEASED, _CONSUMER_ASLEEP})
    program = Program((0,) * 4, reads, "successor" if kill else None)
    limit = capacity + (mutant == "one slot too many")

    def has_space(r: Registers) -> bool:
        return r[committed] - r[released] < limit

    program.jump("next")
    program.label("successor")
    program.set(generation, 1)
    program.load(committed, _COMMITTED)
    program.load(released, _RELEASED)
    program.store(_PRODUCER_ASLEEP, 0)
    if mutant != "successor wakes nobody":
        program.store(_CONSUMER_ASLEEP, 0)
        program.wake(_CONSUMER_ASLEEP)
    program.label("next")
    program.set(asleep, 0)
    program.jump("close", lambda r: r[committed] == num_slots)
    program.jump("write", has_space)
    program.label("look")
    program.load(released, _RELEASED)
    program.jump("write", has_space)
    _say_asleep(program, _PRODUCER_ASLEEP, mutant, "producer")
    program.load(released, _RELEASED)
    program.jump("awake", has_space)
    _block(program, _PRODUCER_ASLEEP, mutant, "producer")
    program.label("awake")
    program.store(_PRODUCER_ASLEEP, 0)
    program.jump("look")
    program.label("write")
    _write_and_commit(program, num_slots, capacity, mutant)
    _fence(program, mutant, "no fence between commit and asking")
    _ask_and_wake(program, asleep, _CONSUMER_ASLEEP, mutant, "next")
    program.label("close")
    program.store(_CLOSED, 1)
    program.fence()
    program.store(_CONSUMER_ASLEEP, 0)
    program.wake(_CONSUMER_ASLEEP)
    return program


def _write_and_commit(program: Program, num_slots: int, capacity: int, mutant: str | None) -> None:
    committed, generation = 0, 3

    def slot(r: Registers) -> int:
        return _DATA + 2 * (r[committed] % capacity)

    def value(r: Registers) -> int:
        return 2 * (r[committed] + 1) + r[generation]

    if mutant == "cursor before data":
        program.store(_COMMITTED, lambda r: r[committed] + 1)
    program.store(slot, value)
    program.store(lambda r: slot(r) + 1, value)
    _fence(program, mutant, "no fence between data and cursor", weak_only=True)
    if mutant == "closed before the last commit":
        program.jump("open", lambda r: r[committed] != num_slots - 1)
        program.store(_CLOSED, 1)
        program.label("open")
    program.set(committed, lambda r: r[committed] + 1)
    program.store(_COMMITTED, lambda r: r[committed])


def _say_asleep(program: Program, word: int, mutant: str | None, side: str) -> None:
    """Say "asleep" and fence; what follows looks again."""
    if mutant != f"{side} sleeps without looking again":
        program.store(word, 1)
        _fence(program, mutant, "no fence between asleep and looking again")


def _block(program: Program, word: int, mutant: str | None, side: str) -> None:
    if mutant == f"{side} sleeps without looking again":
        program.store(word, 1)
    program.sleep(word, 1)


def _ask_and_wake(program: Program, register: int, word: int, mutant: str | None, following: str) -> None:
    program.load(register, word)
    program.jump(following, lambda r: r[register] == 0)
    if mutant != "wake-up without clearing the word":
        program.store(word, 0)
    if mutant != "no wake-up":
        program.wake(word)
    program.jump(following)


def _consumer(num_slots: int, capacity: int, mutant: str | None) -> Program:
    committed, released, asleep, closed, first, second, seen = range(7)
    data = range(_DATA, _DATA + 2 * capacity)
    program = Program((0,) * 7, frozenset({_COMMITTED, _CLOSED, _PRODUCER_ASLEEP, *data}))

    def empty(r: Registers) -> bool:
        return r[committed] == r[released]

    def slot(r: Registers) -> int:
        return _DATA + 2 * (r[released] % capacity)

    def read() -> None:
        program.read(first, slot)
        program.read(second, lambda r: slot(r) + 1)

    def whole(r: Registers) -> bool:
        return r[first] == r[second] and r[first] // 2 == r[released]

    program.label("next")
    for register in (asleep, closed, first, second, seen):
        program.set(register, 0)
    program.jump("read", lambda r: not empty(r))
    program.load(committed, _COMMITTED)
    program.jump("sleep", empty)
    _fence(program, mutant, "no fence between cursor and read", weak_only=True)
    program.label("read")
    if mutant != "release before read":
        read()
    _fence(program, mutant, "no fence between read and release", weak_only=True)
    program.store(_RELEASED, lambda r: r[released] + 1)
    if mutant == "release before read":
        read()
    program.set(released, lambda r: r[released] + 1)
    _fence(program, mutant, "no fence between release and asking")
    program.check(whole, "the slot is torn, lost or doubled")
    _ask_and_wake(program, asleep, _PRODUCER_ASLEEP, mutant, "next")
    program.label("sleep")
    _say_asleep(program, _CONSUMER_ASLEEP, mutant, "consumer")
    program.load(seen, _COMMITTED)
    program.jump("awake", lambda r: r[seen] != r[released])
    program.load(closed, _CLOSED)
    program.jump("awake", lambda r: r[closed] == 1)
    _block(program, _CONSUMER_ASLEEP, mutant, "consumer")
    program.label("awake")
    program.store(_CONSUMER_ASLEEP, 0)
    program.load(closed, _CLOSED)
    program.jump("next", lambda r: r[closed] == 0)
    if mutant != "end without looking again":
        program.fence()
        program.load(seen, _COMMITTED)
    program.jump("next", lambda r: r[seen] != r[released])
    program.check(lambda r: r[released] == num_slots, "the consumer ended before the last slot")
    return program


def check_ring(
    model: MemoryModel, *, num_slots: int = 3, capacity: int = 2, kill: bool = False, mutant: str | None = None
) -> Exploration:
    """Explore ``num_slots`` through a ring, with the producer killed at any step and succeeded if ``kill``."""
    programs = [_producer(num_slots, capacity, mutant, kill), _consumer(num_slots, capacity, mutant)]
    return explore(programs, _DATA + 2 * capacity, model)


# Words of the snapshot: LATEST, then a counter and two data words per slot.
_LATEST = 0
_SLOT_BITS = 2
_SLOT_MASK = (1 << _SLOT_BITS) - 1

SNAPSHOT_MUTANTS: dict[str, MemoryModel] = {
    "counter stays even while writing": "tso",
    "announced before the data": "tso",
    "counter is not read again": "tso",
    "no fence between odd and data": "weak",
    "no fence between data and even": "weak",
    "no fence between counter and copy": "weak",
    "no fence between copy and counter": "weak",
}
"""Errors that the explorer must find in the snapshot, each with the memory model under which it is one."""


def _counter(slot: int) -> int:
    return 1 + 3 * slot


def _publisher(num_versions: int, num_slots: int, mutant: str | None, kill: bool) -> Program:
    latest, generation = range(2)
    program = Program((0, 0), frozenset({_LATEST}), "successor" if kill else None)

    def version(r: Registers) -> int:
        return (r[latest] >> _SLOT_BITS) + 1

    def slot(r: Registers) -> int:
        return ((r[latest] & _SLOT_MASK) + 1) % num_slots

    def counter(r: Registers) -> int:
        return _counter(slot(r))

    def value(r: Registers) -> int:
        return 2 * version(r) + r[generation]

    def announce() -> None:
        program.store(counter, lambda r: 2 * version(r) + 2)
        program.store(_LATEST, lambda r: version(r) << _SLOT_BITS | slot(r))

    program.jump("next")
    program.label("successor")
    program.set(generation, 1)
    program.load(latest, _LATEST)
    program.label("next")
    program.jump("end", lambda r: r[latest] >> _SLOT_BITS == num_versions)
    early = mutant == "announced before the data"
    if mutant != "counter stays even while writing":
        program.store(counter, lambda r: 2 * version(r) + 1)
    _fence(program, mutant, "no fence between odd and data", weak_only=True)
    if early:
        announce()
    program.store(lambda r: counter(r) + 1, value)
    program.store(lambda r: counter(r) + 2, value)
    _fence(program, mutant, "no fence between data and even", weak_only=True)
    if not early:
        announce()
    program.set(latest, lambda r: version(r) << _SLOT_BITS | slot(r))
    program.jump("next")
    program.label("end")
    return program


def _reader(num_versions: int, num_polls: int, mutant: str | None) -> Program:
    latest, before, after, first, second, version, polls = range(7)
    program = Program((0,) * 7, frozenset(range(7)))

    def counter(r: Registers) -> int:
        return _counter(r[latest] & _SLOT_MASK)

    def expected(r: Registers) -> int:
        return 2 * (r[latest] >> _SLOT_BITS) + 2

    program.label("poll")
    for register in (before, after, first, second):
        program.set(register, 0)
    program.jump("end", lambda r: r[polls] == num_polls or r[version] == num_versions)
    program.set(polls, lambda r: r[polls] + 1)
    program.load(latest, _LATEST)
    program.jump("poll", lambda r: r[latest] >> _SLOT_BITS == r[version])
    program.load(before, counter)
    program.jump("poll", lambda r: r[before] != expected(r))
    _fence(program, mutant, "no fence between counter and copy", weak_only=True)
    program.read(first, lambda r: counter(r) + 1)
    program.read(second, lambda r: counter(r) + 2)
    _fence(program, mutant, "no fence between copy and counter", weak_only=True)
    if mutant != "counter is not read again":
        program.load(after, counter)
        program.jump("poll", lambda r: r[after] != expected(r))
    program.check(
        lambda r: (
            r[first] == r[second] and r[first] // 2 == r[latest] >> _SLOT_BITS and r[latest] >> _SLOT_BITS > r[version]
        ),
        "the version is torn, of another version, or has fallen",
    )
    program.set(version, lambda r: r[latest] >> _SLOT_BITS)
    program.jump("poll")
    program.label("end")
    return program


def check_snapshot(
    model: MemoryModel,
    *,
    num_versions: int = 4,
    num_polls: int = 3,
    num_slots: int = 2,
    kill: bool = False,
    mutant: str | None = None,
) -> Exploration:
    """Explore ``num_versions`` published against ``num_polls`` loads, the publisher killed and succeeded if ``kill``.

    Two slots are the fewest that the protocol needs, and where a reader is overtaken soonest; a snapshot has three.
    """
    programs = [_publisher(num_versions, num_slots, mutant, kill), _reader(num_versions, num_polls, mutant)]
    return explore(programs, _counter(num_slots), model)


def explore_all(*, deep: bool = False) -> Iterator[tuple[str, Exploration]]:
    """Name and outcome of every exploration that must find no error; ``deep`` adds half a minute's worth."""
    for kill in (False, True):
        who = ", producer killed" if kill else ""
        yield f"ring, tso, 3 slots through 2{who}", check_ring("tso", kill=kill)
        who = ", publisher killed" if kill else ""
        for num_slots in (2, 3):
            yield (
                f"snapshot, tso, {num_slots} slots, 4 versions, 3 loads{who}",
                check_snapshot("tso", num_slots=num_slots, kill=kill),
            )
    yield "ring, weak, 3 slots through 2", check_ring("weak")
    yield "ring, weak, 1 slot, producer killed", check_ring("weak", num_slots=1, capacity=1, kill=True)
    if deep:
        yield "ring, weak, 2 slots through 1, producer killed", check_ring("weak", num_slots=2, capacity=1, kill=True)
        yield "ring, weak, 2 slots through 2, producer killed", check_ring("weak", num_slots=2, capacity=2, kill=True)
    yield "snapshot, weak, 3 versions, 2 loads", check_snapshot("weak", num_versions=3, num_polls=2)
    yield (
        "snapshot, weak, 2 versions, 2 loads, publisher killed",
        check_snapshot("weak", num_versions=2, num_polls=2, kill=True),
    )


if __name__ == "__main__":
    for name, outcome in explore_all(deep=True):
        print(f"{name}: {outcome.num_states} states, {outcome.error or 'no error'}")
    for mutant, model in RING_MUTANTS.items():
        found = check_ring(model, num_slots=2, capacity=1, kill="successor" in mutant, mutant=mutant)
        print(f"ring mutant, {model}, {mutant}: {found.error.message if found.error else 'NOT FOUND'}")
    for mutant, model in SNAPSHOT_MUTANTS.items():
        found = check_snapshot(model, num_versions=3, num_polls=2, mutant=mutant)
        print(f"snapshot mutant, {model}, {mutant}: {found.error.message if found.error else 'NOT FOUND'}")
