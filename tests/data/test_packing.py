import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import count_rows, document_numbers, documents_of_span, row_span


@pytest.mark.parametrize(("num_tokens", "rows"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_row_needs_one_token_more_than_its_length(num_tokens, rows):
    assert count_rows(num_tokens, 8) == rows


@given(st.integers(0, 400), st.integers(1, 50))
def test_every_token_but_the_first_is_predicted_once_apart_from_a_tail_shorter_than_a_row(num_tokens, S):
    predicted = []
    for row in range(count_rows(num_tokens, S)):
        start, count = row_span(row, S)
        predicted += range(start + 1, start + count)
    assert predicted == list(range(1, 1 + len(predicted)))
    assert 0 <= max(0, num_tokens - 1) - len(predicted) < S


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 12), st.data())
@settings(max_examples=200)
def test_document_numbers_agree_with_labelling_every_token(lengths, S, data):
    document_N = np.repeat(np.arange(len(lengths)), lengths)
    if document_N.size < S:
        return
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    start = data.draw(st.integers(0, document_N.size - S))
    expected_S = document_N[start : start + S]
    assert np.array_equal(document_numbers(start, S, offsets), expected_S - expected_S[0])
    assert list(documents_of_span(start, S, offsets)) == sorted(set(expected_S.tolist()))
