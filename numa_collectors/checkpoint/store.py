"""Checkpoints: whole or not there.

*Guarantees.* A checkpoint is written in a directory aside, its files and directories are fsynced, and one rename(2)
makes it appear: a process killed at any point, or a full disk, leaves the earlier ones as they were and loadable.
Loading executes no pickled code, and verifies sizes and SHA-256 of every file and of the manifest itself.

*Assumes.* One writer a directory (:class:`~numa_collectors.checkpoint.lock.RunLock`); a file system whose rename is
atomic and whose fsync of a directory makes names durable (POSIX local file systems).

*Not covered.* Malice: who can write the directory can write a valid checkpoint, though no code in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from numa_collectors._version import __version__
from numa_collectors.checkpoint.hashing import HashingFile
from numa_collectors.errors import CheckpointError

__all__ = [
    "SCHEMA",
    "Checkpoint",
    "Progress",
    "check_matches",
    "checkpoints",
    "keep_last",
    "latest",
    "load",
    "read_manifest",
    "save",
]

SCHEMA = "numa-collectors/checkpoint/1"
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.pt"
DIRECTORY_NAME = "checkpoints"

_NAME = re.compile(r"checkpoint_(\d{8,})_step_\d+")
_ASIDE = (".saving-", ".deleting-")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run was, as one consistent set.

    ``env_steps`` were taken in and ``updates`` done; ``weight_version`` was the newest published; ``collectors``
    holds each rank's counters of the session that saved it.
    """

    env_steps: int
    updates: int
    weight_version: int = 0
    collectors: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded and verified checkpoint; tensors of ``state`` are on the CPU."""

    path: Path
    progress: Progress
    state: dict[str, Any]
    config: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    library_version: str


def save(
    directory: str | os.PathLike[str],
    state: Mapping[str, Any],
    progress: Progress,
    *,
    config: Mapping[str, Any] | None = None,
    fingerprints: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint into ``directory`` (``<run_dir>/checkpoints``, made if absent) and return its path.

    ``state`` is a nesting of dicts with string or integer keys, lists, tuples, tensors, strings, bytes, numbers,
    truth values and None.  ``config`` must fit in JSON.  ``fingerprints`` names what a resumed run must have
    unchanged, such as the schemas of transitions and weights: see :func:`check_matches`.

    Raises :class:`CheckpointError` where ``state`` holds anything else, or where the disk refuses; earlier checkpoints
    stand, and nothing of this one is left.
    """
    _check_plain(state, "state")
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clean_stale(directory)
        number = 1 + max((_number_of(path) for path in checkpoints(directory)), default=0)
        aside = directory / f".saving-{number:08d}-{os.getpid()}"
        aside.mkdir()
    except OSError as error:
        raise _save_error(directory, error) from error
    try:
        entry = _write_state(aside / STATE_NAME, state)
        manifest = _manifest(progress, {STATE_NAME: entry}, config or {}, fingerprints or {})
        _write_durably(aside / MANIFEST_NAME, manifest.encode())
        _sync_directory(aside)
        final = directory / f"checkpoint_{number:08d}_step_{progress.env_steps}"
        os.rename(aside, final)
        _sync_directory(directory)
    except OSError as error:
        raise _save_error(directory, error) from error
    finally:
        # Gone after the rename; what is left of a failed save would only hold space that the disk lacks.
        shutil.rmtree(aside, ignore_errors=True)
    return final


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint at ``path``: one checkpoint, or the newest of a run directory or of its ``checkpoints``.

    Raises :class:`CheckpointError` that names what is missing or damaged.  It never falls back to an older checkpoint
    by itself: give that one's path.
    """
    found = _find(path)
    manifest = _read_manifest(found)
    for name, entry in manifest["files"].items():
        _verify_file(found / name, entry)
    return replace(_described(found, manifest), state=_load_state(found / STATE_NAME))


def _find(path: str | os.PathLike[str]) -> Path:
    found = Path(path) if (Path(path) / MANIFEST_NAME).exists() else latest(path)
    if found is None:
        if _NAME.fullmatch(Path(path).name) and Path(path).is_dir():
            raise CheckpointError(f"expected {MANIFEST_NAME} in {path}, got none; load another checkpoint")
        raise CheckpointError(f"expected a checkpoint, a run directory with one, or its checkpoints/, got {path}")
    return found


def read_manifest(path: str | os.PathLike[str]) -> Checkpoint:
    """Return what the manifest at ``path`` (as for :func:`load`) says, without reading the state, which is left empty.

    Raises :class:`CheckpointError`.
    """
    found = _find(path)
    return _described(found, _read_manifest(found))


def _described(found: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        path=found,
        progress=_progress_of(found, manifest),
        state={},
        config=manifest.get("config", {}),
        fingerprints=manifest.get("fingerprints", {}),
        library_version=str(manifest.get("library_version", "")),
    )


def checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a run directory, or of its ``checkpoints``, oldest first."""
    root = Path(directory)
    if (root / DIRECTORY_NAME).is_dir():
        root = root / DIRECTORY_NAME
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number_of)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint, or None; what a killed save left aside does not count."""
    found = checkpoints(directory)
    return found[-1] if found else None


def keep_last(directory: str | os.PathLike[str], count: int) -> list[Path]:
    """Remove all but the newest ``count`` (at least 1) checkpoints, oldest first, and return those that remain.

    Each is renamed aside before it is emptied, so that a kill never leaves a half-emptied one under a checkpoint's
    name.  Raises :class:`CheckpointError` where the disk refuses.
    """
    if count < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, got {count}")
    found = checkpoints(directory)
    try:
        for path in found[:-count]:
            aside = path.with_name(f".deleting-{path.name}")
            os.rename(path, aside)
            shutil.rmtree(aside)
    except OSError as error:
        raise CheckpointError(f"expected to remove old checkpoints of {directory}, got {error}; remove them") from error
    return found[-count:]


def clean_stale(directory: str | os.PathLike[str]) -> None:
    """Remove what killed saves and removals left aside; only for the process that holds the run directory."""
    for path in Path(directory).iterdir():
        if path.name.startswith(_ASIDE):
            shutil.rmtree(path)


def check_matches(checkpoint: Checkpoint, fingerprints: Mapping[str, str]) -> None:
    """Raise :class:`CheckpointError` naming the first of ``fingerprints`` that the checkpoint has otherwise.

    A name that the checkpoint lacks does not contradict it.
    """
    for name, got in fingerprints.items():
        expected = checkpoint.fingerprints.get(name, got)
        if expected != got:
            raise CheckpointError(
                f"{name}: expected {expected} as in {checkpoint.path}, got {got}; "
                f"resume with what the run was made with, or start a new run"
            )


def _save_error(directory: Path, error: OSError) -> CheckpointError:
    stands = latest(directory) if directory.is_dir() else None
    rest = f"the last one stands: {stands}" if stands else "there is no earlier one"
    return CheckpointError(f"expected to write a checkpoint into {directory}, got {error.strerror or error}; {rest}")


def _number_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else 0


def _check_plain(value: Any, where: str) -> None:
    """Refuse at saving what loading without code would refuse, by name."""
    if type(value) in (dict, OrderedDict):
        for key, part in value.items():
            if type(key) not in (str, int):
                raise CheckpointError(f"{where}: expected keys of str or int, got {key!r} ({type(key).__name__})")
            _check_plain(part, f"{where}.{key}")
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            _check_plain(part, f"{where}[{index}]")
    elif not (value is None or type(value) in (str, bytes, int, float, bool) or isinstance(value, torch.Tensor)):
        raise CheckpointError(
            f"{where}: expected tensors, numbers, strings and nestings of them, got {type(value).__name__}; "
            f"convert it in state_dict(), arrays with torch.from_numpy"
        )


def _write_state(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    file = HashingFile(path)
    try:
        torch.save(state, file)  # type: ignore[arg-type]
        return file.finish()
    finally:
        file.close()


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _digest(manifest: Mapping[str, Any]) -> str:
    body = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _manifest(
    progress: Progress, files: Mapping[str, Any], config: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> str:
    content = asdict(progress)
    content["collectors"] = {str(rank): dict(counters) for rank, counters in progress.collectors.items()}
    manifest = {
        "schema": SCHEMA,
        "library_version": __version__,
        "torch_version": str(torch.__version__),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "progress": content,
        "files": files,
        "config": config,
        "fingerprints": fingerprints,
    }
    try:
        # Through JSON once, so that the digest is of what a reader will see.
        manifest = json.loads(json.dumps(manifest))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"expected config and counters that fit in JSON, got {error}") from error
    return json.dumps({**manifest, "manifest_sha256": _digest(manifest)}, indent=1)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_NAME
    remedy = "load another checkpoint"
    try:
        given: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"expected a readable {file}, got {error.strerror}; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected JSON in {file}, got a damaged file ({error}); {remedy}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"expected a mapping in {file}, got {type(given).__name__}; {remedy}")
    manifest: dict[str, Any] = given
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"expected schema {SCHEMA} in {file}, got {manifest.get('schema')!r} "
            f"(library version {manifest.get('library_version')}); "
            f"load it with the library version that wrote it"
        )
    if manifest.get("manifest_sha256") != _digest(manifest):
        raise CheckpointError(f"expected {file} as it was written, got a changed one (its digest differs); {remedy}")
    files = manifest.get("files")
    if not isinstance(files, dict) or STATE_NAME not in files or any(Path(name).name != name for name in files):
        raise CheckpointError(f"expected the files of the checkpoint in {file}, got {files!r}; {remedy}")
    return manifest


def _verify_file(path: Path, entry: Mapping[str, Any]) -> None:
    digest = hashlib.sha256()
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry["size_bytes"]:
            raise CheckpointError(
                f"expected {entry['size_bytes']} bytes in {path}, got {size_bytes}: truncated or changed; "
                f"load another checkpoint"
            )
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"expected a readable {path}, got {error.strerror}; load another checkpoint") from None
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"expected size and digest of {path} in its manifest, got {error!r}") from None
    if digest.hexdigest() != entry.get("sha256"):
        raise CheckpointError(f"expected {path} as it was written, got a changed one; load another checkpoint")


def _load_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"expected tensors and plain values in {path}, got something else: {first}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"expected a mapping in {path}, got {type(state).__name__}; load another checkpoint")
    return state


def _progress_of(path: Path, manifest: Mapping[str, Any]) -> Progress:
    try:
        given = manifest["progress"]
        return Progress(
            env_steps=int(given["env_steps"]),
            updates=int(given["updates"]),
            weight_version=int(given["weight_version"]),
            collectors={int(rank): dict(counters) for rank, counters in given["collectors"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"expected the progress of the run in {path / MANIFEST_NAME}, got {error!r}") from None
