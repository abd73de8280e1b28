"""manifest.json: what a prepared folder holds, how it was made, and whether it is still whole.

The manifest is written last and lists every other file with its size and sha256, and its own digest, so a folder with a
manifest was finished once, and any later change of a file is found. How tokens are laid out in the files is
data/shards.py's.
"""

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "held_out")
DEFAULT_ROOT = "prepared/state_of_the_union"  # written by data.prepare without options, read by the run without options
# What writes the folders of the other presets in configs/data/, without --out; PATH is the reader's to fill in.
PRESET_COMMANDS = {
    "prepared/fineweb_edu_dedup": "python -m data.prepare --dataset HuggingFaceTB/smollm-corpus "
    "--dataset-config fineweb-edu-dedup --tokenizer PATH --held-out-fraction 0.0005",
}
# Sizes are always compared. Contents are hashed at every start as long as that takes about a second.
CHECKSUM_LIMIT_BYTES = 2**30


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """One token file; its path is relative to the prepared folder."""

    file: str
    tokens: int


@dataclass(frozen=True)
class SplitRecord:
    """The files of one split and what they hold together."""

    documents: int
    tokens: int  # an end-of-text token after every document included
    text_bytes: int  # UTF-8
    shards: tuple[ShardRecord, ...]
    document_offsets: str  # int64 file, documents + 1 entries: where each document starts in the stream of tokens
    document_indices: str  # int64 file, documents entries: its number in the source text, over all sources


@dataclass(frozen=True)
class SourceRecord:
    """A text file, or a dataset by name, that documents were read from, in the order of reading."""

    name: str
    documents: int  # read from it, those left out as empty included
    bytes: int | None  # of a file; a named dataset has neither size nor digest
    sha256: str | None


@dataclass(frozen=True)
class Manifest:
    """Everything that a reader of the folder needs to know; cross-entropies in nats per token."""

    format_version: int
    token_dtype: str
    vocab_size: int  # one more than the largest token id
    eos_id: int
    tokenizer_sha256: str  # of tokenizer/tokenizer.json
    train: SplitRecord
    held_out: SplitRecord
    # Cross-entropy of the held-out tokens under the add-one smoothed token frequencies of the training split.
    unigram_ce_train_fit: float
    # Entropy of the held-out tokens' own frequencies: the least that any fixed distribution over tokens could reach.
    unigram_entropy_held_out: float
    sources: tuple[SourceRecord, ...]
    documents_skipped_empty: int
    settings: dict[str, Any]  # of data/pipeline.py, with which the same text gives the same bytes
    command: str  # that wrote the folder, without --out
    files: dict[str, FileRecord]

    @property
    def held_out_bytes_per_token(self) -> float:
        """Return UTF-8 bytes of held-out text per held-out token; bits per byte = nats per token / ln 2 / this."""
        return self.held_out.text_bytes / self.held_out.tokens

    @property
    def sha256(self) -> str:
        """Return the digest of everything above, equal on all machines that hold the same data."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_file(path: Path) -> FileRecord:
    """Return the size and digest of a file."""
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_of_file(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its digest into the folder."""
    values = {**asdict(manifest), "manifest_sha256": manifest.sha256}
    (folder / MANIFEST_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a prepared folder.

    Raises:
        DataError: when there is none, when it is damaged, or when another version of this code wrote it.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        what = f"has no {MANIFEST_NAME}" if folder.is_dir() else "is no folder" if folder.exists() else "doesn't exist"
        raise DataError(f"{folder} {what}, so it holds no finished preparation")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version, digest = values["format_version"], values.pop("manifest_sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # Not its repr, which for a UnicodeDecodeError is the whole file.
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise DataError(f"{path} has format version {version}, this code reads version {FORMAT_VERSION}")
    try:
        manifest = _manifest_from_json(values)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}") from error
    if manifest.sha256 != digest:
        raise DataError(f"{path} is damaged or was edited: its contents don't match its own manifest_sha256")
    return manifest


def prepare_command(folder: Path, manifest: Manifest | None) -> str:
    """Return the command that writes the folder: the one that did, where a manifest tells, else its preset's or any."""
    if manifest is not None:
        command = manifest.command
    elif folder == Path(DEFAULT_ROOT):
        command = "python -m data.prepare"
    else:
        command = PRESET_COMMANDS.get(folder.as_posix(), "python -m data.prepare --text FILE ...")
    return command if folder == Path(DEFAULT_ROOT) else f"{command} --out {shlex.quote(str(folder))}"


def _manifest_from_json(values: dict[str, Any]) -> Manifest:
    splits = {
        split: SplitRecord(
            **{**values[split], "shards": tuple(ShardRecord(**shard) for shard in values[split]["shards"])}
        )
        for split in SPLITS
    }
    sources = tuple(SourceRecord(**source) for source in values["sources"])
    files = {name: FileRecord(**record) for name, record in values["files"].items()}
    return Manifest(**{**values, **splits, "sources": sources, "files": files})


@dataclass(frozen=True)
class Verification:
    """What a check of a folder against its manifest looked at."""

    files: int
    bytes: int
    checksums: bool

    def __str__(self) -> str:
        how = "sizes and checksums" if self.checksums else "sizes only (--verify reads every byte)"
        return f"{self.files} files, {self.bytes:,} bytes, {how} as in the manifest"


def verify_files(folder: Path, manifest: Manifest, *, all_checksums: bool = False) -> Verification:
    """Return what was compared, having found every listed file with its size and, up to a limit, its checksum.

    Checksums are compared when all files together are no larger than CHECKSUM_LIMIT_BYTES or ``all_checksums`` is true;
    those of the tokenizer always.

    Raises:
        DataError: naming the first file that is missing, has another size or other contents.
    """
    total_bytes = sum(record.bytes for record in manifest.files.values())
    checksums = all_checksums or total_bytes <= CHECKSUM_LIMIT_BYTES
    for name, record in manifest.files.items():
        path = folder / name
        in_tokenizer = name.startswith(TOKENIZER_FOLDER + "/")
        whose = "the tokenizer that the tokens were made with" if in_tokenizer else "the data that was written"
        if not path.is_file():
            raise DataError(f"{path} is missing; {MANIFEST_NAME} lists it with {record.bytes:,} bytes")
        if path.stat().st_size != record.bytes:
            raise DataError(f"{path} has {path.stat().st_size:,} bytes instead of {record.bytes:,}: it isn't {whose}")
        if (checksums or in_tokenizer) and (digest := sha256_of_file(path)) != record.sha256:
            raise DataError(f"{path} has sha256 {digest[:16]}… instead of {record.sha256[:16]}…: it isn't {whose}")
    return Verification(files=len(manifest.files), bytes=total_bytes, checksums=checksums)
