"""Binding the calling thread, so that what it starts is born bound."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass

from numa_collectors import _mempolicy, _nodes
from numa_collectors._cpulist import format_cpulist
from numa_collectors.binding._ladder import probe, refusal_code, remedy, warn_once
from numa_collectors.binding._request import BindReport, BindRequest, Rung, policy_words
from numa_collectors.errors import BindingError

__all__ = ["apply"]

_PolicyState = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class _State:
    """Mask and policy of a thread; the policy is None where it can neither be read nor set."""

    cpus: tuple[int, ...]
    policy: _PolicyState | None

    @classmethod
    def read(cls) -> _State:
        try:
            policy = _mempolicy.get_mempolicy()
        except OSError:
            policy = None
        return cls(tuple(sorted(os.sched_getaffinity(0))), policy)

    def restore(self) -> None:
        """Return the calling thread to this state; calls that a filter may refuse are made only where something differs."""
        now = _State.read()
        if now.cpus != self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.policy is not None and now.policy != self.policy:
            _mempolicy.set_mempolicy(*self.policy)


class _Thread(threading.local):
    """What the calling thread had before its first binding: what it was given, and what unbinding returns to."""

    baseline: _State | None = None


_THREAD = _Thread()


class _StepDown(Exception):
    """One side of the binding cannot be had; carries what the report will say."""

    def __init__(self, reason: str, code: str, errno: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.errno = errno


def _check_exists(request: BindRequest) -> None:
    """Raise ``BindingError`` for what no machine state short of hot-plugging would make right."""
    online = _nodes.online_cpus()
    if request.wants_cpus and request.cpus is not None and online is not None:
        missing = sorted(set(request.cpus) - set(online))
        if missing:
            raise BindingError(
                f"expected CPUs that are online ({format_cpulist(online)}), got {format_cpulist(request.cpus)}: "
                f"{format_cpulist(missing)} is not there",
                code="cpu-missing",
            )
    if request.wants_policy:
        try:
            _nodes.check_nodes(request.memory_nodes or ())
        except BindingError as error:
            if error.code != "node-not-allowed":
                raise


def _set_cpus(request: BindRequest, given: _State) -> _StepDown | None:
    """Set the mask, inside what the thread was given; return how it differs from what was asked."""
    if not request.wants_cpus or request.cpus is None:
        return None
    asked, allowed = set(request.cpus), set(given.cpus)
    if not asked & allowed:
        raise _StepDown(
            f"CPUs {format_cpulist(asked)} were asked for, but this process may only use {format_cpulist(allowed)}",
            "cpus-not-allowed",
        )
    try:
        os.sched_setaffinity(0, asked & allowed)
    except OSError as error:
        raise _StepDown(
            f"sched_setaffinity refused CPUs {format_cpulist(asked)} ({error.strerror})",
            "affinity-refused",
            error.errno,
        ) from error
    seen = os.sched_getaffinity(0)
    if seen == asked:
        return None
    got = format_cpulist(seen)
    return _StepDown(f"CPUs {format_cpulist(asked)} were asked for, {got} were given", "affinity-trimmed")


def _set_policy(request: BindRequest) -> None:
    if not request.wants_policy:
        return
    try:
        _nodes.check_nodes(request.memory_nodes or ())
    except BindingError as error:
        raise _StepDown(str(error), error.code) from error
    expected = request.kernel_policy()
    try:
        _mempolicy.set_mempolicy(*expected)
        seen = _mempolicy.get_mempolicy()
    except OSError as error:
        raise _StepDown(f"memory policy refused ({error.strerror})", refusal_code(error.errno), error.errno) from error
    if not same_policy(expected, seen):
        raise _StepDown(
            f"memory policy {policy_words(expected)} was asked for, the kernel made it {policy_words(seen)}",
            "policy-trimmed",
        )


def same_policy(expected: _PolicyState, seen: _PolicyState) -> bool:
    """Return whether ``seen`` is ``expected``; before Linux 5.14 "local" reads back as preferring no node."""
    local = {(_mempolicy.MPOL_LOCAL, ()), (_mempolicy.MPOL_PREFERRED, ())}
    return expected == seen or (expected in local and seen in local)


def first_touch_is_local(request: BindRequest) -> bool:
    """Return whether first touch from the requested CPUs lands on the requested nodes without any policy."""
    if request.cpus is None or not _nodes.described():
        return False
    touched = set(_nodes.nodes_of_cpus(request.cpus))
    return bool(touched) and touched <= set(request.memory_nodes or touched)


def _bind(request: BindRequest, given: _State) -> tuple[Rung, list[_StepDown]]:
    """Bind as far as it goes; return the rung that holds and the steps down."""
    steps: list[_StepDown] = []
    cpus_hold = request.wants_cpus
    try:
        trimmed = _set_cpus(request, given)
        steps += [trimmed] if trimmed is not None else []
    except _StepDown as step:
        cpus_hold = False
        steps.append(step)
    policy_holds = request.wants_policy and (cpus_hold or not request.wants_cpus)
    if policy_holds:
        try:
            _set_policy(request)
        except _StepDown as step:
            policy_holds = False
            steps.append(step)
            # A policy that the kernel rewrote is nobody's wish.
            if given.policy is not None and step.code == "policy-trimmed":
                _mempolicy.set_mempolicy(*given.policy)
    if policy_holds:
        return "policy+cpu", steps
    if not cpus_hold:
        return "none", steps
    return ("cpu+first-touch" if request.wants_policy and first_touch_is_local(request) else "cpu"), steps


def _report(request: BindRequest, rung: Rung, steps: list[_StepDown]) -> BindReport:
    state = _State.read()
    first = steps[0] if steps else None
    silent = None if request.target != "none" else "nothing was asked for"
    return BindReport(
        requested=request,
        applied=rung,
        verified=rung == request.target and not steps and rung != "none",
        reason="; ".join(step.reason for step in steps) or silent,
        errno=first.errno if first else None,
        code=first.code if first else None,
        cpus=state.cpus,
        policy=None if state.policy is None else _mempolicy.policy_name(state.policy[0]),
        policy_nodes=() if state.policy is None else state.policy[1],
        num_threads_checked=1,
        nodes_allowed=_nodes.allowed_nodes(),
    )


def apply(request: BindRequest) -> BindReport:
    """Bind the calling thread, and it alone; what it starts from now on is born with its mask and memory policy.

    Meant for a thread that does nothing but start processes.  Binding again replaces the last binding; an empty request
    (or ``mode="off"``) returns the thread to what it had before the first one.  The mask never gets wider than that.

    Returns what the kernel shows afterwards for this thread (no pages: those are the child's, see :func:`inspect`).  In
    the mode ``auto`` a refusal steps down the ladder with one warning in a tree of processes.

    Raises ``BindingError`` with a code: ``cpu-missing``, ``node-missing`` and ``node-without-memory`` in every mode; in
    the mode ``require`` also ``cpus-not-allowed``, ``affinity-trimmed``, ``affinity-refused``, ``node-not-allowed``,
    ``mempolicy-refused``, ``mempolicy-missing``, ``policy-trimmed`` and ``platform-unsupported``.  After an exception
    the thread is what it was before the call.
    """
    if not sys.platform.startswith("linux"):
        return _without_linux(request)
    before = _State.read()
    if _THREAD.baseline is None:
        _THREAD.baseline = before
    given = _THREAD.baseline
    _check_exists(request)
    try:
        given.restore()
        rung, steps = _bind(request, given)
        if steps and request.mode == "require":
            raise _error(steps[0])
    except BaseException:
        before.restore()
        raise
    if steps:
        warn_once(steps[0].code, "; ".join(step.reason for step in steps), rung)
    return _report(request, rung, steps)


def _error(step: _StepDown) -> BindingError:
    advice = remedy(step.code)
    text = f"the binding was required, but {step.reason}" + (f"; {advice}" if advice else "")
    return BindingError(text, code=step.code, errno=step.errno)


def _without_linux(request: BindRequest) -> BindReport:
    found = probe()
    reason, code = found.reason or "", found.code or ""
    if request.target == "none":
        return BindReport(request, reason="nothing was asked for")
    if request.mode == "require":
        raise _error(_StepDown(reason, code))
    warn_once(code, reason, "none")
    return BindReport(request, reason=reason, code=code)
