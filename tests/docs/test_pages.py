"""The pages say what is there: generated ones are fresh, links lead somewhere, both READMEs agree."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import socket
from pathlib import Path
from types import ModuleType

import pytest

import numa_collectors
from numa_collectors.config import load_config

from .markdown import ROOT, anchors, blocks, headings, links, pages


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md", "api.md"])
def test_generated_page_is_fresh(build: ModuleType, name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == build.pages()[name], f"docs/{name} is stale: run `python docs/build.py`"


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in numa_collectors.__all__ if name != "__version__" and f"\n### {name}\n" not in text]
    assert not missing
    assert "__version__" in text


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{_name(page)}: {link} leads out of the project"
        assert target.exists(), f"{_name(page)}: {link} does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{_name(page)}: {link} has no such heading"


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_no_path_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    own = [str(ROOT), str(Path.home()) + "/", socket.gethostname()]
    found = [word for word in own if len(word) > 5 and word in text]
    found += re.findall(r"(?<![\w.])/(?:work|root|home|Users|tmp)/\S*", text)
    assert not found


def test_the_chinese_readme_is_the_same_page() -> None:
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert [h.split()[0] for h in headings(english)] == [h.split()[0] for h in headings(chinese)]
    assert [(b.info, b.text) for b in blocks(english)] == [(b.info, b.text) for b in blocks(chinese)]

    def targets(page: Path) -> list[str]:
        return sorted(link for link in links(page) if not link.startswith("README"))

    assert targets(english) == targets(chinese)


def test_every_page_is_in_the_index() -> None:
    listed = set(links(ROOT / "docs" / "README.md"))
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in {*listed, "README.md"}]
    assert not missing


@pytest.mark.parametrize("page", pages(), ids=_name)
def test_configurations_are_accepted(page: Path) -> None:
    import yaml

    for block in blocks(page):
        if block.language == "yaml" and block.file_name is not None:
            load_config(yaml.safe_load(block.text), env={})


def _errors(base: type[Exception]) -> set[str]:
    """Return the names of the library's errors, once all of its modules are loaded."""
    names = {base.__name__} if base.__module__.startswith("numa_collectors.") else set()
    return names.union(*(_errors(error) for error in base.__subclasses__()))


def test_every_error_has_an_entry_with_cause_and_remedy() -> None:
    from numa_collectors.errors import NumaCollectorsError

    for module in pkgutil.walk_packages(numa_collectors.__path__, "numa_collectors."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    entries = dict(re.findall(r"^\| `(\w+Error)` \| (.+) \|$", text, flags=re.M))
    assert set(entries) == _errors(NumaCollectorsError) - {"NumaCollectorsError"}
    assert all(re.fullmatch(r".{20,} \| .{5,}", entry) for entry in entries.values())
    assert "`NumaCollectorsError`" in text


def test_every_binding_code_has_its_remedy() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    codes: set[str] = set()
    for path in (ROOT / "numa_collectors").rglob("*.py"):
        codes.update(re.findall(r"code=\"([a-z]+(?:-[a-z]+)+)\"", path.read_text(encoding="utf-8")))
    assert codes
    assert not sorted(code for code in codes if f"`{code}`" not in text)
