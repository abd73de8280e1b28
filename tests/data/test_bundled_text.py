"""The bundled text, prepared as a newcomer would: no options."""

import time

import numpy as np
import pytest

from data.config import DataConfig
from data.loader import open_prepared
from data.prepare import main


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start_s = time.process_time()
        assert main([]) == 0
        elapsed_s = time.process_time() - start_s
        yield open_prepared(DataConfig(root="prepared/state_of_the_union")), elapsed_s


def test_preparing_it_takes_less_than_thirty_seconds_of_one_core(bundled):
    assert bundled[1] < 30.0


def test_all_addresses_are_there_and_one_in_twenty_is_held_out(bundled):
    manifest = bundled[0].manifest
    assert manifest.train.documents + manifest.held_out.documents == 233
    assert manifest.held_out.documents in (11, 12)
    assert manifest.vocab_size == 4096
    assert 2_300_000 < manifest.train.tokens < 2_400_000


def test_held_out_addresses_are_spread_over_the_years(bundled):
    indices = np.array(bundled[0].held_out.splits[0].document_indices)
    assert np.array_equal(indices // 20, np.arange(indices.size))


def test_token_frequencies_alone_reach_the_stated_loss(bundled):
    data = bundled[0]
    assert data.unigram_ce_train_fit == data.manifest.unigram_ce_train_fit
    assert 6.5 < data.manifest.unigram_entropy_held_out < data.manifest.unigram_ce_train_fit < 6.7
    assert 4.2 < data.held_out_bytes_per_token < 4.5
