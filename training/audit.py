"""What must be true after the first step of a run: everything learns, and nothing is uninitialised."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ROOT = Path(__file__).parent.parent
CODE_FOLDERS = ("checkpoint", "data", "model", "moe_kernels", "training")


def audit_first_step(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that every parameter got a gradient and moved, and that every buffer holds finite numbers.

    Call it after the optimiser's step and before gradients are cleared: AdamW moves whatever has a gradient. Every
    process calls it, and all see the same.

    Raises: RuntimeError naming the tensors that fail.
    """
    still = [name for name, parameter in model.named_parameters() if not _moved(optimizer, parameter)]
    broken = [name for name, buffer in model.named_buffers() if not bool(torch.isfinite(buffer).all())]
    complaints = []
    if still:
        complaints.append(f"no gradient reached {', '.join(still)}")
    if broken:
        complaints.append(f"{', '.join(broken)} hold numbers that are not finite")
    if complaints:
        raise RuntimeError("the first step failed its audit: " + "; ".join(complaints))


def _moved(optimizer: Optimizer, parameter: Tensor) -> bool:
    if not parameter.requires_grad:
        return True
    if parameter.grad is None or not optimizer.state.get(parameter):
        return False
    largest = parameter.grad.abs().max()
    if isinstance(largest, DTensor):
        largest = largest.full_tensor()
    return bool(torch.isfinite(largest)) and float(largest) > 0


def code_fingerprint() -> str:
    """Return a digest of this project's Python files, equal wherever the same code runs."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
