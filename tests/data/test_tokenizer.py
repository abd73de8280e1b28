import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.errors import DataError
from data.manifest import read_manifest
from data.tokenizer import copy_tokenizer, fingerprint, load_tokenizer, train_tokenizer

TEXTS = ["plain", "Ünïcödé 😀 \u200b", "  two  spaces \n\ttab\r\n", "<|endoftext|> quoted <|endoftext|>", "\x00\x7f"]


@pytest.fixture(scope="module")
def folder(small_root):
    return small_root / "tokenizer"


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_its_tokens(folder, text):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert fingerprint(folder).eos_id not in ids


def test_fingerprint_is_the_one_in_the_manifest(folder, small_root):
    manifest, found = read_manifest(small_root), fingerprint(folder)
    assert (found.sha256, found.vocab_size, found.eos_id) == (
        manifest.tokenizer_sha256,
        manifest.vocab_size,
        manifest.eos_id,
    )
    assert manifest.vocab_size == 300


@pytest.mark.parametrize("loader", [AutoTokenizer, PreTrainedTokenizerFast])
def test_transformers_loads_the_folder_with_the_same_tokens_and_no_token_at_the_start(folder, loader, texts):
    theirs, ours = loader.from_pretrained(folder), load_tokenizer(folder)
    assert theirs(texts[0])["input_ids"] == ours.encode(texts[0], add_special_tokens=False).ids
    assert theirs.decode(theirs(TEXTS[2])["input_ids"]) == TEXTS[2]
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token) == ("<|endoftext|>", 0, None)
    assert len(theirs) == 300


def test_the_folder_names_the_class_that_old_and_new_transformers_know(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_vocabulary_is_as_large_as_the_text_allows(tmp_path):
    train_tokenizer(["ab ab ab"], 5000, tmp_path / "t")
    assert 257 <= fingerprint(tmp_path / "t").vocab_size < 270


def test_a_given_tokenizer_keeps_its_file_and_gets_a_config(folder, tmp_path):
    copy_tokenizer(folder / "tokenizer.json", tmp_path / "alone", None)
    assert fingerprint(tmp_path / "alone") == fingerprint(folder)


def test_the_end_of_text_token_can_be_named(folder, tmp_path):
    copy_tokenizer(folder, tmp_path / "t", "a")
    assert fingerprint(tmp_path / "t").eos_id == load_tokenizer(folder).token_to_id("a")


def test_a_config_may_hold_the_end_of_text_token_as_an_object(folder, tmp_path):
    given = tmp_path / "given"
    copy_tokenizer(folder, given, None)
    (given / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "b", "lstrip": False}}))
    copy_tokenizer(given, tmp_path / "t", None)
    assert fingerprint(tmp_path / "t").eos_id == load_tokenizer(folder).token_to_id("b")


def test_an_unknown_end_of_text_token_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"no token '</s>'; name the one with --eos-token"):
        copy_tokenizer(folder, tmp_path / "t", "</s>")


@pytest.mark.parametrize("contents", ["", "[]", "{}", '{"model": {}}', '{"model": {"type": 3}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
