"""Regenerate the pages that are made from the code: ``python docs/build.py`` (``--check`` only compares)."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

_GROUPS = {
    "topo": "Machine",
    "placement": "Placement",
    "binding": "Binding",
    "worker": "Workers",
    "rings": "Rings",
    "snapshots": "Snapshots",
    "collector": "Collectors",
    "learner": "Learners",
    "pool": "Pool",
    "config": "Configuration",
    "trainer": "Trainer",
    "errors": "Errors",
}

_HEAD = """# API reference

Every public name of `numa_collectors`, by topic. Each is imported from the package root (`from numa_collectors import
FanOutTrainer`) or from the module that its section names; the root loads a module when a name of it is first used. This
page is generated from the docstrings by `docs/build.py`; full texts are in the docstrings themselves. Anything that starts
with an underscore, and any module that is not named here, may change without notice.
"""


def _plain(text: str) -> str:
    """Turn the docstrings' roles and double back-quotes into Markdown."""
    text = re.sub(r":[a-z]+:`~?(?:[\w.]+\.)?([\w]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


def _first_paragraph(thing: Any) -> str:
    doc = inspect.getdoc(thing) or ""
    return _plain(" ".join(doc.split("\n\n")[0].split()))


def _signature(function: Any) -> str:
    # Annotations are text and shown in quotes; defaults keep theirs.
    text = re.sub(r"(: |-> )(?:'([^']*)'|\"([^\"]*)\")", r"\1\2\3", str(inspect.signature(function)))
    text = re.sub(r"\((self|cls)(, )?", "(", text)
    return text.removesuffix(" -> None")


def _methods(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, signature and first paragraph of the public members that ``cls`` itself defines, in order."""
    for name, member in vars(cls).items():
        doc = inspect.getdoc(getattr(member, "__func__", member))
        if name.startswith("_") or not doc:
            continue
        if isinstance(member, property):
            yield name, "", _first_paragraph(member)
        elif isinstance(member, classmethod | staticmethod):
            yield name, _signature(member.__func__), _first_paragraph(member.__func__)
        elif inspect.isfunction(member):
            yield name, _signature(member), _first_paragraph(member)


def _call_form(thing: Any) -> str:
    if inspect.isfunction(thing):
        return _signature(thing)
    if "__init__" in vars(thing) and not getattr(thing, "_is_protocol", False) and hasattr(thing.__init__, "__code__"):
        return "" if hasattr(thing, "model_fields") else _signature(thing.__init__)
    return ""


def _section(name: str, thing: Any) -> Iterator[str]:
    yield f"\n### {name}\n"
    form = _call_form(thing)
    if form:
        yield f"`{name}{form}`\n"
    yield _first_paragraph(thing)
    if not inspect.isclass(thing) or issubclass(thing, Exception):
        return
    members = list(_methods(thing))
    if members and not (dataclasses.is_dataclass(thing) and not members):
        yield ""
        yield from (f"- `{member}{form}`: {text}" for member, form, text in members)


def api_markdown() -> str:
    """Return the text of ``docs/api.md``."""
    package = importlib.import_module("numa_collectors")
    lines = [_HEAD]
    listed = {"__version__"}
    for module_name, title in _GROUPS.items():
        module = importlib.import_module(f"numa_collectors.{module_name}")
        names = [name for name in package.__all__ if name not in listed and name in module.__all__]
        listed.update(names)
        lines.append(f"\n## {title}\n\nFrom `numa_collectors.{module_name}`.")
        for name in names:
            lines.extend(_section(name, getattr(module, name)))
    lines.append("\n## Version\n\n`numa_collectors.__version__` is the installed version, as text.")
    missing = set(package.__all__) - listed
    if missing:
        raise SystemExit(f"expected every public name in a group of docs/build.py, found none for {sorted(missing)}")
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Return the generated pages: file name -> text."""
    from numa_collectors.config import config_markdown
    from numa_collectors.metrics import metrics_markdown

    return {"configuration.md": config_markdown(), "metrics.md": metrics_markdown(), "api.md": api_markdown()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Regenerate the pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is stale")
    arguments = parser.parse_args()
    stale = 0
    for name, text in pages().items():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        print(f"{'stale' if arguments.check else 'written'}: docs/{name}")
    return int(arguments.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
