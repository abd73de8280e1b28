"""Text from an exported folder: python -m evaluation.sample EXPORT --prompt TEXT.

The export is loaded with transformers as any user of it would; nothing of this project is imported.
"""

import argparse
import shlex
import sys
from math import inf
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def sample(
    export: Path | str,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Return ``prompt`` and a continuation drawn from the exported model; the same seed draws the same text.

    ``temperature`` 0 takes the most probable token each time; ``top_p`` is the probability mass that is drawn from.
    Raises: ValueError for values out of range, a prompt without tokens, or one that leaves no room for new tokens.
    """
    if max_new_tokens < 1 or not (temperature == 0 or 1e-6 <= temperature < inf) or not 0 < top_p <= 1:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} must be at least 1, temperature={temperature} 0 or at least 1e-6 "
            f"and top_p={top_p} above 0 and at most 1"
        )
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed} must lie between 0 and 2**63 - 1")
    if (Path(export) / "config.yaml").is_file():
        raise ValueError(
            f"{export} is a run, not an export: python -m evaluation.generate {shlex.quote(str(export))} --prompt TEXT "
            f"draws from it, python -m checkpoint.export_hf {shlex.quote(str(export))} OUT exports it"
        )
    if not Path(export).is_dir():
        raise ValueError(f"{export} is not a folder: write one with python -m checkpoint.export_hf RUN {export}")
    weights = ("model.safetensors", "model.safetensors.index.json")
    for names in (("config.json",), ("tokenizer.json",), weights):
        if not any((Path(export) / name).is_file() for name in names):
            raise ValueError(f"{export} is no whole export: it has no {' or '.join(names)}")
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    num_prompt_tokens = inputs["input_ids"].shape[1]
    positions = model.config.max_position_embeddings
    if num_prompt_tokens == 0 or num_prompt_tokens >= positions:
        raise ValueError(f"the prompt has {num_prompt_tokens} tokens, needed 1 to {positions - 1}")
    torch.manual_seed(seed)
    # top_k=0: transformers otherwise draws from the 50 most probable tokens alone.
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=min(max_new_tokens, positions - num_prompt_tokens),
        **(drawing if temperature > 0 else {"do_sample": False}),
    )
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text


def main(arguments: list[str] | None = None) -> int:
    """Print one sample and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.sample", description=__doc__.split("\n")[0])
    parser.add_argument("export", type=Path, help="folder written by python -m checkpoint.export_hf")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most probable token")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    try:
        text = sample(
            parsed.export,
            parsed.prompt,
            max_new_tokens=parsed.max_new_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            seed=parsed.seed,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
