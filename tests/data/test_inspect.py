import pytest

from data.config import DataConfig
from data.inspect import main
from data.loader import open_prepared
from data.tokenizer import load_tokenizer


def test_counts_and_first_documents_are_printed(small_root, texts, capsys):
    assert main([str(small_root), "--verify"]) == 0
    output = capsys.readouterr().out
    assert "72 documents" in output
    assert "8 documents" in output
    assert "80 documents" in output
    assert "sizes and checksums as in the manifest" in output
    assert texts[0][:20] in output


def test_the_documents_that_feed_a_step_are_named(small_root, texts, capsys):
    assert main([str(small_root), "--sequence-length", "64", "--step", "3", "--sequences-per-step", "4"]) == 0
    output = capsys.readouterr().out
    assert "step 3 reads samples 8 to 11" in output
    data = open_prepared(DataConfig(root=str(small_root), sequence_length=64))
    split, tokenizer = data.train.splits[0], load_tokenizer(data.tokenizer_folder)
    for sample in range(8, 12):
        row = int(data.train.locate(sample, 1).row_N[0])
        assert f"sample {sample}: {small_root.name}, epoch 0, row {row}," in output
        text = tokenizer.decode(data.train.batch(sample, 1).input_ids_BS[0, 8:24].tolist())
        text = text.split("<|endoftext|>")[0].strip("�")
        indices = [index for index, whole in enumerate(texts) if text in whole]
        assert any(f"document {index} of small.jsonl" in output for index in indices)
    assert all(index in split.document_indices for index in indices)


def test_a_sample_is_printed_as_text(small_root, capsys):
    assert main([str(small_root), "--sample", "5"]) == 0
    data = open_prepared(DataConfig(root=str(small_root)))
    text = load_tokenizer(data.tokenizer_folder).decode(
        data.train.batch(5, 1).input_ids_BS[0].tolist(), skip_special_tokens=False
    )
    assert text in capsys.readouterr().out


def test_a_mixture_is_shown(other_root, capsys):
    arguments = [str(other_root), "--mixture", "small=0.7", "other=0.3", "--step", "1", "--sequences-per-step", "8"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "of other.jsonl" in output
    assert "of small.jsonl" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "1"], "--step and --sequences-per-step belong together"),
        (["--step", "0", "--sequences-per-step", "4"], "--step 0 must be at least 1"),
        (["--sample", "-1"], "--sample -1"),
        (["--mixture", "books"], "NAME=WEIGHT is needed"),
        (["--sequence-length", "99999"], "data.sequence_length=99999"),
    ],
)
def test_impossible_questions_are_refused(small_root, capsys, arguments, message):
    assert main([str(small_root), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_names_the_command(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert "python -m data.prepare" in capsys.readouterr().err
