"""An exhaustive explorer of small concurrent programs under weak memory.

A :class:`Program` is a list of memory accesses, fences, futex calls and local steps.  :func:`explore` steps the
threads in every order between any two accesses and looks for a failed check, for a deadlock and for a forbidden end.

``"tso"`` (x86-64): each thread has a first-in-first-out store buffer, drained at any moment; a full fence drains it.

``"weak"`` (multi-copy-atomic, as ARMv8): stores to different words leave the buffer in any order; a load returns any
value that its word has held since the thread's last fence (loads done early), but never one older than the thread has
seen there; a ``read`` may also be done late, up to the next fence or use (loads after later stores).  Dependencies
order nothing: more is explored than hardware does.

The futex calls are full fences and compare and sleep in one step, as the kernel's.  Timeouts are left out on purpose:
a lost wake-up shows as a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["Counterexample", "Exploration", "MemoryModel", "Program", "Registers", "explore"]

MemoryModel = Literal["tso", "weak"]
KILLED = ": killed"
Registers = tuple[int, ...]
Expression = Callable[[Registers], int]


def _expression(value: int | Expression) -> Expression:
    return value if callable(value) else lambda registers: value


@dataclass
class Program:
    """One thread: ``registers`` at the start, and the steps that the methods below append.

    ``reads`` are the words that it ever reads.  ``successor`` names the label at which
    a new process begins after this one was killed (at most once, at any step).
    """

    registers: Registers
    reads: frozenset[int]
    successor: str | None = None
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def label(self, name: str) -> None:
        """Name the next step."""
        self.labels[name] = len(self.steps)

    def store(self, word: int | Expression, value: int | Expression) -> None:
        """Write a word."""
        self.steps.append(("store", _expression(word), _expression(value)))

    def load(self, register: int, word: int | Expression) -> None:
        """Read a word whose value decides what happens next."""
        self.steps.append(("load", register, _expression(word)))

    def read(self, register: int, word: int | Expression) -> None:
        """Read a word as part of a copy: it may be done as late as the next fence or :meth:`check`."""
        self.steps.append(("read", register, _expression(word)))

    def fence(self, *, weak_only: bool = False) -> None:
        """A full fence; ``weak_only`` ones are left out under ``"tso"``."""
        self.steps.append(("fence", weak_only))

    def sleep(self, word: int, expected: int) -> None:
        """futex_wait: sleep if the word holds ``expected``."""
        self.steps.append(("sleep", word, expected))

    def wake(self, word: int) -> None:
        """futex_wake."""
        self.steps.append(("wake", word))

    def set(self, register: int, value: int | Expression) -> None:
        """Compute locally."""
        self.steps.append(("set", register, _expression(value)))

    def jump(self, label: str, condition: Callable[[Registers], bool] = lambda registers: True) -> None:
        """Go to ``label`` if the condition holds."""
        self.steps.append(("jump", label, condition))

    def check(self, condition: Callable[[Registers], bool], message: str) -> None:
        """Fail the exploration unless the condition holds."""
        self.steps.append(("check", condition, message))


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """The tuple with one element replaced."""
    return (*values[:index], value, *values[index + 1 :])


class _Thread(NamedTuple):
    pc: int
    registers: Registers
    buffer: tuple[tuple[int, int], ...]
    floors: tuple[int, ...]
    pending: tuple[tuple[int, int], ...]
    asleep_on: int
    killed: bool


class _State(NamedTuple):
    memory: tuple[tuple[int, ...], ...]
    threads: tuple[_Thread, ...]


@dataclass(frozen=True)
class Counterexample:
    """What went wrong, and the steps that lead there."""

    message: str
    trace: tuple[str, ...]


@dataclass(frozen=True)
class Exploration:
    """Outcome: how many states were visited, and the first error found."""

    num_states: int
    error: Counterexample | None


class _Failure(Exception):
    pass


class _Explorer:
    def __init__(self, programs: list[Program], num_words: int, model: MemoryModel, initial: dict[int, int]) -> None:
        self._programs = programs
        self._weak = model == "weak"
        memory = tuple((initial.get(word, 0),) for word in range(num_words))
        floors = (0,) * num_words
        threads = tuple(_Thread(0, program.registers, (), floors, (), -1, False) for program in programs)
        self.start = self._settle(_State(memory, threads))

    def _settle(self, state: _State) -> _State:
        """Run local steps of every thread, and forget values that nobody can read any more."""
        threads = [self._settle_thread(index, thread) for index, thread in enumerate(state.threads)]
        if not self._weak:
            return _State(state.memory, tuple(threads))
        memory = list(state.memory)
        for word, values in enumerate(memory):
            if len(values) > 1:
                oldest = min(
                    thread.floors[word] if word in program.reads else len(values) - 1
                    for program, thread in zip(self._programs, threads, strict=True)
                )
                memory[word] = values[oldest:]
                for index, thread in enumerate(threads):
                    floor = max(0, thread.floors[word] - oldest) if word in self._programs[index].reads else 0
                    threads[index] = thread._replace(floors=_with(thread.floors, word, floor))
        return _State(tuple(memory), tuple(threads))

    def _settle_thread(self, index: int, thread: _Thread) -> _Thread:
        """Run the steps that nobody else can see: stores only enter the thread's buffer, reads only begin.

        Doing them at once loses no behaviour: they commute with every step of others, and a killed process drops its
        buffer, which covers death before any of them.
        """
        steps = self._programs[index].steps
        while thread.asleep_on < 0 and thread.pc < len(steps):
            after = self._local_step(index, thread, steps[thread.pc])
            if after is None:
                break
            thread = after
        return thread

    def _local_step(self, index: int, thread: _Thread, step: tuple[Any, ...]) -> _Thread | None:
        """The thread after a step that only it can see; None for any other step."""
        kind, registers, ahead = step[0], thread.registers, thread.pc + 1
        if kind == "set":
            return thread._replace(pc=ahead, registers=_with(registers, step[1], step[2](registers)))
        if kind == "store":
            return thread._replace(pc=ahead, buffer=(*thread.buffer, (step[1](registers), step[2](registers))))
        if kind == "jump":
            return thread._replace(pc=self._programs[index].labels[step[1]] if step[2](registers) else ahead)
        if kind == "read" and self._weak:
            return thread._replace(pc=ahead, pending=(*thread.pending, (step[1], step[2](registers))))
        if kind == "check" and not thread.pending:
            if not step[1](registers):
                raise _Failure(step[2])
            return thread._replace(pc=ahead)
        if kind == "fence" and step[1] and not self._weak:
            return thread._replace(pc=ahead)
        return None

    def done(self, state: _State) -> bool:
        """Whether every thread has ended and every store is visible."""
        return all(
            thread.pc == len(program.steps) and not thread.buffer and thread.asleep_on < 0
            for program, thread in zip(self._programs, state.threads, strict=True)
        )

    def successors(self, state: _State) -> Iterator[tuple[str, _State]]:
        """Every state that is one step away; raises _Failure when a check fails on the way."""
        for index, thread in enumerate(state.threads):
            yield from self._flushes(state, index, thread)
            yield from self._late_reads(state, index, thread)
            program = self._programs[index]
            if program.successor is not None and not thread.killed and self._alive(program, thread):
                yield f"{index}{KILLED}", self._kill(state, index)
            if thread.asleep_on < 0 and thread.pc < len(program.steps):
                yield from self._step(state, index, thread, program.steps[thread.pc])

    @staticmethod
    def _alive(program: Program, thread: _Thread) -> bool:
        return bool(thread.pc < len(program.steps) or thread.buffer)

    def _replace(self, state: _State, index: int, thread: _Thread, memory: Any = None) -> _State:
        threads = _with(state.threads, index, thread)
        return self._settle(_State(state.memory if memory is None else memory, threads))

    def _write(self, memory: Any, thread: _Thread, word: int, value: int) -> tuple[Any, _Thread]:
        """Make a store visible to all; the writer itself reads nothing older any more."""
        if not self._weak:
            return _with(memory, word, (value,)), thread
        values = (*memory[word], value)
        floors = _with(thread.floors, word, len(values) - 1)
        return _with(memory, word, values), thread._replace(floors=floors)

    def _flushes(self, state: _State, index: int, thread: _Thread) -> Iterator[tuple[str, _State]]:
        seen: set[int] = set()
        for position, (word, value) in enumerate(thread.buffer):
            if position and (not self._weak or word in seen):
                seen.add(word)
                continue
            seen.add(word)
            rest = thread.buffer[:position] + thread.buffer[position + 1 :]
            memory, writer = self._write(state.memory, thread._replace(buffer=rest), word, value)
            yield f"{index}: [{word}] = {value} visible", self._replace(state, index, writer, memory)

    def _values(self, state: _State, thread: _Thread, word: int) -> Iterator[tuple[int, _Thread]]:
        """What a load may return, and the thread that has seen it."""
        for buffered, value in reversed(thread.buffer):
            if buffered == word:
                yield value, thread
                return
        values = state.memory[word]
        for position in range(thread.floors[word] if self._weak else len(values) - 1, len(values)):
            if position == thread.floors[word]:
                yield values[position], thread
            else:
                floors = _with(thread.floors, word, position)
                yield values[position], thread._replace(floors=floors if self._weak else thread.floors)

    def _late_reads(self, state: _State, index: int, thread: _Thread) -> Iterator[tuple[str, _State]]:
        """Do the first begun read, once something waits for it: whatever it could have read earlier it can still
        read.
        """
        steps = self._programs[index].steps
        if not thread.pending or (thread.pc < len(steps) and steps[thread.pc][0] == "load"):
            return
        register, word = thread.pending[0]
        for value, seer in self._values(state, thread._replace(pending=thread.pending[1:]), word):
            seer = seer._replace(registers=_with(seer.registers, register, value))
            yield f"{index}: read [{word}] -> {value}", self._replace(state, index, seer)

    def _kill(self, state: _State, index: int) -> _State:
        """End the process and begin its successor: stores that are not visible yet were never made."""
        program = self._programs[index]
        floors = tuple(len(values) - 1 for values in state.memory)
        pc = program.labels[program.successor or ""]
        return self._replace(state, index, _Thread(pc, program.registers, (), floors, (), -1, True))

    def _step(self, state: _State, index: int, thread: _Thread, step: tuple[Any, ...]) -> Iterator[tuple[str, _State]]:
        if step[0] in ("load", "read"):
            word = step[2](thread.registers)
            for value, seer in self._values(state, thread._replace(pc=thread.pc + 1), word):
                seer = seer._replace(registers=_with(seer.registers, step[1], value))
                yield f"{index}: load [{word}] -> {value}", self._replace(state, index, seer)
        elif step[0] != "check" and not thread.buffer and not thread.pending:
            yield from self._fenced_step(state, index, thread._replace(pc=thread.pc + 1), step)

    def _fenced_step(
        self, state: _State, index: int, ahead: _Thread, step: tuple[Any, ...]
    ) -> Iterator[tuple[str, _State]]:
        """A step that is a full fence: all before it is done and visible, all after it sees what is there."""
        if self._weak:
            ahead = ahead._replace(floors=tuple(len(values) - 1 for values in state.memory))
        if step[0] == "sleep":
            sleeps = state.memory[step[1]][-1] == step[2]
            yield (
                f"{index}: sleep on [{step[1]}]: {sleeps}",
                self._replace(state, index, ahead._replace(asleep_on=step[1] if sleeps else -1)),
            )
            return
        if step[0] == "wake":
            threads = tuple(
                thread._replace(asleep_on=-1) if thread.asleep_on == step[1] else thread for thread in state.threads
            )
            state = _State(state.memory, threads)
        yield f"{index}: {step[0]}", self._replace(state, index, ahead)


def explore(
    programs: list[Program],
    num_words: int,
    model: MemoryModel,
    *,
    initial: dict[int, int] | None = None,
    max_states: int = 5_000_000,
) -> Exploration:
    """Visit every reachable state; the first failed check or deadlock ends it, with the shortest trace to it."""
    explorer = _Explorer(programs, num_words, model, initial or {})
    parents: dict[_State, tuple[_State, str] | None] = {explorer.start: None}
    frontier = [explorer.start]
    while frontier:
        following: list[_State] = []
        for state in frontier:
            stuck = True
            try:
                for step, after in explorer.successors(state):
                    stuck = stuck and step.endswith(KILLED)
                    if after not in parents:
                        parents[after] = (state, step)
                        following.append(after)
            except _Failure as failure:
                return Exploration(len(parents), Counterexample(str(failure), _trace(parents, state)))
            if stuck and not explorer.done(state):
                return Exploration(len(parents), Counterexample("deadlock", _trace(parents, state)))
            if len(parents) > max_states:
                raise MemoryError(f"more than {max_states} states; use smaller programs")
        frontier = following
    return Exploration(len(parents), None)


def _trace(parents: dict[_State, tuple[_State, str] | None], state: _State) -> tuple[str, ...]:
    steps: list[str] = []
    link = parents[state]
    while link is not None:
        state, step = link
        steps.append(step)
        link = parents[state]
    return tuple(reversed(steps))
