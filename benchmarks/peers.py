"""Other implementations of the routed experts, as functions of (x, w_gate_up, w_down, score_TK, expert_TK).

Optional: a peer that is not installed is left out with a word. Their layouts differ from ours: gate and up rows are
interleaved here, made once from the same values, outside of all timing.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

Peer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def available(names: list[str], *, tunes: bool = True) -> tuple[list[str], dict[str, Peer]]:
    """Return ``names`` without the peers that are not installed, which it says, and the peers among them.

    Without ``tunes`` sonic-moe takes the first tile that it knows, where only bytes are counted.
    """
    peers = {}
    for name in names:
        if name not in PEERS:
            continue
        module, peer = PEERS[name]
        if module is not None and find_spec(module) is None:
            print(f"{name}: {module} is not installed, left out")
            continue
        if name == "sonicmoe":
            keep_usual_tiles(None if tunes else 1)
        peers[name] = peer
    return [name for name in names if name in peers or name not in PEERS], peers


def interleave(w_gate_up: Tensor) -> Tensor:
    """Return (E, 2N, D) with rows gate 0, up 0, gate 1, up 1 ... from rows [gate; up]."""
    E, rows, D = w_gate_up.shape
    return w_gate_up.view(E, 2, rows // 2, D).transpose(1, 2).reshape(E, rows, D)


def keep_usual_tiles(most: int | None) -> None:
    """Let quack's autotuner try six tiles, its usual winners on Hopper, or the first ``most`` of them.

    All of its tiles take minutes for each shape.
    """
    from quack import gemm_config  # noqa: PLC0415 - optional

    usual = {
        (128, 192, True),
        (128, 160, True),
        (128, 128, True),
        (256, 128, False),
        (128, 256, False),
        (256, 192, False),
    }
    all_configs = gemm_config._get_sm90_configs

    def few_configs(epilogue=None, tune_coop=True):  # type: ignore[no-untyped-def]
        configs = [
            config
            for config in all_configs(epilogue, tune_coop)
            if (config.tile_m, config.tile_n, config.pingpong) in usual and not config.swap_ab and config.cluster_n == 1
        ]
        return configs[:most]

    gemm_config._get_sm90_configs = few_configs


def sonicmoe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, score_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """sonic-moe 0.1.2: its two autograd functions, routing metadata included."""
    from sonicmoe.enums import ActivationType  # noqa: PLC0415
    from sonicmoe.functional import (  # noqa: PLC0415
        TC_topk_router_metadata_triton,
        _DownProjection,
        _UpProjection,
    )

    T, K = expert_TK.shape
    E, R = w_gate_up.shape[0], T * K
    counts, offsets = (torch.empty(n, dtype=torch.int32, device=x.device) for n in (E, E + 1))
    token, scatter, reverse = (torch.empty(R, dtype=torch.int32, device=x.device) for _ in range(3))
    TC_topk_router_metadata_triton(expert_TK, E, counts, offsets, token, scatter, reverse)
    w_up, w_out = w_gate_up.permute(1, 2, 0), w_down.permute(1, 2, 0)
    swiglu = ActivationType.SWIGLU
    a, h = _UpProjection.apply(x, w_up, None, offsets, R, K, token, scatter, reverse, None, False, swiglu, False, False)
    return _DownProjection.apply(
        a, h, w_out, None, score_TK, offsets, T, K, token, scatter, reverse, None, False, swiglu
    )


def sonicmoe_layer(x: Tensor, router_ED: Tensor, w_gate_up: Tensor, w_down: Tensor, *, K: int) -> Tensor:
    """sonic-moe 0.1.2: what its module calls, router included, weights normalised over the top K."""
    from sonicmoe.enums import ActivationType  # noqa: PLC0415
    from sonicmoe.functional import moe_TC_softmax_topk_layer  # noqa: PLC0415

    stream = torch.cuda.current_stream().cuda_stream
    w_up, w_out = w_gate_up.permute(1, 2, 0), w_down.permute(1, 2, 0)
    return moe_TC_softmax_topk_layer(x, router_ED, w_up, None, w_out, None, K, stream, ActivationType.SWIGLU, False)[0]


def scattermoe(x: Tensor, w_gate_up: Tensor, w_down: Tensor, score_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """ScatterMoE's two grouped products with a compiled activation between them."""
    from scattermoe.parallel_experts import flatten_sort_count, parallel_linear  # noqa: PLC0415

    experts, order, offsets = flatten_sort_count(expert_TK.long(), num_experts=w_gate_up.shape[0])
    h = parallel_linear(x, w_gate_up.permute(0, 2, 1), expert_TK.shape[1], experts, order, offsets, grouped_out=True)
    gates = score_TK.to(x.dtype)
    return parallel_linear(
        _activation(h), w_down.permute(0, 2, 1), 1, experts, order, offsets, grouped_in=True, gates=gates
    )


def grouped_mm(x: Tensor, w_gate_up: Tensor, w_down: Tensor, score_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Sort, gather, torch's grouped product, scatter: what a trainer without MoE kernels does."""
    K = expert_TK.shape[1]
    order = expert_TK.flatten().long().argsort(stable=True)
    offsets = torch.bincount(expert_TK.flatten(), minlength=w_gate_up.shape[0]).cumsum(0).int()
    token = order // K
    a = _activation(F.grouped_mm(x[token], w_gate_up.transpose(1, 2), offs=offsets))
    y = F.grouped_mm(a, w_down.transpose(1, 2), offs=offsets)
    weighted = (y.float() * score_TK.flatten()[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, weighted)


def _activation(h: Tensor) -> Tensor:
    return _compiled_activation()(h)


@cache
def _compiled_activation() -> Callable[[Tensor], Tensor]:
    # Made at its first use: torch.compile takes seconds to import, which a cold start of ours must not count.
    return torch.compile(lambda h: F.silu(h[:, 0::2]) * h[:, 1::2])


PEERS: dict[str, tuple[str | None, Peer]] = {
    "sonicmoe": ("sonicmoe", sonicmoe),
    "scattermoe": ("scattermoe", scattermoe),
    "grouped_mm": (None, grouped_mm),
}
