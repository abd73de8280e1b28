"""How parameters are gathered where FSDP's own way is not taken: out of peers' memory, and where they are used.

FSDP casts a process's part of a parameter into one buffer, copies it into another that the others' parts join, and that
into the parameter: for P parameters in bf16 on n GPUs 4 P + 4 P/n bytes of copies beside the cast and the messages
(docs/performance.md). A large parameter that is gathered in place keeps the memory of its whole: this process's part is
cast into its place there, and the others' arrive in theirs. FSDP, which asks a parameter what of it to gather, is given
a few numbers (``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``; pytorch, fsdp/_fully_shard/_fsdp_param.py).
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.copy_in import copy_rows
from training.peer_copies import PeerMemory


class Gather:
    """Stands for FSDP's all-gather: it asks for a buffer, fills this process's part of it, and calls.

    Parameters that are gathered in place come with it. With ``memory`` the others' parts are copied out of their
    memory, else NCCL or gloo sends them. FSDP is told by ``FSDPModule.set_custom_all_gather``.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, memory: PeerMemory | None = None) -> None:
        self._group, self._dtype, self._memory = group, dtype, memory
        self._waiting: list[Tensor] = []  # whole parameters in which only this process's part is new

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these sharded parameters in place, each cut along its first dimension into equal parts.

        Call it when they are on their device, and before the first forward.
        """
        for parameter in parameters:
            assert isinstance(parameter, DTensor)
            part = parameter._local_tensor  # the object that FSDP asks; to_local would return another
            whole = _Whole(self, part)
            part.fsdp_pre_all_gather = whole.pre_all_gather  # type: ignore[attr-defined]
            part.fsdp_post_all_gather = whole.post_all_gather  # type: ignore[attr-defined]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is gathered: FSDP's buffer, or a whole parameter."""
        (num,) = size
        if self._memory is not None:
            return self._memory.allocate(num, dtype, device)
        return torch.empty(num, dtype=dtype, device=device)

    def fill(self, whole_X: Tensor, part_X: Tensor) -> None:
        """Write this process's part into its place in ``whole_X``, which ``whole`` returned; the next call gathers."""
        copy_rows([self._own(whole_X)[None]], [part_X[None]])
        if self._group.size() > 1:  # else FSDP does not call
            self._waiting.append(whole_X)

    def whole(self, num: int, device: torch.device) -> Tensor:
        """Return memory for a whole parameter of ``num`` values."""
        return self.allocate((num * self._group.size(),), dtype=self._dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather ``output_tensor``, of which ``input_tensor`` is this process's part, and the parameters that wait."""
        if async_op:
            raise ValueError("parameters are gathered at once; asked for async_op=True")
        wholes, self._waiting = [output_tensor, *self._waiting], []
        if self._memory is not None:
            self._memory.gather(*wholes)
            return
        for whole_X in wholes:
            dist.all_gather_into_tensor(whole_X, self._own(whole_X), group=self._group)

    def _own(self, whole_X: Tensor) -> Tensor:
        return whole_X.view(self._group.size(), -1)[self._group.rank()]


class _Whole:
    """One parameter: its part of this process, and the memory of the whole from the first time it is gathered."""

    def __init__(self, gather: Gather, part: Tensor) -> None:
        # The part holds this object, and a cycle through a tensor is memory that Python's collector cannot free.
        self._gather, self._part = gather, weakref.ref(part)
        self._whole_X: Tensor | None = None

    def pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Return a few numbers, whichever, to gather in the parameter's place.

        FSDP asks between forwards, once for each, when the whole is not read. Its prefetch may ask once more in a
        backward, for the head, which an evaluation's notes name: the same numbers are written again.
        """
        part = self._part()
        assert part is not None  # it is what FSDP asks
        if self._whole_X is None:
            self._whole_X = self._gather.whole(part.numel(), part.device)
        self._gather.fill(self._whole_X, part.view(-1))
        # As wide as loads and messages like their addresses: what FSDP gathers by itself comes after it.
        return (self._whole_X[:64],), None

    def post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """Return the whole the first time, with nothing that is FSDP's to free; later ``out`` holds it already."""
        assert self._whole_X is not None
        return (self._whole_X, ()) if out is None else None
