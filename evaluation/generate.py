"""Text from a run's checkpoint: python -m evaluation.generate RUN --prompt TEXT.

Our own decoder continues the prompt, one token at a time over a key-value cache. Every token gets its top-K experts, as
in evaluation and in every export, whatever the training's routing was. Text from an export, by transformers: sample.py.
"""

import argparse
import logging
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.saved_run import SavedRun, open_saved_run, reading
from checkpoint.store import load_weights
from model.decoder import Decoder
from model.kv_cache import empty_kv_cache
from model.moe import moe_problem
from moe_kernels import BackendName, RoutingKind, resolve_backend

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; the defaults are those of the command."""

    max_new_tokens: int = 64
    temperature: float = 0.8  # 0: always the most probable token
    top_p: float = 0.95  # draw from the fewest tokens that have at least this probability together
    seed: int = 0

    def __post_init__(self) -> None:
        is_usable = self.temperature == 0 or 1e-6 <= self.temperature < inf
        if self.max_new_tokens < 1 or not is_usable or not 0 < self.top_p <= 1:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} must be at least 1, temperature={self.temperature} 0 or "
                f"at least 1e-6 and top_p={self.top_p} above 0 and at most 1"
            )
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must lie between 0 and 2**63 - 1")


@torch.no_grad()
def generate(decoder: Decoder, prompt_BS: Tensor, *, sampling: Sampling, vocab_size: int, eos_id: int) -> Tensor:
    """Return the tokens that follow each prompt, (B, n) int64; behind an ``eos_id`` there is nothing but ``eos_id``.

    n is the longest continuation: it ends at ``max_new_tokens``, at model.max_positions, or where every text has ended.
    Ids from ``vocab_size`` on, which pad the embedding, are never drawn. Draws are made on the CPU: the same seed draws
    the same text on every device, as far as its rounding allows.
    Raises: ValueError if the prompts leave no position for a new token, or the logits are not finite.
    """
    num_sequences, num_prompt_tokens = prompt_BS.shape
    room = decoder.config.max_positions - num_prompt_tokens
    if num_prompt_tokens == 0 or room < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, needed 1 to {decoder.config.max_positions - 1} "
            "(model.max_positions - 1)"
        )
    weight = decoder.embed.weight
    cache = empty_kv_cache(decoder.config, num_sequences=num_sequences, dtype=weight.dtype, device=weight.device)
    generator = torch.Generator().manual_seed(sampling.seed)
    ended_B = torch.zeros(num_sequences, dtype=torch.bool)
    ids_BS, new_tokens = prompt_BS.to(weight.device), list[Tensor]()
    for _ in range(min(sampling.max_new_tokens, room)):
        output = decoder(ids_BS, routing=RoutingKind.top_k, cache=cache)
        cache = output.cache
        drawn_B = _draw(output.logits_BSV[:, -1, :vocab_size], sampling, generator).masked_fill(ended_B, eos_id)
        new_tokens.append(drawn_B)
        ended_B |= drawn_B == eos_id
        if ended_B.all():
            break
        ids_BS = drawn_B[:, None].to(weight.device)
    return torch.stack(new_tokens, dim=1)


def _draw(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return one token for each row, on the CPU."""
    logits_BV = logits_BV.float().cpu()
    if not logits_BV.isfinite().all():
        raise ValueError("the logits hold NaN or infinity: this checkpoint's weights cannot be used")
    if sampling.temperature == 0:
        return logits_BV.argmax(dim=-1)
    prob_BV, token_BV = (logits_BV / sampling.temperature).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    mass_before_BV = prob_BV.cumsum(dim=-1) - prob_BV
    place_B1 = torch.multinomial(prob_BV.where(mass_before_BV < sampling.top_p, 0), 1, generator=generator)
    return token_BV.gather(1, place_B1)[:, 0]


def load_decoder(run: SavedRun, device: torch.device) -> Decoder:
    """Return the decoder of a run's checkpoint in fp32 on ``device``, with the fastest backend for top-K routing."""
    problem = moe_problem(run.config, tokens=1, dtype=torch.float32, device=device)
    backend = resolve_backend(BackendName.auto, replace(problem, routing=RoutingKind.top_k, tile_m=1))
    with torch.device("meta"):
        decoder = Decoder(run.config, backend=backend)
    decoder.to_empty(device=device)
    with reading(run):
        load_weights(run.checkpoint, decoder)
    return decoder


def generate_text(run: SavedRun, prompt: str, *, sampling: Sampling, device: torch.device) -> str:
    """Return ``prompt`` and its continuation, without the end-of-text token.

    Raises: ValueError as ``generate`` does.
    """
    prompt_ids = run.tokenizer.encode(prompt)
    new_ids_BS = generate(
        load_decoder(run, device),
        torch.tensor([prompt_ids], dtype=torch.int64),
        sampling=sampling,
        vocab_size=run.tokenizer.vocab_size,
        eos_id=run.tokenizer.eos_id,
    )
    new_ids = new_ids_BS[0].tolist()
    if new_ids[-1] == run.tokenizer.eos_id:
        new_ids.pop()
    return run.tokenizer.decode(prompt_ids + new_ids)


def main(arguments: list[str] | None = None) -> int:
    """Print one text and return the exit status."""
    defaults = Sampling()
    parser = argparse.ArgumentParser(prog="python -m evaluation.generate", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=defaults.max_new_tokens)
    parser.add_argument(
        "--temperature", type=float, default=defaults.temperature, help="0: always the most probable token"
    )
    parser.add_argument("--top-p", type=float, default=defaults.top_p)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--step", type=int, help="checkpoint to read (default: the newest complete one)")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    parser.add_argument("--device", default=devices[-1], choices=devices)
    parsed = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    try:
        sampling = Sampling(
            max_new_tokens=parsed.max_new_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            seed=parsed.seed,
        )
        run = open_saved_run(parsed.run, step=parsed.step)
        log.info("step %d, %d tokens of training", run.state.step, run.state.tokens)
        text = generate_text(run, parsed.prompt, sampling=sampling, device=torch.device(parsed.device))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
