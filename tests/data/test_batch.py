import torch

from data.batch import Batch


def test_positions_start_anew_at_every_document():
    document_BS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    batch = Batch(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64), document_BS)
    assert batch.positions().tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert batch.positions().dtype == torch.int64


def test_moving_a_batch_keeps_its_values():
    batch = Batch(torch.ones(2, 3), torch.full((2, 3), 2), torch.full((2, 3), 3))
    for before, after in zip(batch, batch.to("cpu"), strict=True):
        assert torch.equal(before, after)
