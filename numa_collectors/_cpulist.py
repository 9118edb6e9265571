"""The kernel's two text forms of a set of small integers: lists (``0-3,8``) and maps (``00000000,0000010f``).

Source: Documentation/admin-guide/cputopology.rst and ``bitmap_parselist``/``bitmap_parse`` in the kernel's
lib/bitmap-str.c.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["format_cpulist", "parse_cpulist", "parse_cpumap"]

# The kernel's own ceiling is NR_CPUS (8,192 in common configurations); the bound keeps "0-999999999999" out of memory.
_MAX_ID = 1 << 20


def _parse_id(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"expected a list of numbers and ranges such as '0-3,8', got {whole!r} (at {text!r})")
    value = int(text)
    if value >= _MAX_ID:
        raise ValueError(f"expected ids below {_MAX_ID}, got {value} in {whole!r}")
    return value


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Return the sorted, distinct ids of a cpulist; an empty (or blank, or NUL-padded) text is the empty set.

    Accepts the kernel's grouped form ``start-end:used/group`` too.  Raises ``ValueError`` on anything else.
    """
    cleaned = text.replace("\0", "").strip()
    ids: set[int] = set()
    if not cleaned:
        return ()
    for part in cleaned.split(","):
        span, _, grouping = part.strip().partition(":")
        first_text, dash, last_text = span.partition("-")
        first = _parse_id(first_text, text)
        last = _parse_id(last_text, text) if dash else first
        if last < first:
            raise ValueError(f"expected a rising range, got {span!r} in {text!r}")
        used, group = 1, 1
        if grouping:
            used_text, slash, group_text = grouping.partition("/")
            if not slash:
                raise ValueError(f"expected 'used/group' after ':', got {grouping!r} in {text!r}")
            used, group = _parse_id(used_text, text), _parse_id(group_text, text)
            if not 1 <= used <= group:
                raise ValueError(f"expected 1 <= used <= group, got {grouping!r} in {text!r}")
        ids.update(value for value in range(first, last + 1) if (value - first) % group < used)
    return tuple(sorted(ids))


def format_cpulist(ids: Iterable[int]) -> str:
    """Return the shortest cpulist of ``ids`` (``(0, 1, 2, 3, 8)`` -> ``"0-3,8"``); ``""`` for the empty set."""
    parts: list[str] = []
    run: list[int] = []
    for value in sorted(set(ids)):
        if run and value == run[-1] + 1:
            run[1:] = [value]
            continue
        if run:
            parts.append("-".join(map(str, run)))
        run = [value]
    if run:
        parts.append("-".join(map(str, run)))
    return ",".join(parts)


def parse_cpumap(text: str) -> tuple[int, ...]:
    """Return the sorted ids of a hexadecimal map of comma-separated 32-bit words, most significant first."""
    cleaned = text.replace("\0", "").strip().replace(",", "")
    if not cleaned:
        return ()
    try:
        bits = int(cleaned, 16)
    except ValueError:
        raise ValueError(f"expected a hexadecimal map such as '00000000,0000010f', got {text!r}") from None
    return tuple(index for index in range(bits.bit_length()) if bits >> index & 1)
