"""Reload an export in a process of its own and compare it with our logits: python -m checkpoint.verify_hf EXPORT.

Imports torch, numpy and transformers (4.57 or 5) and nothing of this project, so it judges an export as its user's
software will. The reference that it compares with is made by reference.py and lies in the export.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

REFERENCE = "gristmill_reference.npz"
_ROUNDINGS_PER_LAYER = 16  # norms, projections, QK-norm, rotation, softmax, values, output, router, experts, residuals


def verify(folder: Path, reference_path: Path) -> dict[str, Any]:
    """Return a report on the export in ``folder``; its ``complaints`` are empty if everything holds.

    Checked: no tensor is missing, unexpected or of another shape; the tokenizer gives the same ids; the logits of the
    stored weights computed in fp32, and in the stored dtype if that is another, agree with the reference; so does the
    greedy continuation.
    """
    with np.load(reference_path) as arrays:
        reference = {name: arrays[name] for name in arrays.files}
    config = transformers.AutoConfig.from_pretrained(folder)
    stored_dtype = config.dtype
    complaints: list[str] = []
    report: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "stored_dtype": _name(stored_dtype),
        "tokens_compared": int(reference["input_ids_BS"].size),
        "complaints": complaints,
    }
    model, report["loading"] = _load(folder, torch.float32)
    report["class"] = type(model).__name__
    for kind, names in report["loading"].items():
        if names:
            complaints.append(f"{kind}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    report["tokenizer"] = _check_tokenizer(tokenizer, reference, complaints)
    report["logits"] = {"float32": _compare_logits(model, reference, complaints)}
    report["greedy"] = _compare_greedy(model, reference, report["logits"]["float32"].get("max_error", 0.0), complaints)
    for side in ("ours", "transformers"):
        report["greedy"][f"text_{side}"] = tokenizer.decode(report["greedy"][f"ids_{side}"])
    del model
    if stored_dtype != torch.float32:
        model, _ = _load(folder, stored_dtype)
        report["logits"][_name(stored_dtype)] = _compare_logits(model, reference, complaints)
    return report


def tolerance(dtype: torch.dtype, *, num_layers: int, width: int) -> float:
    """Return the relative error that rounding alone explains.

    Each layer rounds about 16 times in a row, and errors of random sign grow with the square root of their number. In
    fp32 the sums over ``width`` products round at every addition too; narrower products are summed in fp32 and round
    once.
    """
    roundings = _ROUNDINGS_PER_LAYER * num_layers * (width if dtype == torch.float32 else 1)
    return torch.finfo(dtype).eps * math.sqrt(roundings)


def _load(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, list[str]]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    loading = {kind: sorted(str(name) for name in info[kind]) for kind in _KINDS}
    return model.eval(), loading


_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def _check_tokenizer(tokenizer: Any, reference: dict[str, np.ndarray], complaints: list[str]) -> dict[str, Any]:
    rows = reference["input_ids_BS"].flatten().tolist()
    ids = tokenizer.encode(reference["text"].tobytes().decode(), add_special_tokens=False)
    same_ids = ids[: len(rows)] == rows
    if not same_ids:
        complaints.append("the tokenizer gives other ids for the reference text than the run's")
    return {"class": type(tokenizer).__name__, "same_ids": same_ids}


def _compare_logits(model: Any, reference: dict[str, np.ndarray], complaints: list[str]) -> dict[str, Any]:
    dtype = model.dtype
    ours_BSV = torch.from_numpy(reference["logits_BSV"]).double()
    with torch.no_grad():
        theirs_BSV = model(torch.from_numpy(reference["input_ids_BS"])).logits.double()
    if theirs_BSV.shape != ours_BSV.shape:
        complaints.append(f"logits have shape {tuple(theirs_BSV.shape)}, expected {tuple(ours_BSV.shape)}")
        return {}
    error_BSV = theirs_BSV - ours_BSV
    relative_BS = error_BSV.norm(dim=-1) / ours_BSV.norm(dim=-1)
    allowed = tolerance(dtype, num_layers=model.config.num_hidden_layers, width=model.config.hidden_size)
    norm_wise = float(error_BSV.norm() / ours_BSV.norm())
    # In fp32 every token counts. With fewer digits a near tie sends some tokens to another expert: the median cannot
    # be moved by those, and a wrong setting or weight has already shown itself in fp32.
    judged = norm_wise if dtype == torch.float32 else float(relative_BS.median())
    if not judged <= allowed:
        complaints.append(
            f"logits in {_name(dtype)} differ by {judged:.2e} relative to ours, rounding explains {allowed:.2e} "
            f"({int((relative_BS > allowed).sum())} of {relative_BS.numel()} tokens are beyond that)"
        )
    return {
        "norm_wise_error": norm_wise,
        "median_token_error": float(relative_BS.median()),
        "max_error": float(error_BSV.abs().max()),
        "max_logit": float(ours_BSV.abs().max()),
        "allowed": allowed,
        "judged_by": "norm_wise_error" if dtype == torch.float32 else "median_token_error",
        "same_best_token_fraction": float((theirs_BSV.argmax(-1) == ours_BSV.argmax(-1)).double().mean()),
    }


def _compare_greedy(
    model: Any, reference: dict[str, np.ndarray], max_error: float, complaints: list[str]
) -> dict[str, Any]:
    prompt, ours = reference["prompt_ids"], reference["greedy_ids"].tolist()
    ids_BS = torch.from_numpy(prompt)[None]
    with torch.no_grad():
        output_BS: Tensor = model.generate(
            ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=max(len(ours), 1), do_sample=False
        )
    theirs = output_BS[0, len(prompt) :].tolist()[: len(ours)]
    if theirs != ours:
        first = next(index for index in range(len(ours)) if theirs[index : index + 1] != ours[index : index + 1])
        gap = float(reference["greedy_gap"][first])
        # Two logits that rounding cannot tell apart may be chosen either way, and all that follows differs then.
        if gap > 2 * max_error:
            complaints.append(f"greedy text differs at token {first}, where our best two logits are {gap:.2e} apart")
    return {"prompt_ids": prompt.tolist(), "ids_ours": ours, "ids_transformers": theirs, "same": theirs == ours}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    """Verify one export, print the report as JSON and return the exit status: 0 if it holds, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint.verify_hf", description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("--reference", type=Path, help=f"default: EXPORT/{REFERENCE}")
    parser.add_argument("--report", type=Path, help="write the report here instead of printing it")
    options = parser.parse_args(arguments)
    reference = options.reference or options.export / REFERENCE
    if not options.export.is_dir():
        parser.error(f"{options.export} is not a folder")
    if not reference.is_file():
        parser.error(f"there is no {reference}: an export has one, and a run is exported by checkpoint.export_hf")
    if options.report is not None and (options.report.is_dir() or not options.report.parent.is_dir()):
        parser.error(f"--report {options.report} is a folder, or in none")
    transformers.utils.logging.disable_progress_bar()
    report = verify(options.export, reference)
    text = json.dumps(report, indent=2)
    if options.report is None:
        print(text)
    else:
        options.report.write_text(text + "\n", encoding="utf-8")
    for complaint in report["complaints"]:
        print(f"{options.export}: {complaint}", file=sys.stderr)
    return 1 if report["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
