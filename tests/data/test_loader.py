import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch
from data.config import DataConfig
from data.loader import RowSource, open_prepared
from data.packing import count_rows

S = 64


@pytest.fixture(scope="module")
def data(small_root):
    return open_prepared(DataConfig(root=str(small_root), sequence_length=S, order_seed=3))


@pytest.fixture(scope="module")
def mixed(other_root):
    mixture = {"small": 0.7, "other": 0.3}
    return open_prepared(DataConfig(root=str(other_root), sequence_length=S, mixture=mixture))


def stream_of(root, manifest, split="train"):
    shards = getattr(manifest, split).shards
    return np.concatenate([np.fromfile(root / shard.file, manifest.token_dtype) for shard in shards]).astype(np.int64)


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def assert_equal(first: Batch, second: Batch) -> None:
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


def test_labels_are_the_next_tokens(data, small_root):
    stream = stream_of(small_root, data.manifest)
    rows = data.train.locate(5, 20).row_N
    batch = data.train.batch(5, 20)
    for place, row in enumerate(rows.tolist()):
        assert np.array_equal(batch.input_ids_BS[place], stream[row * S : row * S + S])
        assert np.array_equal(batch.labels_BS[place], stream[row * S + 1 : row * S + S + 1])
    assert torch.equal(batch.input_ids_BS[:, 1:], batch.labels_BS[:, :-1])
    assert batch.input_ids_BS.dtype == batch.labels_BS.dtype == torch.int64
    assert batch.input_ids_BS.is_contiguous()
    assert batch.labels_BS.is_contiguous()


def test_one_epoch_predicts_every_token_but_the_first_and_the_stated_tail(data, small_root):
    stream = stream_of(small_root, data.manifest)
    assert data.train.num_rows == count_rows(stream.size, S) == (stream.size - 1) // S
    batch, row_N = data.train.batch(0, data.train.num_rows), data.train.locate(0, data.train.num_rows).row_N
    labels = batch.labels_BS[np.argsort(row_N)].flatten()
    assert np.array_equal(labels, stream[1 : 1 + data.train.num_rows * S])
    assert stream.size - 1 - labels.numel() < S


def test_documents_rise_where_the_token_before_ended_one(data):
    batch = data.train.batch(0, data.train.num_rows)
    ended_BS = batch.input_ids_BS[:, :-1] == data.manifest.eos_id
    assert torch.equal(batch.document_BS.diff(dim=1), ended_BS.int())
    assert batch.document_BS[:, 0].eq(0).all()
    assert ended_BS.any()


