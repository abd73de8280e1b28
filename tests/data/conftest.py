"""Small prepared folders, made once: excerpts of the bundled text, cut into several shards and quick to read."""

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data.prepare import BUNDLED_TEXT, main

SMALL_OPTIONS = ("--vocab-size", "300", "--held-out-fraction", "0.1", "--shard-tokens", "30000")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """80 documents of different lengths, one of which quotes the end-of-text token."""
    with gzip.open(BUNDLED_TEXT, "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    excerpts = [text[: 500 + 37 * number] for number, text in enumerate(documents[:80])]
    excerpts[3] = "Naïve café, 😀\n\n  two  spaces <|endoftext|> and on.\t"
    return excerpts


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, Sequence[object]], Path]:
    def write(path: Path, documents: Sequence[object]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def small_text(tmp_path_factory, texts, write_jsonl) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "small.jsonl", texts)


@pytest.fixture(scope="session")
def small_arguments(small_text) -> list[str]:
    return ["--text", str(small_text), *SMALL_OPTIONS]


@pytest.fixture(scope="session")
def small_root(tmp_path_factory, small_arguments) -> Path:
    """A prepared folder that no test changes."""
    root = tmp_path_factory.mktemp("prepared") / "small"
    assert main([*small_arguments, "--out", str(root)]) == 0
    return root


@pytest.fixture
def small_copy(small_root, tmp_path) -> Path:
    """A prepared folder to damage."""
    return Path(shutil.copytree(small_root, tmp_path / "copy"))


@pytest.fixture(scope="session")
def other_root(tmp_path_factory, texts, write_jsonl, small_root) -> Path:
    """Another source, prepared with the tokenizer of the small one, beside a copy of it in one folder for mixtures."""
    parent = tmp_path_factory.mktemp("mixture")
    path = write_jsonl(parent / "other.jsonl", [text[::-1] for text in texts[:40]])
    shutil.copytree(small_root, parent / "small")
    tokenizer = str(small_root / "tokenizer")
    assert main(["--text", str(path), "--tokenizer", tokenizer, "--out", str(parent / "other")]) == 0
    return parent
