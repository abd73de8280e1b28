"""What must be true after the first step of a run: everything learns, and nothing is uninitialised."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

ROOT = Path(__file__).parent.parent
CODE_FOLDERS = ("checkpoint", "data", "model", "moe_kernels", "training")


def check_weights(model: nn.Module, step: int) -> None:
    """Check that every parameter holds finite numbers after step ``step``.

    A gradient can be finite and the step along it not. Every process calls it, and all see the same. The host waits for
    the device, so this is for saves and not for every step.

    Raises: FloatingPointError naming the step and the parameters that fail.
    """
    broken = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    if broken:
        others = f" and {len(broken) - 3} others" if len(broken) > 3 else ""
        raise FloatingPointError(
            f"after step {step} the weights {', '.join(broken[:3])}{others} are not finite; they are not saved"
        )


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
    largest = _largest(parameter.grad)
    return bool(torch.isfinite(largest)) and float(largest) > 0


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(_largest(tensor)))


@torch.no_grad()
def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, NaN where there is one, over all processes."""
    if not isinstance(tensor, DTensor):
        return tensor.abs().max()
    mine = tensor.to_local().abs()
    mine = mine.max() if mine.numel() > 0 else mine.new_zeros(())  # 5 rows on 4 processes leave the last one none
    placements = [Shard(0) if placement.is_shard() else placement for placement in tensor.placements]
    return DTensor.from_local(mine[None], tensor.device_mesh, placements).full_tensor().max()


def code_fingerprint() -> str:
    """Return a digest of this project's Python files, equal wherever the same code runs."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
