import numpy as np
import pytest

from data.config import DataConfig
from data.loader import open_prepared
from data.shards import TokenStream, token_dtype


@pytest.fixture
def stream(tmp_path):
    sizes = [7, 1, 12, 5]
    starts = np.cumsum([0, *sizes])
    for number, size in enumerate(sizes):
        np.arange(starts[number], starts[number] + size, dtype="<u4").tofile(tmp_path / str(number))
    return TokenStream([(tmp_path / str(number), size) for number, size in enumerate(sizes)], "<u4")


def test_any_stretch_is_read_over_the_borders_of_files(stream):
    assert stream.num_tokens == 25
    for start in range(25):
        for count in range(26 - start):
            assert np.array_equal(stream.read(start, count), np.arange(start, start + count))


@pytest.mark.parametrize(("start", "count"), [(-1, 3), (0, 26), (24, 2), (3, -1)])
def test_tokens_that_do_not_exist_are_refused(stream, start, count):
    with pytest.raises(IndexError, match="25 tokens"):
        stream.read(start, count)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (2**16, "<u2"), (2**16 + 1, "<u4")])
def test_tokens_take_two_bytes_when_every_id_fits(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype


def test_small_data_is_spread_over_several_shards(small_root):
    data = open_prepared(DataConfig(root=str(small_root)))
    assert len(data.manifest.train.shards) > 2
    assert sum(shard.tokens for shard in data.manifest.train.shards) == data.manifest.train.tokens