@given(st.integers(0, 900), st.lists(st.integers(1, 30), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
@pytest.mark.parametrize("name", ["data", "mixed"])
def test_rows_do_not_depend_on_how_they_are_cut_into_batches(name, request, first, sizes):
    train = request.getfixturevalue(name).train
    whole = train.batch(first, sum(sizes))
    ends = np.cumsum([first, *sizes]).tolist()
    assert_equal(whole, joined([train.batch(start, size) for start, size in zip(ends[:-1], sizes, strict=True)]))


@pytest.mark.parametrize("name", ["data", "mixed"])
def test_resuming_in_and_at_the_end_of_an_epoch_gives_the_uninterrupted_samples(name, request):
    prepared = request.getfixturevalue(name)
    train = prepared.train
    uninterrupted = joined([train.batch(8 * step, 8) for step in range(2 * train.num_rows // 8 + 3)])
    config = DataConfig(
        root=str(prepared.sources[0].folder if name == "data" else prepared.sources[0].folder.parent),
        sequence_length=S,
        order_seed=3 if name == "data" else 0,
        mixture={} if name == "data" else {"small": 0.7, "other": 0.3},
    )
    for consumed in (13, train.num_rows - 1, train.num_rows, train.num_rows + 1, 2 * train.num_rows):
        resumed = open_prepared(config).train.batch(consumed, 8)
        assert_equal(resumed, Batch(*(tensor[consumed : consumed + 8] for tensor in uninterrupted)))


def test_every_world_size_reads_the_same_global_batch(data):
    whole = data.train.batch(48, 16)
    for world_size in (1, 2, 4):
        share = 16 // world_size
        ranks = [data.train.batch(48 + rank * share, share) for rank in range(world_size)]
        assert_equal(whole, joined(ranks))


def test_another_process_reads_the_same_rows(data, small_root):
    code = (
        "import sys; from data.config import DataConfig; from data.loader import open_prepared; "
        f"data = open_prepared(DataConfig(root={str(small_root)!r}, sequence_length={S}, order_seed=3)); "
        "sys.stdout.write(repr(data.train.batch(700, 4).input_ids_BS.tolist()))"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output == repr(data.train.batch(700, 4).input_ids_BS.tolist())


def test_held_out_rows_keep_the_order_of_the_text(data, small_root):
    stream = stream_of(small_root, data.manifest, "held_out")
    batch = data.held_out.batch(0, data.held_out.num_rows)
    assert np.array_equal(batch.input_ids_BS.flatten(), stream[: data.held_out.num_rows * S])
    assert_equal(data.held_out.batch(data.held_out.num_rows, 2), data.held_out.batch(0, 2))


@pytest.mark.parametrize(
    ("first", "number", "error"),
    [
        (-1, 2, ValueError),
        (0, 0, ValueError),
        (0, -3, ValueError),
        (2**62, 1, ValueError),
        (0, 2**30, ValueError),
        (1.0, 2, TypeError),
        (0, True, TypeError),
    ],
)
def test_impossible_requests_are_refused(data, first, number, error):
    with pytest.raises(error, match=r"first_sample|num_sequences"):
        data.train.batch(first, number)


def test_a_sample_far_out_is_as_quick_and_as_right_as_the_first(data):
    far = 10**15
    row = int(data.train.locate(far, 1).row_N[0])
    place = data.train.locate(0, data.train.num_rows).row_N.tolist().index(row)
    assert_equal(data.train.batch(far, 1), data.train.batch(place, 1))


def test_rows_longer_than_a_split_are_refused(small_root):
    with pytest.raises(ValueError, match=r"data\.sequence_length=50000 needs 50001 tokens, the held_out split"):
        open_prepared(DataConfig(root=str(small_root), sequence_length=50_000))


def test_missing_data_names_the_knob_and_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"data\.root=prepared/state_of_the_union: .*run: python -m data\.prepare$"):
        open_prepared(DataConfig(root="prepared/state_of_the_union"))
    with pytest.raises(ValueError, match=r"run: python -m data\.prepare --text FILE \.\.\. --out mine$"):
        open_prepared(DataConfig(root="mine"))


def test_a_folder_of_other_things_is_not_advised_away(tmp_path, small_copy):
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(ValueError, match=f"such as {small_copy.as_posix()}$") as error:
        open_prepared(DataConfig(root=str(tmp_path)))
    assert "remove" not in str(error.value)
    with pytest.raises(ValueError, match=r"name a folder that data\.prepare wrote$"):
        open_prepared(DataConfig(root=str(small_copy / "tokenizer")))
    with pytest.raises(ValueError, match=r"notes\.txt is no folder, .*Name a folder that data\.prepare wrote$"):
        open_prepared(DataConfig(root=str(tmp_path / "notes.txt")))


def damage_truncated(root):
    path = root / "train" / "tokens_00001.bin"
    os.truncate(path, path.stat().st_size // 2)


def damage_flipped(root):
    path = root / "held_out" / "tokens_00000.bin"
    contents = bytearray(path.read_bytes())
    contents[100] ^= 4
    path.write_bytes(bytes(contents))


def damage_missing(root):
    (root / "train" / "document_offsets.bin").unlink()


def damage_tokenizer(root):
    path = root / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace("Ġ", "Ģ", 1))


def damage_manifest(root):
    (root / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncated, "tokens_00001.bin has"),
        (damage_flipped, "tokens_00000.bin has sha256"),
        (damage_missing, "document_offsets.bin is missing"),
        (damage_tokenizer, "isn't the tokenizer that the tokens were made with"),
        (damage_manifest, "has no manifest.json"),
    ],
)
def test_damage_is_found_with_the_knob_and_the_command_that_mends_it(small_copy, damage, message):
    damage(small_copy)
    with pytest.raises(ValueError, match=r"data\.root=") as error:
        open_prepared(DataConfig(root=str(small_copy)))
    assert message in str(error.value)
    assert str(error.value).endswith(f"--out {small_copy}")


def test_the_order_seed_changes_the_order_and_nothing_else(small_root):
    first, second = (
        open_prepared(DataConfig(root=str(small_root), sequence_length=S, order_seed=seed)).train for seed in (0, 1)
    )
    rows = [train.locate(0, train.num_rows).row_N for train in (first, second)]
    assert not np.array_equal(*rows)
    assert np.array_equal(np.sort(rows[0]), np.sort(rows[1]))


def test_a_mixture_keeps_its_weights_and_walks_each_source(mixed):
    located = mixed.train.locate(0, 1000)
    counts_NM = (located.source_N[:, None] == np.arange(2)).cumsum(axis=0)
    owed_NM = np.arange(1, 1001)[:, None] * np.array([0.7, 0.3])
    assert np.abs(counts_NM - owed_NM).max() <= 0.5 + 1e-9
    for source in range(2):
        rows = count_rows(mixed.sources[source].manifest.train.tokens, S)
        first_epoch = located.row_N[(located.source_N == source) & (located.epoch_N == 0)]
        assert np.unique(first_epoch).size == first_epoch.size
        assert (located.epoch_N[located.source_N == source].max() >= 1) == (counts_NM[-1, source] > rows)


def test_a_mixture_of_one_source_is_that_source(small_root, data):
    config = DataConfig(root=str(small_root.parent), sequence_length=S, order_seed=3, mixture={small_root.name: 2.0})
    assert_equal(open_prepared(config).train.batch(100, 8), data.train.batch(100, 8))


def test_held_out_rows_of_a_mixture_are_those_of_its_sources(mixed):
    parts = [rows.batch(0, rows.num_rows) for rows in mixed.held_out_by_source.values()]
    assert list(mixed.held_out_by_source) == ["small", "other"]
    assert_equal(mixed.held_out.batch(0, mixed.held_out.num_rows), joined(parts))
    tokens = [source.manifest.held_out.tokens for source in mixed.sources]
    losses = [source.manifest.unigram_ce_train_fit for source in mixed.sources]
    assert mixed.unigram_ce_train_fit == pytest.approx(np.average(losses, weights=tokens), rel=1e-12)
    assert min(losses) < mixed.unigram_ce_train_fit < max(losses)


def test_sources_of_different_tokenizers_are_not_mixed(other_root, small_text, tmp_path):
    from data.prepare import main

    shutil.copytree(other_root / "small", tmp_path / "small")
    assert main(["--text", str(small_text), "--vocab-size", "280", "--out", str(tmp_path / "third")]) == 0
    config = DataConfig(root=str(tmp_path), sequence_length=S, mixture={"small": 0.5, "third": 0.5})
    with pytest.raises(ValueError, match=r"different tokenizers.*--tokenizer .*small/tokenizer"):
        open_prepared(config)


def test_a_missing_source_of_a_mixture_is_named(other_root):
    with pytest.raises(ValueError, match=r"data\.mixture\.books in data\.root="):
        open_prepared(DataConfig(root=str(other_root), mixture={"small": 0.5, "books": 0.5}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sequence_length": 0}, "data.sequence_length=0"),
        ({"order_seed": -1}, "data.order_seed=-1"),
        ({"root": ""}, "data.root is empty"),
        ({"mixture": {"books": 0.0}}, "data.mixture.books=0.0"),
        ({"mixture": {"books": float("inf")}}, "data.mixture.books=inf"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"root": "somewhere", **values})


def test_row_source_is_what_open_prepared_gives(data):
    assert isinstance(data.train, RowSource)
    assert isinstance(data.held_out, RowSource)
    assert data.tokenizer_folder.name == "tokenizer"
