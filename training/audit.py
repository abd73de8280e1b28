"""What must be true after the first step of a run: everything learns, and nothing is uninitialised."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ROOT = Path(__file__).parent.parent
CODE_FOLDERS = ("checkpoint", "data", "model", "moe_kernels", "training")


def check_weights(model: nn.Module, step: int) -> None:
    """Check that every parameter holds finite numbers after step ``step``.

    A gradient can be finite and the step along it not. Every process calls it, and all see the same. The host waits for
    the device, so this is for saves and not for every step.

    Raises: FloatingPointError naming the step and the parameters that fail.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    broken = [name for name, largest in zip(names, _largest(parameters), strict=True) if not math.isfinite(largest)]
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
    learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = [parameter.new_zeros(()) if parameter.grad is None else parameter.grad for _, parameter in learning]
    still = [
        name
        for (name, parameter), largest in zip(learning, _largest(gradients), strict=True)
        if not (0 < largest < math.inf and optimizer.state.get(parameter))
    ]
    broken = [name for name, buffer in model.named_buffers() if not bool(torch.isfinite(buffer).all())]
    complaints = []
    if still:
        complaints.append(f"no gradient reached {', '.join(still)}")
    if broken:
        complaints.append(f"{', '.join(broken)} hold numbers that are not finite")
    if complaints:
        raise RuntimeError("the first step failed its audit: " + "; ".join(complaints))


@torch.no_grad()
def _largest(tensors: Sequence[Tensor]) -> list[float]:
    """Return each tensor's largest absolute value, NaN where there is one, over all processes, which meet once."""
    mine = torch.stack([_largest_here(tensor) for tensor in tensors])
    if not dist.is_initialized():
        return mine.tolist()
    of_each = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_each, mine)
    return torch.stack(of_each).amax(0).tolist()


def _largest_here(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of this process's part, in fp32."""
    mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # 5 rows on 4 processes leave the last one none.
    return mine.abs().max().float() if mine.numel() > 0 else mine.new_zeros((), dtype=torch.float32)


def code_fingerprint() -> str:
    """Return a digest of this project's Python files, equal wherever the same code runs."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
