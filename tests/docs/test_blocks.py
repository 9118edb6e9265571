"""The pages' code runs.

A ``python`` block is a script of its own; ``python continues`` goes on where the block before it ended, ``python no-run``
only has to compile, and says why in its first comment, and ``python needs=module`` runs where that is installed.  Blocks and
runs of one page share a directory, so that a block whose first line is ``# file: name`` can be imported by later ones and
named on command lines.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .markdown import ROOT, Block, blocks, pages

TIMEOUT_S = 300
# On a loaded machine a page takes minutes, nearly all of it importing torch in each process.
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
MODULES = ("numa_collectors.topo", "numa_collectors.train", "examples.fastsac.train")

# README.zh-CN.md has the same blocks as README.md, which test_pages.py compares; motrix has an environment of its own.
PAGES = [page for page in pages() if page.name != "README.zh-CN.md" and not page.name.startswith("motrix")]
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
WITH_COMMANDS = [page for page in PAGES if any(block.language == "sh" for block in blocks(page))]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _run(arguments: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    # One thread: on a machine with few CPUs OpenMP's waiting threads would be all that runs.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _scripts(page: Path) -> list[list[Block]]:
    """Return the page's runnable blocks, those that belong together in one list."""
    scripts: list[list[Block]] = []
    for block in blocks(page):
        if block.language != "python" or "no-run" in block.words or block.needs is not None:
            continue
        if "continues" in block.words:
            assert scripts, f"{block.where}: nothing to go on from"
            scripts[-1].append(block)
        else:
            scripts.append([block])
    return scripts


def _save_files(page: Path, directory: Path) -> None:
    for block in blocks(page):
        if block.file_name is not None:
            (directory / block.file_name).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    _save_files(page, tmp_path)
    light: list[str] = []
    for script in _scripts(page):
        text = "".join(block.text for block in script)
        path = tmp_path / f"line_{script[0].line}.py"
        path.write_text(text, encoding="utf-8")
        # A block that starts processes is imported again by them and needs a process of its own; the others share one.
        if "__main__" in text:
            done = _run(["-W", "error", str(path)], tmp_path)
            assert done.returncode == 0, f"{script[0].where}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        else:
            light.append(str(path))
    if light:
        done = _run(["-W", "error", "-c", f"import runpy\nfor path in {light!r}: runpy.run_path(path)"], tmp_path)
        assert done.returncode == 0, f"{_name(page)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize(
    "block", [b for page in PAGES for b in blocks(page) if b.needs is not None], ids=lambda block: str(block.needs)
)
def test_code_that_needs_another_library_runs(block: Block, tmp_path: Path) -> None:
    if importlib.util.find_spec(str(block.needs)) is None:
        pytest.skip(f"{block.where} needs {block.needs}, which is not installed here: pip install {block.needs}")
    _save_files(block.page, tmp_path)
    path = tmp_path / "script.py"
    path.write_text(block.text, encoding="utf-8")
    done = _run([str(path)], tmp_path)
    assert done.returncode == 0, f"{block.where}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_code_compiles(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        compile(block.text, block.where, "exec")
        assert set(block.words) <= {"no-run", "continues", f"needs={block.needs}"}, block.where
        if "no-run" in block.words:
            assert block.text.startswith("# Not run by the tests: "), f"{block.where}: expected the reason"


def _commands(page: Path) -> list[tuple[Block, list[str]]]:
    found = []
    for block in blocks(page):
        if block.language == "sh":
            lines = block.text.replace("\\\n", " ").splitlines()
            found += [(block, shlex.split(line, comments=True)) for line in lines]
    return [(block, words) for block, words in found if words]


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    texts = {}
    for module in MODULES:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        texts[module] = done.stdout
    return texts


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_commands_exist(page: Path, help_texts: dict[str, str], tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block, words in _commands(page):
        if words[0] == "make":
            assert all(f"\n{target}:" in makefile for target in words[1:] if "=" not in target), block.where
        elif words[:2] == ["python", "-m"] and words[2] in MODULES:
            own = words[3 : words.index("--")] if "--" in words else words[3:]
            flags = [word for word in own if word.startswith("--")]
            assert all(flag in help_texts[words[2]] for flag in flags), f"{block.where}: {words}"
        elif words[0] == "python" and words[1].endswith(".py"):
            known = {b.file_name for b in blocks(page)}
            assert (ROOT / words[1]).exists() or words[1] in known, f"{block.where}: {words}"


def _is_quick(words: list[str]) -> bool:
    """Whether a command looks at this machine and no more: no process id, no GPU, no file of somewhere else."""
    others = {"--exec", "--bench", "--verify", "--near", "--root", "--load"}
    return words[:3] == ["python", "-m", "numa_collectors.topo"] and not others & set(words)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    _save_files(page, tmp_path)
    for block, words in _commands(page):
        if _is_quick(words):
            done = _run(words[1:], tmp_path)
            # 3: there is advice for this machine.
            assert done.returncode in (0, 3), f"{block.where}: {words}\n{done.stderr}"
        elif words[:3] == ["python", "-m", "numa_collectors.train"] and "--config" in words:
            assert (tmp_path / words[words.index("--config") + 1]).exists(), f"{block.where}: no block has this file"
            done = _run(words[1:], tmp_path)
            assert done.returncode == 0, f"{block.where}: {words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
