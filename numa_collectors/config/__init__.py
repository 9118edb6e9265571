"""Settings of a run: one frozen model, read from YAML, JSON, the environment and the command line."""

from __future__ import annotations

from numa_collectors.config.documents import config_markdown, json_schema
from numa_collectors.config.load import ENV_PREFIX, load_config
from numa_collectors.config.model import RunConfig

__all__ = ["ENV_PREFIX", "RunConfig", "config_markdown", "json_schema", "load_config"]
