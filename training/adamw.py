"""AdamW whose large parameters on a GPU are updated by a kernel of ours: torch's reaches 3.3 of 4.3 TB/s.

Algorithm: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), as in torch.optim.AdamW.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from training.on_triton import runs_triton

_WORTH_A_LAUNCH = 1 << 20  # values of a parameter, or of this process's part of it


class LargeAdamW(AdamW):
    """torch.optim.AdamW(fused=True), with the same state and the same numbers but for the rounding of fp32.

    The first step of a parameter is torch's, which makes its state. From then on fp32 parameters on a GPU of at least
    2^20 values are read and written once by a Triton kernel, which leaves gradients as they are where torch writes them
    back scaled. ``grad_scale`` and ``found_inf``, scalars on the device, are heeded as torch's fused AdamW does.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Nothing waits for the device."""
        if closure is not None:
            return super().step(closure)
        taken: list[tuple[Tensor, Tensor]] = []
        try:
            for group in self.param_groups:
                taken += self._step_large(group)
            return super().step()
        finally:
            for parameter, grad in taken:
                parameter.grad = grad

    @torch.no_grad()
    def _step_large(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Update the large parameters of ``group`` and hide their gradients; return both."""
        if group["amsgrad"] or group["maximize"] or isinstance(group["lr"], Tensor):
            return []
        large = [parameter for parameter in group["params"] if self._is_large(parameter)]
        if not large:
            return []
        from training.adamw_kernel import adamw_step  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        steps = [self.state[parameter]["step"] for parameter in large]
        torch._foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf)
        taken = []
        for parameter, count in zip(large, steps, strict=True):
            state, grad = self.state[parameter], parameter.grad
            assert grad is not None
            adamw_step(
                _local(parameter),
                _local(grad),
                _local(state["exp_avg"]),
                _local(state["exp_avg_sq"]),
                count,
                scale,
                found_inf,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            taken.append((parameter, grad))
            parameter.grad = None
        return taken

    def _is_large(self, parameter: Tensor) -> bool:
        if parameter.grad is None or not self.state.get(parameter):
            return False
        values, grad = _local(parameter), _local(parameter.grad)
        return (
            runs_triton(values)
            and values.numel() >= _WORTH_A_LAUNCH
            and values.dtype == grad.dtype == torch.float32
            and values.is_contiguous()
            and grad.is_contiguous()
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
