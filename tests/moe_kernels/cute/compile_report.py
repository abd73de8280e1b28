"""Compiles kernels for sm_90a in a process of its own and prints, one JSON line each, what is in their machine code.

The compiler reads its target and what to keep when it is imported, so a test cannot do this in the process of another.
Usage: compile_report.py FILE, a JSON list of [form, contraction, columns, dtype, tile fields].
"""

import json
import os
import re
import struct
import sys
import tempfile
from pathlib import Path

_FRAME_SIZE = 0x11  # EIATTR_FRAME_SIZE: (symbol, bytes of local memory)
_SIZED_VALUE = 4  # EIFMT_SVAL
# Hopper's machine code: 128-bit instructions, whose lowest 12 bits are the opcode. WARPGROUP is one for two.
_PRODUCT, _WARPGROUP, _IS_WAIT = 0x9F0, 0x9C5, 1 << 47
_BRANCH, _WHILE_ANY_LANE = 0x947, 1 << 20  # the second in the upper half


def sections(cubin: bytes, prefix: bytes) -> list[bytes]:
    """Return the contents of those sections of ``cubin`` whose names start with ``prefix``."""
    assert cubin[:4] == b"\x7fELF"
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    names_at = entries[names][4]
    return [
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in entries
        if cubin.startswith(prefix, names_at + name)
    ]


def frame_bytes(cubin: bytes) -> int:
    """Return the most bytes of local memory that a kernel in ``cubin`` takes; anything above zero is a spill."""
    frames = []
    for info in sections(cubin, b".nv.info\0"):
        at = 0
        while at < len(info):
            kind, attribute, value = struct.unpack_from("<BBH", info, at)
            at += 4
            if kind == _SIZED_VALUE:
                if attribute == _FRAME_SIZE:
                    frames.append(struct.unpack_from("<II", info, at)[1])
                at += value
    assert frames, "no kernel in the cubin says how large its frame is"
    return max(frames)


def chains_per_product(cubin: bytes) -> float:
    """Return how many chains of products the machine code begins for each product.

    The products of a stage are one chain. Where ptxas finds that it must move accumulators, it says nothing and makes
    of every product a chain of its own, which the next one waits for.
    """
    words = [word for text in sections(cubin, b".text.") for word, _ in struct.iter_unpack("<QQ", text)]
    products = sum(word & 0xFFF == _PRODUCT for word in words)
    chains = sum(word & 0xFFF == _WARPGROUP and not word & _IS_WAIT for word in words)
    assert products > 0
    assert chains > 0
    return chains / products


def loops_over_lanes(cubin: bytes) -> int:
    """Return how many instructions of the machine code are repeated for each lane that has other operands.

    TMA takes its coordinates from uniform registers. Where ptxas cannot tell that all lanes have the same, it says
    nothing and puts such a loop around each copy: in an epilogue that is a good part of its time.
    """
    text = [pair for text in sections(cubin, b".text.") for pair in struct.iter_unpack("<QQ", text)]
    return sum(low & 0xFFF == _BRANCH and bool(high & _WHILE_ANY_LANE) for low, high in text)


def keeps_its_sums(ptx: str) -> bool:
    """Return whether every product adds to its accumulators from a chain's second k-tile on.

    A product takes its accumulate flag from a register. If tracing loses the change that a loop makes to the first
    one's, that register only ever holds 0, and every k-tile overwrites the last.
    """
    flags = set(re.findall(r"setp\.ne\.b32 p, (%r\d+), 0;\s*wgmma\.mma_async", ptx))
    return bool(flags) and all(re.search(rf"mov\.b32\s+{flag}, 1;", ptx) for flag in flags)


def main() -> None:
    os.environ["CUTE_DSL_ARCH"] = "sm_90a"
    os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
    os.environ["CUTE_DSL_NO_CACHE"] = "1"
    with tempfile.TemporaryDirectory() as dump:
        os.environ["CUTE_DSL_DUMP_DIR"] = dump
        import torch

        from moe_kernels.cute.build import build_kernel
        from moe_kernels.cute.compile import KernelKey
        from moe_kernels.cute.tiles import KernelForm, TileConfig

        for form, contraction, columns, dtype, tile in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
            key = KernelKey(
                form=KernelForm(form),
                contraction=contraction,
                columns=columns,
                dtype=getattr(torch, dtype),
                arch="sm90",
                tile=TileConfig(**tile),
            )
            kernel = build_kernel(key)
            ptx = kernel.__ptx__
            report = {
                "target": re.search(r"^\.target (\w+)", ptx, re.M).group(1),
                "wgmma": ptx.count("wgmma.mma_async"),
                "bulk_loads": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::cluster\.global", ptx)),
                "bulk_stores": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", ptx)),
                "bulk_adds": len(re.findall(r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\.shared\S*\.add", ptx)),
                "multicasts": ptx.count(".multicast::cluster"),
                "gathers": ptx.count("cp.async.cg.shared.global"),
                "claims": ptx.count("atom.global.inc"),
                "keeps_its_sums": keeps_its_sums(ptx),
                "frame_bytes": frame_bytes(kernel.__cubin__),
                "chains_per_product": chains_per_product(kernel.__cubin__),
                "loops_over_lanes": loops_over_lanes(kernel.__cubin__),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
