"""What a run reads and in which order: a dataclass only.

How text becomes the folder that ``root`` names is told by the options of data/prepare.py, and recorded in its manifest.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The prepared folder, the length of its rows, and the seed of their order."""

    root: str  # folder written by `python -m data.prepare`; with a mixture, the folder that holds such folders
    sequence_length: int = 256  # tokens that a row feeds to the model; the label of its last token is one token further
    mask_documents: bool = False  # attention stays inside a row's documents, and positions restart at each
    order_seed: int = 0  # of the order of the training rows; held-out rows keep the order of the text
    mixture: dict[str, float] = field(default_factory=dict)  # sub-folder of root → weight in rows; empty: root alone

    def __post_init__(self) -> None:
        if not self.root:
            raise ValueError("data.root is empty: it must name a folder written by python -m data.prepare")
        if self.sequence_length < 1:
            raise ValueError(f"data.sequence_length={self.sequence_length} must be at least 1")
        if not 0 <= self.order_seed < 2**63:
            raise ValueError(f"data.order_seed={self.order_seed} must lie between 0 and 2**63 - 1")
        for name, weight in self.mixture.items():
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"data.mixture.{name}={weight} must be a positive number; leave a source out to drop it"
                )
