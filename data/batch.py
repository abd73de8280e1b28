"""What one forward pass reads. Made by data/loader.py; data/packing.py says how tokens become rows."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100  # the value that cross-entropy leaves out of its sum and of its count


class Batch(NamedTuple):
    """B rows of S tokens, their next tokens, and which document each token belongs to."""

    input_ids_BS: Tensor  # int64
    labels_BS: Tensor  # int64, the token after each input; IGNORED_LABEL where there is none
    document_BS: Tensor  # int32, number of the token's document within its row, from 0; rises at each document start

    def positions(self) -> Tensor:
        """Return int64 positions that start from 0 at every row's start and at every document's start inside a row."""
        S = self.document_BS.shape[1]
        place_S = torch.arange(S, device=self.document_BS.device)
        starts_BS = torch.ones_like(self.document_BS, dtype=torch.bool)
        starts_BS[:, 1:] = self.document_BS[:, 1:] != self.document_BS[:, :-1]
        start_place_BS = torch.where(starts_BS, place_S, 0).cummax(dim=1).values
        return place_S - start_place_BS

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on ``device``; the copy doesn't block the host when the source is pinned."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked host memory, from which a copy to a GPU runs beside its work."""
        return Batch(*(tensor.pin_memory() for tensor in self))
