from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa_collectors import errors
from numa_collectors._cpulist import format_cpulist, parse_cpulist, parse_cpumap


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", ()),
        ("\n", ()),
        ("\0", ()),
        ("0", (0,)),
        ("0-3,8", (0, 1, 2, 3, 8)),
        ("8,0-3\n", (0, 1, 2, 3, 8)),
        ("0-3\0\0", (0, 1, 2, 3)),
        ("0-10:2/4", (0, 1, 4, 5, 8, 9)),
        ("1-1", (1,)),
    ],
)
def test_lists_the_kernel_writes_are_read(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == ids


@pytest.mark.parametrize(
    "text", ["a", "1-", "-1", "3-1", "1,,2", "0-9:3/2", "0-9:0/2", "0-9:2", "0-99999999999", "²", "1 2"]
)
def test_rubbish_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_cpulist(text)


@given(st.sets(st.integers(0, 4000)))
def test_format_and_parse_are_inverse(ids: set[int]) -> None:
    assert parse_cpulist(format_cpulist(ids)) == tuple(sorted(ids))


@given(st.sets(st.integers(0, 300)))
def test_maps_and_lists_agree(ids: set[int]) -> None:
    bits = sum(1 << value for value in ids)
    words = [f"{bits >> shift & 0xFFFFFFFF:08x}" for shift in range(320, -1, -32)]
    assert parse_cpumap(",".join(words)) == tuple(sorted(ids))


def test_a_map_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        parse_cpumap("0x,zz")


def test_every_error_survives_pickling() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        error = cls("expected a, got b, do c")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls
        assert str(copy) == str(error)
    binding = errors.BindingError("refused", code="mempolicy-refused", errno=1)
    copy = pickle.loads(pickle.dumps(binding))
    assert (copy.code, copy.errno, str(copy)) == ("mempolicy-refused", 1, "refused")
