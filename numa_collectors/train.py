"""Run a collector and a learner that a configuration names by import path::

    python -m numa_collectors.train --config run.yaml num_collectors=4 learner_options.lr=3e-4
    python -m numa_collectors.train --config run.yaml --explain
    python -m numa_collectors.train --schema

``collector: package.module:Name`` is a factory ``(ctx, **collector_options) -> Collector`` with an attribute ``schema`` (a
``Schema``, or a callable ``(**collector_options) -> Schema``); ``learner: package.module:Name`` is a factory
``(ctx, **learner_options) -> Learner`` with an attribute ``weight_spec`` (a ``WeightSpec``, or such a callable).

Exit codes: 0 target reached (or nothing was to be run), 1 the run failed, 2 bad usage or configuration, 130 and 143 ended by
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from numa_collectors.errors import ConfigError, NumaCollectorsError

if TYPE_CHECKING:
    from numa_collectors.config import RunConfig
    from numa_collectors.trainer import FanOutTrainer

__all__ = ["build_trainer", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m numa_collectors.train", description="Run a collector and a learner named by import path."
    )
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON file; see docs/configuration.md")
    parser.add_argument("--explain", action="store_true", help="say what would run where and why, and start nothing")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of configuration files")
    parser.add_argument("--quiet", action="store_true", help="no console output but errors")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    arguments = parser.parse_intermixed_args(argv)
    # Imported here: a spawned worker imports this module again as its main module, and must stay light.
    from numa_collectors.config import json_schema, load_config

    if arguments.schema:
        print(json.dumps(json_schema(), indent=1))
        return 0
    overrides = [*arguments.overrides, *(["console=quiet"] if arguments.quiet else [])]
    try:
        trainer = build_trainer(load_config(arguments.config, overrides=overrides))
    except NumaCollectorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.explain:
        print(trainer.explain())
        return 0
    try:
        result = trainer.run()
    except NumaCollectorsError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if not arguments.quiet and trainer.setup.ranks.is_main:
        print(result.summary())
    return result.exit_code


def build_trainer(config: RunConfig) -> FanOutTrainer:
    """Return the trainer of ``config``; raises ``ConfigError`` for what cannot be imported or declares no spec."""
    from numa_collectors.rings import Schema
    from numa_collectors.snapshots import WeightSpec
    from numa_collectors.trainer import FanOutTrainer

    collector = _resolve("collector", config.collector)
    learner = _resolve("learner", config.learner)
    _check_options("collector", collector, config.collector_options)
    _check_options("learner", learner, config.learner_options)
    return FanOutTrainer(
        config,
        collector=partial(collector, **config.collector_options),
        learner=partial(learner, **config.learner_options),
        schema=_declared("collector", collector, "schema", Schema, config.collector_options),
        weights=_declared("learner", learner, "weight_spec", WeightSpec, config.learner_options),
    )


def _resolve(field: str, path: str | None) -> Any:
    if path is None:
        raise ConfigError(
            f"{field}: expected an import path such as 'my_package.my_module:MyClass', got none; set {field}"
        )
    module_name, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for name in attribute.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{field}: expected something that can be imported, got {path!r} ({error}); is its folder on PYTHONPATH?"
        ) from error
    return value


def _check_options(field: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that the factory does not take now, and not in a worker's traceback later."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some C extensions have no signature
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        name = getattr(factory, "__qualname__", repr(factory))
        taken = ", ".join(list(signature.parameters)[1:]) or "none"
        raise ConfigError(
            f"{field}_options: expected what {name} takes ({taken}), got {sorted(options)} ({error}); correct {field}_options"
        ) from None


def _declared(field: str, factory: Any, attribute: str, kind: type[Any], options: Mapping[str, Any]) -> Any:
    declared = getattr(factory, attribute, None)
    if callable(declared):
        declared = declared(**options)
    if not isinstance(declared, kind):
        raise ConfigError(
            f"{field}: expected {factory!r} to have an attribute {attribute!r} that is a {kind.__name__} or returns one, "
            f"got {declared!r}"
        )
    return declared


if __name__ == "__main__":
    sys.exit(main())
