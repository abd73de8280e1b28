"""Text files and named datasets → documents, one string each, in a fixed order, read through the ``datasets`` library.

Documents are streamed, so nothing is copied to a cache and memory does not grow with the text. What becomes of the
documents is data/pipeline.py's.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.manifest import record_file

READ_ROWS = 256  # rows that datasets hands over at a time
# Builder of the datasets library, and its options, by the end of the file's name. A text file is one document.
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".jsonl.gz": ("json", {}),
    ".json": ("json", {}),
    ".json.gz": ("json", {}),
    ".parquet": ("parquet", {}),
    ".txt": ("text", {"sample_by": "document"}),
    ".txt.gz": ("text", {"sample_by": "document"}),
}


@dataclass(frozen=True)
class TextFile:
    """A local file of documents."""

    path: Path

    @property
    def name(self) -> str:
        """Return the name that messages and the manifest give this source."""
        return self.path.name

    def identity(self) -> dict[str, Any]:
        """Return what tells this source from another: equal identities give equal documents."""
        record = record_file(self.path)
        return {"name": self.name, "bytes": record.bytes, "sha256": record.sha256}

    def open(self) -> Any:
        """Return the streamed dataset of this file's documents."""
        builder, options = _builder_of(self.path)
        return datasets_library().load_dataset(
            builder, data_files=str(self.path), split="train", streaming=True, **options
        )


@dataclass(frozen=True)
class NamedDataset:
    """A dataset of the Hugging Face hub, or a local folder laid out like one."""

    path: str
    config: str | None
    split: str
    revision: str | None
    streaming: bool

    @property
    def name(self) -> str:
        """Return the name that messages and the manifest give this source."""
        return ":".join(part for part in (self.path, self.config, self.split) if part)

    def identity(self) -> dict[str, Any]:
        """Return what tells this source from another; only a revision fixes what the hub hands out."""
        return {"name": self.name, "revision": self.revision}

    def open(self) -> Any:
        """Return the dataset, streamed unless it is to be downloaded first."""
        load_dataset = datasets_library().load_dataset
        return load_dataset(self.path, self.config, split=self.split, revision=self.revision, streaming=self.streaming)


Source = TextFile | NamedDataset


def datasets_library() -> Any:
    """Return the module ``datasets``.

    Raises:
        DataError: with the command that installs it, where it can't be imported.
    """
    try:
        import datasets  # noqa: PLC0415  (training on prepared data does without the library)
    except ImportError as error:
        raise DataError(
            f"text is read with the package datasets, which can't be imported ({error}): pip install 'datasets>=4.0,<6'"
        ) from error
    return datasets


def check_file(path: Path) -> TextFile:
    """Return the source for a path given by the user.

    Raises:
        DataError: if there is no such file, it is empty, or its name doesn't say how to read it.
    """
    if not path.is_file():
        raise DataError(f"--text {path}: there is no such file")
    if path.stat().st_size == 0:
        raise DataError(f"--text {path}: the file is empty")
    _builder_of(path)
    return TextFile(path)


def read_documents(source: Source, text_field: str) -> Iterator[str]:
    """Yield every document of a source, empty ones included.

    Raises:
        DataError: if the source can't be read, lacks the field, or holds something else than text there.
    """
    number = 0
    for columns in _read_columns(source, text_field):
        if text_field not in columns:
            fields = ", ".join(sorted(columns))
            raise DataError(
                f"{source.name} has no field {text_field!r} but {fields}; name the right one with --text-field"
            )
        for text in columns[text_field]:
            if not isinstance(text, str):
                raise DataError(
                    f"{source.name}: document {number} has {text!r:.60} in the field {text_field!r}, text is needed"
                )
            yield text
            number += 1
    if number == 0:
        raise DataError(f"{source.name} holds no documents")


def _read_columns(source: Source, text_field: str) -> Iterator[dict[str, list[Any]]]:
    try:
        dataset = source.open()
        if text_field in (dataset.column_names or ()):  # not always known before reading
            dataset = dataset.select_columns([text_field])
        yield from dataset.iter(batch_size=READ_ROWS)
    except StopIteration:
        return  # what datasets raises for a compressed file of nothing
    except (ValueError, EOFError, OSError, zlib.error) as error:
        # A bad line of JSON, bytes that aren't UTF-8, a cut or wrong gzip file, a dataset that isn't there.
        reason = " ".join(str(error).split())
        raise DataError(f"{source.name} can't be read: {type(error).__name__}: {reason}") from error


def _builder_of(path: Path) -> tuple[str, dict[str, Any]]:
    for ending, builder in _BUILDERS.items():
        if path.name.lower().endswith(ending):
            return builder
    raise DataError(f"--text {path}: the file's name must end in one of {', '.join(sorted(_BUILDERS))}")
