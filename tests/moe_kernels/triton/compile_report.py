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
from moe_kernels.triton import choice, plan, rounding, rounding_kernels, router, router_kernels

_SIZED_VALUE, _FRAME_SIZE = 4, 0x11  # EIFMT_SVAL; EIATTR_FRAME_SIZE: (symbol, bytes)
SIZES = ((32768, 128),)
FP32, MASK = "*fp32", "*i8"
# Names of arguments that are pointers to something else than int32; what is no pointer is an int32.
POINTERS = {
    "expert_TK": "*i64",
    "seed": "*i64",
    **dict.fromkeys(("top_k_count_BE", "count_BE"), "*i64"),
    **dict.fromkeys(("keep_TE", "keep_ET", "top_k_mask_TE", "top_k_mask_ET"), MASK),
    **dict.fromkeys(("value_TE", "bias_E", "prob_ET", "logits_TE", "score_TE", "prob_share_PE", "share_3P"), FP32),
    **dict.fromkeys(("prob_sum_BE", "z_sum", "entropy_sum", "logit_max", "wide_TE"), FP32),
    **dict.fromkeys(("dscore_TE", "dprob_sum_BE", "dz_sum", "dlogits_TE"), FP32),
    **dict.fromkeys(("of_expert_PE", "of_token_GT"), "*i16"),
    **dict.fromkeys(("of_tile_PG", "count_share_PE", "count_E"), "*i32"),
    **dict.fromkeys(("token_R", "expert_R", "expert_offsets_E1", "token_offsets_T1", "row_by_token_R"), "*i32"),
    "both_T2E": "*bf16",
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
    block = {"WIDTH": tiles.width, "CHUNK": plan._COUNT_CHUNK}
    warps, small = tiles.num_warps, choice.block_of(E)
    write = {**block, "CHUNK": plan._CHUNK, "GROUPS": triton.next_power_of_2(tiles.groups), "FILL": plan._FILL}
    write["COUNTS"] = plan._COUNTS_AT_A_TIME // tiles.width
    for name, keep in (("mask", MASK), ("ids", "*i64")):
        form, pointers = {"from_ids": name == "ids"}, {"source": keep}
        yield f"count_pairs {name}", plan._count_pairs, {**block, **form, "transposed": False}, warps, pointers
        yield f"write_plan {name}", plan._write_plan, {**write, **form}, warps, pointers
    form = {"from_ids": False, "transposed": True, "CHUNK": plan._CHUNK}
    yield "count_pairs transposed", plan._count_pairs, {**block, **form}, warps, {"source": MASK}
    pairs = {"WIDTH": small.width, "CHUNK": small.chunk}
    for transposed in (False, True):
        options = {**pairs, "biased": True, "transposed": transposed}
        yield f"choose transposed={transposed}", choice._choose, options, small.num_warps, {}
    rows, columns, column_warps = rounding.column_block(T)
    column = {"ROWS": rows, "COLUMNS": columns, "READ_ROWS": max(1, rounding._READ_TOKENS // columns)}
    for rule in Rounding:
        options = {"RULE": rounding_kernels.RULES.index(rule), "WIDTH": triton.next_power_of_2(E), **column}
        yield f"round_columns {rule.value}", rounding_kernels.round_columns_kernel, options, column_warps, {}
    for sigmoid in (False, True):
        flags = {"sigmoid": sigmoid, "normalize": True}
        options = {**pairs, **flags, "biased": sigmoid, "transposed": True}
        yield f"forward sigmoid={sigmoid}", router_kernels.forward_kernel, options, small.num_warps, {}
        options = {**pairs, **flags, "has_dscore": True, "has_dprob": True, "has_dz": True}
        yield f"backward sigmoid={sigmoid}", router_kernels.backward_kernel, options, small.num_warps, {}
    options = {"SHARES": router._SHARES, "EXPERTS": router._EXPERTS, "ALL_SHARES": router._ALL_SHARES}
    yield "add_shares", router_kernels.add_shares_kernel, options, 4, {}
    yield "split", router_kernels.split_kernel, {"BLOCK": router._SPLIT_AT_A_TIME}, 4, {}


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
            limit = router._REGISTERS if kernel is router_kernels.forward_kernel else None
            built = triton.compile(source, target=target, options={"num_warps": num_warps, "maxnreg": limit})
            cubin = built.asm["cubin"]
            row = {"kernel": name, "cubin_bytes": len(cubin), "frame_bytes": frame_bytes(cubin)}
            row |= {"shared_bytes": built.metadata.shared, "num_warps": num_warps}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
