"""Gradients that travel as they were computed and are summed in fp32 where they arrive, instead of a reduce-scatter.

A reduce-scatter in fp32 sends 4 bytes for gradients that were computed in bf16. Here each process sends every other its
part in bf16 and adds up in fp32 what it gets, in the order of the processes: half the bytes, and nothing is rounded
that a reduce-scatter would not round. Every process sends to every other, so it is for processes of one host.
Source of the idea: "ZeRO++: Extremely Efficient Collective Communication" (arXiv 2306.10209), section 3.3, where
gradients are quantised too.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.on_triton import runs_triton
from training.peer_copies import PeerMemory


class GradientExchange:
    """What the units of one model share: how many processes sum, and in which dtype the gradients come.

    With ``memory`` the parts are copied out of the other processes' memory, else NCCL or gloo sends them.
    """

    def __init__(self, num_processes: int, dtype: torch.dtype, memory: PeerMemory | None = None) -> None:
        self.num_processes = num_processes
        self.memory = memory
        self.dtype = dtype  # of the backward
        self.adds_up = False  # whether gradients of several micro-batches add up before, in the dtype of the sums

    def for_unit(self) -> "ExchangeAndSum":
        """Return what FSDP calls to sum the gradients of one unit (``FSDPModule.set_custom_reduce_scatter``)."""
        return ExchangeAndSum(self)


class SumOfOne:
    """Stands for the reduce-scatter of one process: the buffer of its gradients is that of their sum, too.

    FSDP copies the first into the second, and torch leaves a tensor that is copied into itself as it is.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # until it has been asked for twice

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer, and the same one when it is asked for again."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            buffer = self._buffer = torch.empty(*size, dtype=dtype, device=device)
        return buffer

    def __call__(self, **_: object) -> None:
        """Never called: one process sums nothing."""
        raise ValueError("there is more than one process to sum over")


class ExchangeAndSum:
    """Stands for a reduce-scatter: FSDP asks for the buffer of gradients, then for that of the sums, then calls it."""

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self._num_sent: int | None = None  # values of the buffer of gradients, until the other has been asked for

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the buffer of gradients, in the dtype in which they travel, or that of the sums, in ``dtype``."""
        (num,) = size
        if num * self._exchange.num_processes == self._num_sent:
            self._num_sent = None
            return torch.empty(num, dtype=dtype, device=device)
        self._num_sent = num
        dtype = dtype if self._exchange.adds_up else self._exchange.dtype
        if self._exchange.memory is not None:
            return self._exchange.memory.allocate(num, dtype, device)
        return torch.empty(num, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write into ``output_tensor`` the sum over processes of this one's part of ``input_tensor``.

        ``input_tensor`` holds a part for each process, in their order, each as long as ``output_tensor``.
        """
        if op != dist.ReduceOp.SUM or async_op:
            raise ValueError(f"gradients are summed, and at once; asked for {op}, async_op={async_op}")
        if self._exchange.memory is not None:
            parts = self._exchange.memory.collect(input_tensor)
        else:
            parts = torch.empty_like(input_tensor)
            dist.all_to_all_single(parts, input_tensor, group=group)
        sum_rows(parts.view(self._exchange.num_processes, -1), output_tensor)


def sum_rows(rows_RX: Tensor, out_X: Tensor) -> None:
    """Write into ``out_X`` the sum of the contiguous ``rows_RX``, taken in its dtype, in the order of the rows."""
    if runs_triton(rows_RX):
        from training.cast_rows import add_rows  # noqa: PLC0415 - triton comes with CUDA builds of torch alone

        add_rows(rows_RX, out_X)
        return
    out_X.copy_(rows_RX[0])
    for row_X in rows_RX[1:]:
        out_X += row_X
