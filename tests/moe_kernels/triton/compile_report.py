"""Compiles every routing kernel for a GPU that need not be there and prints what each uses, as JSON lines.

    python tests/moe_kernels/triton/compile_report.py 90

In a process of its own: where triton interprets kernels it cannot compile them.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[3]))
from moe_kernels.routing.kinds import Rounding
from moe_kernels.triton import choice, plan, rounding, router, router_kernels

_SIZED_VALUE, _FRAME_SIZE = 4, 0x11  # EIFMT_SVAL; EIATTR_FRAME_SIZE: (symbol, bytes)
SIZES = ((32768, 128),)
FP32, MASK = "*fp32", "*i8"
# Names of arguments that are pointers to something else than int32; what is no pointer is an int32.
POINTERS = {
    "expert_TK": "*i64",
    "seed": "*i64",
    "top_k_count_BE": "*i64",
    **dict.fromkeys(("keep_TE", "top_k_mask_TE", "top_k_mask_ET"), MASK),
    **dict.fromkeys(("value_TE", "bias_E", "prob_ET", "logits_TE", "score_TE", "prob_share_PE", "share_P3"), FP32),
    **dict.fromkeys(("prob_sum_BE", "z_sum", "entropy_sum", "logit_max"), FP32),
    **dict.fromkeys(("dscore_TE", "dprob_sum_BE", "dz_sum", "dlogits_TE"), FP32),
    **dict.fromkeys(("count_PE", "count_share_PE", "count_E", "margin_E3"), "*i32"),
    **dict.fromkeys(("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R"), "*i32"),
    "scale": "fp32",
}


def frame_bytes(cubin: bytes) -> int:
    """Return the bytes of local memory of the kernel in ``cubin``; what is far above zero is a spill."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    for name, _, _, _, offset, size in sections:
        start, at, end = sections[names][4] + name, offset, offset + size
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        while at < end:
            kind, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if (kind, attribute) == (_SIZED_VALUE, _FRAME_SIZE):
                return struct.unpack_from("<II", cubin, at)[1]
            at += value if kind == _SIZED_VALUE else 0
    raise ValueError("no kernel in the cubin says how large its frame is")


def kernels(T: int, E: int) -> Iterator[tuple[str, object, dict, int, dict]]:
    """Yield (name, kernel, compile-time arguments, warps, signature overrides) as the launches at this size have."""
    tiles = plan.tiling(T, E)
    block = {"WIDTH": tiles.width, "CHUNK": tiles.chunk}
    warps, small = tiles.num_warps, choice.block_of(E)
    write = {**block, "COUNTS": max(1, plan._COUNTS_AT_A_TIME // tiles.width), "FILL": plan._FILL}
    for name, keep in (("mask", "*i8"), ("ids", "*i64")):
        yield f"count_pairs {name}", plan._count_pairs, {**block, "from_ids": name == "ids"}, warps, {"source": keep}
        yield f"write_plan {name}", plan._write_plan, {**write, "from_ids": name == "ids"}, warps, {"source": keep}
    pairs = {"WIDTH": small.width, "CHUNK": small.chunk}
    for transposed in (False, True):
        options = {**pairs, "biased": True, "transposed": transposed}
        yield f"choose transposed={transposed}", choice._choose, options, small.num_warps, {}
    held = T <= rounding._HELD_TOKENS
    column = triton.next_power_of_2(T) if held else rounding._BLOCK
    for rule in Rounding:
        options = {"RULE": rounding._RULES.index(rule), "WIDTH": tiles.width, "BLOCK": column}
        options |= {"held": held}
        yield f"find_margins {rule.value}", rounding._find_margins, options, rounding.column_warps(column), {}
    yield "apply_margins", rounding._apply_margins, block, warps, {}
    for sigmoid in (False, True):
        flags = {"sigmoid": sigmoid, "normalize": True}
        options = {**pairs, **flags, "biased": sigmoid, "transposed": True}
        yield f"forward sigmoid={sigmoid}", router_kernels.forward_kernel, options, small.num_warps, {}
        options = {**pairs, **flags, "has_dscore": True, "has_dprob": True, "has_dz": True}
        yield f"backward sigmoid={sigmoid}", router_kernels.backward_kernel, options, small.num_warps, {}
    yield "add_shares", router_kernels.add_shares_kernel, {"SHARES": router._SHARES, "EXPERTS": router._EXPERTS}, 4, {}


def main() -> None:
    """Print one line per kernel and size."""
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for T, E in SIZES:
        for name, kernel, constants, num_warps, overrides in kernels(T, E):
            types = dict.fromkeys(kernel.arg_names, "i32") | POINTERS | overrides
            signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
            # What the launcher adds for aligned pointers and for sizes that are multiples of 16.
            aligned = [arg for arg, kind in signature.items() if kind.startswith("*") or arg in ("T", "E")]
            attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned if E % 16 == 0}
            values = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
            source = ASTSource(kernel, signature, values, attributes)
            built = triton.compile(source, target=target, options={"num_warps": num_warps})
            cubin = built.asm["cubin"]
            row = {"kernel": name, "cubin_bytes": len(cubin), "frame_bytes": frame_bytes(cubin)}
            row |= {"shared_bytes": built.metadata.shared, "num_warps": num_warps}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
