import fcntl
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from data import encode
from data.config import DataConfig
from data.loader import open_prepared
from data.manifest import read_manifest
from data.pipeline import prepare
from data.prepare import main, settings_from_arguments
from data.progress import Progress
from data.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[2]


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def error_of(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_two_processes_write_the_same_bytes(small_root, small_arguments, tmp_path):
    command = [sys.executable, "-m", "data.prepare", *small_arguments, "--out", str(tmp_path / "again")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run(command, check=True, cwd=REPOSITORY, env=environment, capture_output=True)
    assert contents(tmp_path / "again") == contents(small_root)
    assert not (tmp_path / "again.partial").exists()


def test_text_comes_back_from_the_shards_and_no_document_is_in_both_splits(small_root, texts):
    data = open_prepared(DataConfig(root=str(small_root)))
    tokenizer = load_tokenizer(data.tokenizer_folder)
    seen = []
    for split in (data.train.splits[0], data.held_out.splits[0]):
        for number, index in enumerate(split.document_indices.tolist()):
            ids = split.document(number).tolist()
            assert ids[-1] == data.manifest.eos_id
            assert data.manifest.eos_id not in ids[:-1]
            assert tokenizer.decode(ids[:-1], skip_special_tokens=False) == texts[index]
            seen.append(index)
    assert sorted(seen) == list(range(len(texts)))
    assert data.manifest.held_out.documents == len(texts) // 10


def test_manifest_counts_what_is_there(small_root, texts):
    manifest = read_manifest(small_root)
    assert manifest.train.documents + manifest.held_out.documents == len(texts)
    assert manifest.train.text_bytes + manifest.held_out.text_bytes == sum(len(text.encode()) for text in texts)
    held_out = np.concatenate(
        [np.fromfile(small_root / s.file, manifest.token_dtype) for s in manifest.held_out.shards]
    )
    assert held_out.size == manifest.held_out.tokens
    assert manifest.held_out_bytes_per_token == manifest.held_out.text_bytes / held_out.size
    frequency_V = np.bincount(held_out) / held_out.size
    frequency_V = frequency_V[frequency_V > 0]
    assert manifest.unigram_entropy_held_out == pytest.approx(-(frequency_V * np.log(frequency_V)).sum(), rel=1e-12)
    assert manifest.unigram_ce_train_fit > manifest.unigram_entropy_held_out > 1.0


def test_the_tokenizer_learns_from_the_training_split_alone(tmp_path, write_jsonl):
    texts = [f"common words number {number}" for number in range(20)]
    arguments = ["--vocab-size", "400", "--held-out-fraction", "0.1", "--text"]
    options = [*arguments, str(write_jsonl(tmp_path / "a.jsonl", texts)), "--out", str(tmp_path / "a")]
    assert main(options) == 0
    held_out = open_prepared(DataConfig(root=str(tmp_path / "a"), sequence_length=4)).held_out.splits[0]
    for index in held_out.document_indices.tolist():
        texts[index] = "zyzzyva " * 50
    options = [*arguments, str(write_jsonl(tmp_path / "b.jsonl", texts)), "--out", str(tmp_path / "b")]
    assert main(options) == 0
    assert contents(tmp_path / "a" / "tokenizer") == contents(tmp_path / "b" / "tokenizer")


class Stopped(Progress):
    """Stops the work after some blocks, as a kill would: nothing is cleaned up behind it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.left = blocks

    def add(self, **counts: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        super().add(**counts)


def test_a_preparation_stopped_twice_goes_on_and_ends_with_the_same_bytes(
    small_root, small_arguments, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "stopped"
    settings = settings_from_arguments([*small_arguments, "--out", str(out)])
    for block_documents, blocks in ((7, 4), (5, 3)):
        monkeypatch.setattr(encode, "BLOCK_DOCUMENTS", block_documents)
        with pytest.raises(KeyboardInterrupt):
            prepare(settings, Stopped(blocks), journal_interval_s=0.0)
        assert not out.exists()
    partial = tmp_path / "stopped.partial"
    done = json.loads((partial / "journal.json").read_text())
    assert 0 < done["documents_read"][0] < 80
    with (partial / "folder" / "train" / "tokens_00000.bin").open("ab") as file:
        file.write(b"written after the journal")
    assert main([*small_arguments, "--out", str(out)]) == 0
    assert "going on after" in capsys.readouterr().err
    assert contents(out) == contents(small_root)
    assert not partial.exists()


def test_ctrl_c_ends_with_a_message_and_no_folder(small_arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.prepare.Progress", lambda: Stopped(0))
    assert main([*small_arguments, "--out", str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_partial_folder_of_other_settings_is_begun_anew(small_root, small_arguments, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(encode, "BLOCK_DOCUMENTS", 7)
    other = settings_from_arguments([*small_arguments, "--seed", "5", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        prepare(other, Stopped(3), journal_interval_s=0.0)
    assert main([*small_arguments, "--out", str(out)]) == 0
    assert contents(out) == contents(small_root)


def test_a_finished_folder_is_left_as_it_is(small_copy, small_arguments, capsys):
    before = {path: path.stat().st_mtime_ns for path in small_copy.rglob("*")}
    assert main([*small_arguments, "--out", str(small_copy)]) == 0
    assert "already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in small_copy.rglob("*")} == before


def test_a_damaged_folder_of_the_same_settings_is_mended(small_copy, small_root, small_arguments, capsys):
    (small_copy / "train" / "tokens_00000.bin").write_bytes(b"short")
    assert main([*small_arguments, "--out", str(small_copy)]) == 0
    assert "Preparing" in capsys.readouterr().err
    assert contents(small_copy) == contents(small_root)


def test_a_folder_of_other_settings_is_refused(small_copy, small_arguments, capsys):
    error = error_of(capsys, *small_arguments, "--seed", "4", "--out", small_copy)
    assert "other settings (seed 0 there, 4 now)" in error


def test_a_folder_of_other_text_is_refused(small_copy, small_text, tmp_path, capsys):
    changed = tmp_path / small_text.name
    changed.write_bytes(small_text.read_bytes() + b'{"text": "one more"}\n')
    arguments = ["--text", changed, "--vocab-size", "300", "--held-out-fraction", "0.1", "--shard-tokens", "30000"]
    assert "other settings (other text)" in error_of(capsys, *arguments, "--out", small_copy)


def test_a_folder_with_foreign_files_is_refused(tmp_path, small_arguments, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "holds files but no manifest.json" in error_of(capsys, *small_arguments, "--out", tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_damaged_manifest_is_not_overwritten(small_copy, small_arguments, capsys):
    (small_copy / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in error_of(capsys, *small_arguments, "--out", small_copy)


def test_a_second_preparation_of_the_same_folder_is_refused(tmp_path, small_arguments, capsys):
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another data.prepare is at work" in error_of(capsys, *small_arguments, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere.jsonl", "--out", "o"], "--text nowhere.jsonl: there is no such file"),
        (["--text", "empty.jsonl", "--out", "o"], "the file is empty"),
        (["--text", "notes.docx", "--out", "o"], "must end in one of"),
        (["--text", "good.jsonl"], "--out is needed"),
        (
            ["--text", "good.jsonl", "--text-field", "body", "--out", "o"],
            "has no field 'body' but text; name the right one",
        ),
        (["--text", "null.jsonl", "--out", "o"], "document 1 has None in the field 'text'"),
        (["--text", "number.jsonl", "--out", "o"], "document 0 has 3 in the field 'text'"),
        (["--text", "blank.jsonl", "--out", "o"], "document 1 is empty; --skip-empty"),
        (["--text", "cut.jsonl", "--out", "o"], "cut.jsonl can't be read"),
        (["--text", "fake.jsonl.gz", "--out", "o"], "fake.jsonl.gz can't be read"),
        (["--text", "torn.jsonl.gz", "--out", "o"], "torn.jsonl.gz can't be read"),
        (["--text", "void.jsonl.gz", "--out", "o"], "void.jsonl.gz holds no documents"),
        (["--text", "latin.txt", "--out", "o"], "latin.txt can't be read"),
        (["--text", "good.jsonl", "--out", "good.jsonl"], "--out good.jsonl is a file"),
        (
            ["--text", "one.jsonl", "--out", "o"],
            "has 1 document, empty ones not counted, but one is held out: at least 2",
        ),
        (["--text", "one.jsonl", "--held-out-fraction", "0.3", "--out", "o"], "and 4 for one to be no more than"),
        (["--text", "book.txt", "--out", "o"], "A .txt file is one document: write its parts to a .jsonl"),
        (["--text", "good.jsonl", "--dataset", "c4", "--out", "o"], "exclude each other"),
        (["--held-out-fraction", "0"], "--held-out-fraction 0.0 must be above 0"),
        (["--held-out-fraction", "0.9"], "at most 0.5"),
        (["--seed", "-1"], "--seed -1"),
        (["--vocab-size", "256"], "--vocab-size 256 must be at least 257"),
        (["--shard-tokens", "0"], "--shard-tokens 0"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: there is no nowhere/tokenizer.json"),
        (["--tokenizer", "nowhere", "--vocab-size", "300"], "--vocab-size is for a tokenizer to be trained"),
        (["--eos-token", "</s>"], "--eos-token is for a tokenizer given"),
    ],
)
def test_what_cannot_be_prepared_is_told_and_nothing_is_left(wrong_files, capsys, arguments, message):
    assert message in error_of(capsys, *arguments)
    assert set(Path.cwd().iterdir()) == wrong_files


@pytest.fixture
def wrong_files(tmp_path, monkeypatch, write_jsonl):
    """Enters a folder of files that can't be prepared, and gives their names."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("good.jsonl"), [f"text {number}" for number in range(40)])
    write_jsonl(Path("null.jsonl"), ["text", None])
    write_jsonl(Path("number.jsonl"), [3, 4])
    write_jsonl(Path("blank.jsonl"), ["text", " \n", "text"])
    write_jsonl(Path("one.jsonl"), ["text"])
    Path("book.txt").write_text("Chapter one.\n\nChapter two.\n")
    Path("empty.jsonl").touch()
    Path("notes.docx").write_text("text")
    Path("cut.jsonl").write_text('{"text": "whole"}\n{"text": "cu')
    Path("fake.jsonl.gz").write_text('{"text": "not compressed"}\n')
    Path("torn.jsonl.gz").write_bytes(gzip.compress(b'{"text": "whole"}\n' * 50)[:40])
    Path("void.jsonl.gz").write_bytes(gzip.compress(b""))
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    return set(tmp_path.iterdir())


def test_empty_documents_are_left_out_and_counted_on_request(tmp_path, write_jsonl, capsys):
    path = write_jsonl(tmp_path / "some.jsonl", ["", *(f"text {number}" for number in range(30)), "  \n"])
    assert main(["--text", str(path), "--skip-empty", "--out", str(tmp_path / "out")]) == 0
    assert "2 empty documents left out" in capsys.readouterr().out
    manifest = read_manifest(tmp_path / "out")
    assert manifest.documents_skipped_empty == 2
    assert manifest.train.documents + manifest.held_out.documents == 30
    assert manifest.sources[0].documents == 32


@pytest.mark.parametrize("documents", [2, 3])
def test_a_text_of_few_documents_holds_one_out_and_says_so(tmp_path, write_jsonl, capsys, documents):
    path = write_jsonl(tmp_path / "few.jsonl", ["", *(f"text number {number}" for number in range(documents))])
    options = ["--vocab-size", "300", "--held-out-fraction", "0.0005", "--skip-empty"]
    assert main(["--text", str(path), *options, "--out", str(tmp_path / "out")]) == 0
    assert "too few documents for --held-out-fraction 0.0005: one of them is held out" in capsys.readouterr().err
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.train.documents, manifest.held_out.documents) == (documents - 1, 1)


def test_too_few_documents_are_told_before_a_tokenizer_is_trained(wrong_files, capsys):
    error = error_of(capsys, "--text", "one.jsonl", "--out", "o")
    assert "training a byte-level BPE tokenizer" not in error
    assert "1 document" in error


def test_a_missing_datasets_library_is_told_before_anything_is_written(wrong_files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    error = error_of(capsys, "--text", "good.jsonl", "--out", "o")
    assert "pip install 'datasets>=4.0,<6'" in error
    assert error.count("\n") == 1
    assert set(Path.cwd().iterdir()) == wrong_files


def test_a_finished_folder_needs_no_datasets_library(small_root, small_arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main([*small_arguments, "--out", str(small_root)]) == 0


def test_every_kind_of_file_is_read_in_the_order_given(tmp_path, small_root):
    (tmp_path / "a.json").write_text(json.dumps([{"body": f"array {number}"} for number in range(10)]))
    (tmp_path / "b.txt").write_text("one whole\n\nfile of text\n")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": f"line {number}", "year": number}) + "\n" for number in range(10))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["row 0", "row 1"]}), tmp_path / "d.parquet")
    files = [str(tmp_path / name) for name in ("a.json", "c.jsonl.gz", "d.parquet")]
    tokenizer = str(small_root / "tokenizer")
    options = ["--text", *files, "--text-field", "body", "--tokenizer", tokenizer, "--held-out-fraction", "0.2"]
    assert main([*options, "--out", str(tmp_path / "out")]) == 0
    data = open_prepared(DataConfig(root=str(tmp_path / "out"), sequence_length=4))
    decoded = {}
    for split in (data.train.splits[0], data.held_out.splits[0]):
        for number, index in enumerate(split.document_indices.tolist()):
            decoded[index] = load_tokenizer(small_root / "tokenizer").decode(split.document(number).tolist())
    expected = [*(f"array {n}" for n in range(10)), *(f"line {n}" for n in range(10)), "row 0", "row 1"]
    assert [decoded[index] for index in range(22)] == expected
    assert [source.documents for source in data.manifest.sources] == [10, 10, 2]
    assert main(["--text", *[str(tmp_path / "b.txt")] * 20, "--out", str(tmp_path / "txt")]) == 0
    assert read_manifest(tmp_path / "txt").sources[0].documents == 1


@pytest.mark.parametrize("how", [[], ["--download"]])
def test_a_dataset_is_read_by_name(tmp_path, small_root, small_text, monkeypatch, how):
    # A folder laid out like a dataset of the hub takes the same way through the library as a name does.
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    (dataset / "train.jsonl").write_bytes(small_text.read_bytes())
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options = ["--vocab-size", "300", "--held-out-fraction", "0.1", "--shard-tokens", "30000"]
    assert main(["--dataset", str(dataset), *how, *options, "--out", str(tmp_path / "out")]) == 0
    there, here = contents(small_root), contents(tmp_path / "out")
    assert {name: there[name] for name in there if name != "manifest.json"} == {
        name: here[name] for name in here if name != "manifest.json"
    }


def test_the_manifest_keeps_the_command_without_the_folder():
    arguments = ["--text", "data/text/README.md.txt", "--seed", "3", "--out", "there"]
    with pytest.raises(ValueError, match="no such file"):
        settings_from_arguments(arguments)
    assert settings_from_arguments(["--seed", "3", "--out", "there"]).command == "python -m data.prepare --seed 3"
    assert settings_from_arguments(["--out=there"]).command == "python -m data.prepare"
