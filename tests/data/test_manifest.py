import json
import os
import re
import shlex
from pathlib import Path

import pytest

from data import manifest as manifest_module
from data.errors import DataError
from data.manifest import (
    DEFAULT_ROOT,
    PRESET_COMMANDS,
    prepare_command,
    read_manifest,
    sha256_of_file,
    verify_files,
    write_manifest,
)


def flip_byte(path, place=-1):
    contents = bytearray(path.read_bytes())
    contents[place] ^= 1
    path.write_bytes(bytes(contents))


def test_a_manifest_read_back_is_the_one_written(small_root, tmp_path):
    manifest = read_manifest(small_root)
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert (tmp_path / "manifest.json").read_bytes() == (small_root / "manifest.json").read_bytes()


def test_every_other_file_is_listed_with_its_size_and_digest(small_root):
    manifest = read_manifest(small_root)
    names = {path.relative_to(small_root).as_posix() for path in small_root.rglob("*") if path.is_file()}
    assert names - {"manifest.json"} == set(manifest.files)
    for name, record in manifest.files.items():
        assert record.bytes == (small_root / name).stat().st_size
        assert record.sha256 == sha256_of_file(small_root / name)
    assert manifest.tokenizer_sha256 == manifest.files["tokenizer/tokenizer.json"].sha256


def test_an_edited_manifest_is_found(small_copy):
    path = small_copy / "manifest.json"
    values = json.loads(path.read_text())
    values["eos_id"] += 1
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match="damaged or was edited"):
        read_manifest(small_copy)


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "manifest_sha256": ""}']
)
def test_a_file_that_is_no_manifest_is_found(tmp_path, contents):
    (tmp_path / "manifest.json").write_text(contents)
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)


def test_a_manifest_of_another_version_is_refused(small_copy):
    path = small_copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(DataError, match="format version 99, this code reads version 1"):
        read_manifest(small_copy)


@pytest.mark.parametrize(
    "name", ["train/tokens_00001.bin", "held_out/document_offsets.bin", "train/document_indices.bin"]
)
def test_a_flipped_bit_in_any_file_is_found(small_copy, name):
    flip_byte(small_copy / name)
    with pytest.raises(DataError, match=f"{name} has sha256"):
        verify_files(small_copy, read_manifest(small_copy))


def test_a_truncated_and_a_missing_file_are_found(small_copy):
    manifest = read_manifest(small_copy)
    shard = small_copy / "train" / "tokens_00000.bin"
    os.truncate(shard, shard.stat().st_size - 2)
    with pytest.raises(DataError, match=r"tokens_00000\.bin has .* bytes instead of"):
        verify_files(small_copy, manifest)
    shard.unlink()
    with pytest.raises(DataError, match=r"tokens_00000\.bin is missing"):
        verify_files(small_copy, manifest)


def test_large_data_is_checked_by_size_at_start_and_by_checksum_on_request(small_copy, monkeypatch):
    monkeypatch.setattr(manifest_module, "CHECKSUM_LIMIT_BYTES", 1000)
    manifest = read_manifest(small_copy)
    flip_byte(small_copy / "train" / "tokens_00000.bin")
    assert not verify_files(small_copy, manifest).checksums
    with pytest.raises(DataError, match="has sha256"):
        verify_files(small_copy, manifest, all_checksums=True)


def test_the_tokenizer_is_checked_by_checksum_however_large_the_data(small_copy, monkeypatch):
    monkeypatch.setattr(manifest_module, "CHECKSUM_LIMIT_BYTES", 1000)
    flip_byte(small_copy / "tokenizer" / "tokenizer.json", place=40)
    with pytest.raises(DataError, match="isn't the tokenizer that the tokens were made with"):
        verify_files(small_copy, read_manifest(small_copy))


def test_the_command_that_is_told_survives_a_shell(small_root):
    words = shlex.split(prepare_command(Path("my data/it's"), None))
    assert words[-2:] == ["--out", "my data/it's"]
    words = shlex.split(prepare_command(Path("my data"), read_manifest(small_root)))
    assert words[-2:] == ["--out", "my data"]
    assert prepare_command(Path(DEFAULT_ROOT), None) == "python -m data.prepare"


def test_every_preset_of_data_has_the_command_that_its_file_tells():
    presets = Path(__file__).parents[2] / "configs" / "data"
    roots = {}
    for path in presets.glob("*.yaml"):
        text = path.read_text()
        comment = re.sub(r"\\?\n#\s*", " ", text)
        roots[re.search(r"^root: (\S+)$", text, re.MULTILINE).group(1)] = " ".join(comment.split())
    assert set(PRESET_COMMANDS) == set(roots) - {DEFAULT_ROOT}
    for root, comment in roots.items():
        assert prepare_command(Path(root), None) in comment
