"""What our decoder says on a few rows of real text: the truth that an export is compared with.

The weights come from the checkpoint, not from the export, and the experts are computed by the reference backend in
fp32, so the comparison (verify_hf.py, in a process of its own) meets no code that wrote the export.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from checkpoint.hf_weights import meta_decoder
from checkpoint.saved_run import SavedRun
from checkpoint.store import load_weights
from model.decoder import Decoder
from moe_kernels import RoutingKind

NUM_ROWS = 2
MAX_POSITIONS = 64  # fp32 logits of 2 · 64 tokens are 78 MB at the largest vocabulary of configs/model/
PROMPT_TOKENS = 16
NEW_TOKENS = 24

# Plain sentences, figures, quotation marks, other alphabets and code: tokens of every kind that a vocabulary has.
TEXT = """The mill stands where the river bends, and for two hundred years its stones have turned wheat and rye into \
flour. In 1847 the owner wrote to his brother: "We ground 3,120 sacks this winter, nearly twice what the old wheel \
could do, and still the farmers wait in line." Nobody alive remembers the flood of 1902, but its height is cut into \
the door frame, 2.35 metres above the floor. Water is patient; people are not.

Today a visitor who climbs to the third storey sees how little has changed. Grain falls from the hopper through a \
wooden shoe, the stones are dressed by hand every few weeks, and what leaves the spout is weighed, tied and carried \
away. The Congress of the region pays for the roof, and the schools send their children in May. Mühlen, moulins, \
мельницы, 水車: every language has a word for it.

def grind(sacks: list[float]) -> float:
    return sum(0.96 * sack for sack in sacks)  # four parts in a hundred are lost as bran and dust
"""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Rows of token ids with our logits, and our greedy continuation of one prompt."""

    input_ids_BS: np.ndarray  # int64
    logits_BSV: np.ndarray  # fp32, over the tokenizer's vocabulary
    prompt_ids: np.ndarray  # int64, (P,)
    greedy_ids: np.ndarray  # int64, what follows the prompt
    greedy_gap: np.ndarray  # fp32, how far our best logit was above the second at each of them
    text: np.ndarray  # the text of the rows, bytes in UTF-8

    def save(self, path: Path) -> None:
        """Write the reference as an .npz file, a format that no loader of weights picks up by mistake."""
        np.savez_compressed(path, **{field.name: getattr(self, field.name) for field in fields(self)})


def make_reference(run: SavedRun, *, dtype: torch.dtype, device: torch.device) -> Reference:
    """Return what the run's model, its weights rounded to ``dtype``, says under top-K routing, computed in fp32.

    Raises: ValueError if the text has too few tokens for two rows.
    """
    input_ids_BS = _rows(run)
    decoder = meta_decoder(run.config).to_empty(device=device)
    load_weights(run.checkpoint, decoder)
    with torch.no_grad():
        for tensor in (*decoder.parameters(), *decoder.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(tensor.to(dtype))
        logits_BSV = _logits(decoder, input_ids_BS.to(device), run.tokenizer.vocab_size)
        prompt_P = input_ids_BS[0, :PROMPT_TOKENS].to(device)
        greedy_ids, greedy_gap = _greedy(decoder, prompt_P, run.tokenizer.vocab_size, run.tokenizer.eos_id)
    return Reference(
        input_ids_BS=input_ids_BS.numpy(),
        logits_BSV=logits_BSV.cpu().numpy(),
        prompt_ids=prompt_P.cpu().numpy(),
        greedy_ids=np.array(greedy_ids, dtype=np.int64),
        greedy_gap=np.array(greedy_gap, dtype=np.float32),
        text=np.frombuffer(TEXT.encode(), dtype=np.uint8),
    )


def _rows(run: SavedRun) -> Tensor:
    ids = run.tokenizer.encode(TEXT)
    num_positions = min(MAX_POSITIONS, run.config.max_positions, len(ids) // NUM_ROWS)
    if num_positions < 2:
        raise ValueError(
            f"the reference text has {len(ids)} tokens and model.max_positions={run.config.max_positions}: "
            f"{NUM_ROWS} rows of at least 2 positions are needed"
        )
    return torch.tensor(ids[: NUM_ROWS * num_positions]).view(NUM_ROWS, num_positions)


def _logits(decoder: Decoder, input_ids_BS: Tensor, vocab_size: int) -> Tensor:
    logits_BSV = decoder(input_ids_BS, routing=RoutingKind.top_k).logits_BSV
    assert logits_BSV is not None
    kept: Tensor = logits_BSV[..., :vocab_size].float()
    return kept


def _greedy(decoder: Decoder, prompt_P: Tensor, vocab_size: int, eos_id: int) -> tuple[list[int], list[float]]:
    """Return the most probable continuation, ended by ``eos_id``, and how clear each choice was."""
    ids_S, chosen, gaps = prompt_P, list[int](), list[float]()
    for _ in range(min(NEW_TOKENS, decoder.config.max_positions - len(prompt_P))):
        best = _logits(decoder, ids_S[None], vocab_size)[0, -1].topk(2)
        chosen.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        if chosen[-1] == eos_id:
            break
        ids_S = torch.cat((ids_S, best.indices[:1]))
    return chosen, gaps
