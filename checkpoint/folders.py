"""How a folder on disk becomes whole in one instant, and how a reader can tell that it still is.

A folder is written under another name, its files are flushed to the disk, ``complete.json`` with every file's size
goes in last, and one rename makes it visible. What a checkpoint holds is in store.py.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

MARKER = "complete.json"
CHECKSUM_LIMIT_BYTES = 1 << 20  # larger files are known by their size alone: reading terabytes back would cost minutes
_READ_BYTES = 1 << 22


def files_below(folder: Path) -> dict[str, Path]:
    """Return the files below ``folder`` by their relative names with forward slashes, sorted."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_json(path: Path, values: Any) -> None:
    """Write ``values`` as indented JSON in UTF-8 with a final newline."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def in_short(error: Exception) -> str:
    """Return what a message says of the ``error`` that a file's contents raised.

    Not its repr, which for a UnicodeDecodeError is the whole file.
    """
    return f"{type(error).__name__}: {error}"


def flush_to_disk(path: Path) -> None:
    """Return once the file or folder at ``path`` would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush every file below ``folder``, then the folders that name them."""
    for path in files_below(folder).values():
        flush_to_disk(path)
    for below in (path for path in folder.rglob("*") if path.is_dir()):
        flush_to_disk(below)
    flush_to_disk(folder)


def publish(partial: Path, final: Path) -> None:
    """Flush ``partial`` to the disk and give it the name ``final``, in one rename that no reader sees half of."""
    flush_tree(partial)
    partial.rename(final)
    flush_to_disk(final.parent)


def write_marker(folder: Path) -> None:
    """Write ``complete.json``: the size of every file in ``folder``, and the checksum of the small ones."""
    files: dict[str, dict[str, int | str]] = {}
    for name, path in files_below(folder).items():
        size_bytes = path.stat().st_size
        files[name] = {"bytes": size_bytes}
        if size_bytes <= CHECKSUM_LIMIT_BYTES:
            files[name]["sha256"] = sha256_of(path)
    # The files are flushed before the marker is written: a marker on disk must never speak of bytes that are not.
    flush_tree(folder)
    write_json(folder / MARKER, {"format": 1, "files": files})


def why_incomplete(folder: Path) -> str | None:
    """Return why ``folder`` cannot be trusted, or None if its marker is there and agrees with every file."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"it has no {MARKER}, so its writing was cut off"
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        return f"its {MARKER} cannot be read ({in_short(error)})"
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size_bytes = path.stat().st_size
        if size_bytes != known["bytes"]:
            return f"{name} has {size_bytes} bytes, but had {known['bytes']} when it was written"
        if "sha256" in known and sha256_of(path) != known["sha256"]:
            return f"the bytes of {name} have changed since it was written (SHA-256 differs)"
    return None
