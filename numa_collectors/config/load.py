"""From a file, the environment and the command line to one :class:`RunConfig`; later sources win."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from numa_collectors.config.messages import show, unknown_key
from numa_collectors.config.model import RunConfig
from numa_collectors.errors import ConfigError

__all__ = ["ENV_PREFIX", "load_config"]

ENV_PREFIX = "NUMA_COLLECTORS_"

# Variables of the library itself, which are no settings: what the binding ladder hands to children, and the lab's own.
_NO_SETTINGS = (ENV_PREFIX + "_", ENV_PREFIX + "BINDING_WARNED", ENV_PREFIX + "LAB_")


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; YAML itself lets the last one win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node.value, str):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Iterable[str] = (),
) -> RunConfig:
    """Return the configuration of ``source``, ``env`` and ``overrides``, the later winning.

    ``source`` is a YAML or JSON file (JSON is a subset) or a mapping.  ``env`` (None: ``os.environ``) gives fields as
    ``NUMA_COLLECTORS_<NAME>``.  ``overrides`` are ``key=value`` texts as on a command line, values in YAML;
    ``learner_options.<name>=value`` and ``collector_options.<name>=value`` reach into the option mappings.

    Raises :class:`ConfigError` with one line for each problem, saying where the value came from.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    label, given = _read_source(source)
    for name, value in given.items():
        values[str(name)] = value
        origins[str(name)] = label
    _merge_environment(os.environ if env is None else env, values, origins, problems)
    for text in overrides:
        _merge_override(text, values, origins, problems)
    try:
        config = RunConfig.from_values(values, origins)
    except ConfigError as error:
        problems.extend(str(error).splitlines())
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _read_source(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> tuple[str, Mapping[Any, Any]]:
    if source is None:
        return "", {}
    if isinstance(source, Mapping):
        return "the given mapping", source
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a readable YAML or JSON file, got {error.strerror}; check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}; save it as UTF-8"
        ) from None
    try:
        given = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: expected YAML or JSON, got {_one_line(error)}; correct the file") from None
    if given is None:
        return str(path), {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: expected `name: value` lines, got {show(given)}; write one setting a line")
    return str(path), given


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{getattr(error, 'problem', 'an error')} (line {mark.line + 1}, column {mark.column + 1})"
    return " ".join(str(error).split()) or type(error).__name__


def _parse_value(text: str) -> Any:
    """Return the YAML value of ``text``; ``[0,1]`` is a list, ``null`` is None, and what is not YAML stays text."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _merge_environment(
    env: Mapping[str, str], values: dict[str, Any], origins: dict[str, str], problems: list[str]
) -> None:
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_NO_SETTINGS):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in RunConfig.model_fields:
            problems.append(unknown_key(name, RunConfig.model_fields, f" (environment variable {variable})"))
            continue
        values[name] = _parse_value(env[variable])
        origins[name] = f"environment variable {variable}"


def _merge_override(text: str, values: dict[str, Any], origins: dict[str, str], problems: list[str]) -> None:
    key, equals, value_text = text.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not key:
        problems.append(f"{text}: expected key=value, got {show(text)}; write for example num_collectors=2")
        return
    name, dot, option = key.partition(".")
    origins[name] = f"command line {show(text)}"
    if not dot:
        values[name] = _parse_value(value_text)
    elif name in ("collector_options", "learner_options") and option:
        before = values.get(name)
        values[name] = {**(before if isinstance(before, Mapping) else {}), option: _parse_value(value_text)}
    else:
        problems.append(
            f"{key}: expected a dot only after collector_options or learner_options, got {show(text)}; "
            f"settings are not nested: write {name}={value_text}"
        )
