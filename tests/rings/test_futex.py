"""Futexes and fences on real shared words."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

import pytest

from numa_collectors import _futex

pytestmark = pytest.mark.skipif(not _futex.FUTEX_AVAILABLE, reason="needs Linux futexes")


class Words:
    def __init__(self) -> None:
        self.mapping = mmap.mmap(-1, 4096)
        self.cells = (ctypes.c_uint32 * 1024).from_buffer(self.mapping)

    def address(self, index: int) -> int:
        return ctypes.addressof(self.cells) + 4 * index


@pytest.fixture
def words() -> Iterator[Words]:
    made = Words()
    yield made
    del made.cells
    made.mapping.close()


def test_a_word_that_differs_returns_at_once(words: Words) -> None:
    assert _futex.futex_wait(words.address(0), 1, 30.0)
    assert _futex.futex_waitv([words.address(0), words.address(1)], [0, 7], 30.0)


def test_a_timeout_says_false(words: Words) -> None:
    assert not _futex.futex_wait(words.address(0), 0, 0.01)
    assert not _futex.futex_wait(words.address(0), 0, 0)
    assert not _futex.futex_wait(words.address(0), 0, -1)
    if _futex.futex_waitv_available():
        assert not _futex.futex_waitv([words.address(0)], [0], 0.01)
        assert not _futex.futex_waitv([words.address(0)], [0], 0)


def wake_until(thread: threading.Thread, address: int) -> int:
    woken = 0
    deadline = time.monotonic() + 20
    while thread.is_alive():
        assert time.monotonic() < deadline
        woken += _futex.futex_wake(address)
    return woken


def test_a_sleeper_is_woken_and_counted(words: Words) -> None:
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(_futex.futex_wait(words.address(3), 0, 20.0)))
    thread.start()
    assert wake_until(thread, words.address(3)) == 1
    assert outcome == [True]
    assert _futex.futex_wake(words.address(3)) == 0


def test_one_of_many_words_wakes(words: Words) -> None:
    if not _futex.futex_waitv_available():
        pytest.skip("the kernel has no futex_waitv")
    outcome: list[bool] = []
    addresses = [words.address(16 * index) for index in range(_futex.FUTEX_WAITV_MAX // 2)]
    thread = threading.Thread(target=lambda: outcome.append(_futex.futex_waitv(addresses, [0] * len(addresses), 20.0)))
    thread.start()
    assert wake_until(thread, addresses[-1]) == 1
    assert outcome == [True]


def test_a_bad_address_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(OSError, match="EFAULT"):
        _futex.futex_wait(4096, 0, 1.0)
    with pytest.raises(OSError, match="EINVAL"):
        _futex.futex_wait(4097, 0, 1.0)
    with pytest.raises(OSError, match="EINVAL"):
        _futex.futex_wake(4097)


def test_membarrier_is_a_fence_that_can_be_had() -> None:
    if not _futex._membarrier_available():
        pytest.skip("the kernel has no membarrier, or a sandbox forbids it")
    _futex._membarrier()


def test_a_machine_without_any_fence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_futex, "FENCE_AVAILABLE", False)
    with pytest.raises(NotImplementedError, match="membarrier"):
        _futex.make_fence()


def test_polling_stands_in_where_there_are_no_futexes(monkeypatch: pytest.MonkeyPatch, words: Words) -> None:
    monkeypatch.setattr(_futex, "FUTEX_AVAILABLE", False)
    assert not _futex.futex_wait(words.address(0), 0, 0.01)
    assert _futex.futex_wait(words.address(0), 1, 1.0)
    assert _futex.futex_wake(words.address(0)) == 0
