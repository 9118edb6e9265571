"""Problems of a configuration in one line each: expected, got, and what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

__all__ = ["expectation", "problems_of", "show", "unknown_key"]

# Names that other libraries give to the same thing; difflib alone would miss them.
FOREIGN_NAMES = {
    "n_envs": "num_envs",
    "num_workers": "num_collectors",
    "collectors": "num_collectors",
    "total_timesteps": "total_env_steps",
    "gradient_steps": "num_updates",
    "utd_ratio": "num_updates",
    "device": "learner_device",
    "quiet": "console",
}

_PATTERNS = {"module:attribute": r"^[A-Za-z_]", "'cpu', 'cuda' or 'cuda:N'": r"^(cpu|"}


def show(value: object) -> str:
    """Return ``value`` as the user would write it, cut to 80 characters."""
    try:
        text = repr(value) if isinstance(value, str) else json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` most likely stands for."""
    known = list(known)
    foreign = FOREIGN_NAMES.get(name)
    if foreign in known:
        return foreign
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return close[0] if close else None


def unknown_key(name: str, known: Iterable[str], origin: str) -> str:
    """Return the line for a key that no field has."""
    known = sorted(known)
    close = nearest(name, known)
    remedy = f"did you mean {close!r}?" if close else "the known names are in the configuration page and json_schema()"
    return f"{name}: expected a known name, got an unknown one{origin}; {remedy}"


# Bounds from here on keep counters within 64 bits and waits within what the kernel takes; a reader need not see them.
_CEILING = 10**9


def _bounds(schema: Mapping[str, Any], ceilings: bool) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    shown = {key: schema[key] for key in signs if key in schema and (ceilings or schema[key] < _CEILING)}
    return " and ".join(f"{signs[key]} {bound}" for key, bound in shown.items())


def _scalar_expectation(schema: Mapping[str, Any], ceilings: bool) -> str:
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "null": "null",
        "object": "a mapping",
        "string": "a path" if schema.get("format") == "path" else "text",
    }[schema["type"]]
    return f"{words} {_bounds(schema, ceilings)}".strip()


def expectation(schema: Mapping[str, Any], ceilings: bool = True) -> str:
    """Return what a JSON schema of one field accepts, in words; ``ceilings=False`` leaves out bounds from 10^9 on."""
    if "anyOf" in schema:
        return " or ".join(expectation(part, ceilings) for part in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(show(word) for word in schema["enum"])
    if "const" in schema:
        return show(schema["const"])
    if "pattern" in schema:
        return next(words for words, start in _PATTERNS.items() if schema["pattern"].startswith(start))
    if schema.get("type") == "array":
        items = expectation(schema["items"], ceilings).removeprefix("an ").replace("integer", "integers", 1)
        return f"a list of {items}"
    return _scalar_expectation(schema, ceilings)


@lru_cache(maxsize=4)
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    properties: dict[str, Any] = model.model_json_schema()["properties"]
    return properties


def _enum_words(schema: Mapping[str, Any]) -> list[str]:
    parts = schema.get("anyOf", [schema])
    return [word for part in parts for word in (*part.get("enum", ()), *((part["const"],) if "const" in part else ()))]


def _remedy(schema: Mapping[str, Any], value: object) -> str:
    words = _enum_words(schema)
    if isinstance(value, str) and (close := difflib.get_close_matches(value, words, n=1)):
        return f"did you mean {close[0]!r}?"
    default = schema.get("default")
    return f"correct it, or leave it out for the default ({show(default)})"


def problems_of(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, object], origins: Mapping[str, str]
) -> list[str]:
    """Return one line for each field that ``error`` names; ``origins`` says where a field's value was given."""
    lines: list[str] = []
    seen: set[str] = set()
    for item in error.errors(include_url=False, include_context=False):
        name = str(item["loc"][0]) if item["loc"] else ""
        if not name:
            lines.extend(str(item["msg"]).removeprefix("Value error, ").splitlines())
        elif name not in seen:
            seen.add(name)
            origin = f" ({origins[name]})" if name in origins else ""
            if item["type"] == "extra_forbidden":
                lines.append(unknown_key(name, model.model_fields, origin))
            else:
                schema, value = _properties(model)[name], values.get(name)
                expected = expectation(schema)
                lines.append(f"{name}: expected {expected}, got {show(value)}{origin}; {_remedy(schema, value)}")
    return lines
