"""The JSON schema and the documentation page of :class:`RunConfig`, both generated from the model."""

from __future__ import annotations

from typing import Any

from numa_collectors.config.load import ENV_PREFIX
from numa_collectors.config.messages import expectation, show
from numa_collectors.config.model import SECTIONS, RunConfig

__all__ = ["config_markdown", "json_schema"]

SCHEMA_ID = "numa-collectors/config/1"

_HEAD = f"""# Configuration

One model, `numa_collectors.RunConfig`, holds every setting of a run.  It is read from a YAML or JSON file, from
environment variables (`{ENV_PREFIX}<NAME>`, as in `{ENV_PREFIX}NUM_COLLECTORS=4`) and from `key=value` on the
command line; the later source wins.  An unknown name is refused with the nearest known one.  This page is generated
from the model.
"""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **RunConfig.model_json_schema(),
    }


def config_markdown() -> str:
    """Return the text of ``docs/configuration.md``."""
    lines = [_HEAD]
    for name, schema in RunConfig.model_json_schema()["properties"].items():
        if name in SECTIONS:
            lines += [f"\n## {SECTIONS[name]}\n", "| name | default | accepts | meaning |", "|---|---|---|---|"]
        default = show(schema.get("default", {})).replace("'", "").replace('"', "")
        accepts = expectation(schema, ceilings=False).replace("'", "`").replace("|", "\\|")
        meaning = " ".join(schema["description"].split()).replace("|", "\\|")
        lines.append(f"| `{name}` | `{default}` | {accepts} | {meaning} |")
    return "\n".join(lines) + "\n"
