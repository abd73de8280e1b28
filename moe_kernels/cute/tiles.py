"""TileConfig: the shape and schedule of a kernel's tiles, and which one a problem gets.

A choice is an entry of tile_table.json, which benchmarks.tune_tiles measures offline, or where that has none a rule.
Nothing is timed at run time, so all ranks run the same kernels.
"""

import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

TILE_ROWS = 128
TILE_DEPTH = 64  # contraction elements of a stage: one 128-byte swizzle atom of 16-bit values
ELEMENT_BYTES = 2
SHARED_MEMORY_BYTES = {"sm90": 232_448}  # what one block may use
TABLE = Path(__file__).with_name("tile_table.json")
_ALIGNMENT = 1024  # of the operands: what comes before them (barriers, units, tokens) takes whole multiples of it
_REGISTERS = {"sm90": 504}  # a scheduler's share for one producer and two consumer warps' lanes, in steps of 8


class KernelForm(Enum):
    """The grouped matrix products of the layer. What each computes: dispatch.Backend."""

    up = "up"
    up_inference = "up_inference"  # stores a alone
    rows_matmul_k_major = "rows_matmul_k_major"  # weights (E, Y, X): the contraction runs along memory
    rows_matmul_n_major = "rows_matmul_n_major"  # weights (E, X, Y)
    down_backward = "down_backward"
    weight_grad_left = "weight_grad_left"  # the left side is gathered
    weight_grad_right = "weight_grad_right"
    weight_grad_left_into = "weight_grad_left_into"  # adds to an fp32 tensor
    weight_grad_right_into = "weight_grad_right_into"

    @property
    def gathers(self) -> bool:
        """Whether an operand is gathered, which takes the producer more registers than TMA does."""
        return self not in (KernelForm.rows_matmul_k_major, KernelForm.rows_matmul_n_major)

    @property
    def is_weight_grad(self) -> bool:
        """Whether the contraction runs over rows."""
        return self.gathers_left or self in (KernelForm.weight_grad_right, KernelForm.weight_grad_right_into)

    @property
    def gathers_left(self) -> bool:
        """Whether it is a weight gradient whose left side is gathered."""
        return self in (KernelForm.weight_grad_left, KernelForm.weight_grad_left_into)

    @property
    def accumulates(self) -> bool:
        """Whether it adds to an fp32 output instead of writing one."""
        return self in (KernelForm.weight_grad_left_into, KernelForm.weight_grad_right_into)

    def widths(self, D: int, N: int) -> tuple[int, int]:
        """Return contraction and columns in a layer of widths D and N; in a weight gradient its two sides' widths."""
        match self:
            case KernelForm.rows_matmul_k_major:
                return N, D
            case KernelForm.rows_matmul_n_major | KernelForm.weight_grad_right | KernelForm.weight_grad_right_into:
                return 2 * N, D
            case _:
                return D, N

    @property
    def followers(self) -> "tuple[KernelForm, ...]":
        """The forms that a layer whose first kernel is of this form needs after it."""
        match self:
            case KernelForm.up:
                return (
                    KernelForm.rows_matmul_k_major,
                    KernelForm.down_backward,
                    KernelForm.weight_grad_left,
                    KernelForm.rows_matmul_n_major,
                    KernelForm.weight_grad_right,
                )
            case KernelForm.up_inference:
                return (KernelForm.rows_matmul_k_major,)
            case _:
                return ()

    @property
    def store_bytes(self) -> int:
        """Bytes of one value of the output."""
        return 4 if self.accumulates else ELEMENT_BYTES

    @property
    def num_stored(self) -> int:
        """How many tiles of values one sub-tile of the accumulator turns into, apart from those stored in place."""
        return 3 if self is KernelForm.up else 1

    @property
    def halves(self) -> int:
        """2 where gate and up columns share an accumulator, so that the output is half as wide."""
        return 2 if self in (KernelForm.up, KernelForm.up_inference) else 1


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One kernel's tiles. Two consumer warpgroups split a tile's rows, or (``ping_pong``) take turns on whole tiles."""

    columns: int  # of the accumulator: gate and up columns count both
    ping_pong: bool
    stages: int  # of the operand ring
    store_columns: int  # of a sub-tile of the epilogue
    store_rows: int | None = None  # of a sub-tile; None: all that a warpgroup has
    store_sets: int  # sub-tiles that may wait for their stores at a time
    load_stages: int = 0  # down_backward: sub-tiles of h that are loaded ahead
    producer_registers: int
    consumer_registers: int
    rows: int = TILE_ROWS
    own_slots: bool = False  # in ping-pong: each warpgroup has epilogue memory of its own
    cuts_last_column: bool = False  # a last column tile that is partly padding multiplies fewer columns
    claims_units: bool = True  # clusters claim units as they go along; else each has every so many of them

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one consumer warpgroup computes."""
        return self.rows if self.ping_pong else self.rows // 2

    @property
    def epilogues(self) -> int:
        """How many warpgroups may be in their epilogue at a time: in ping-pong they may share its memory, in turn."""
        return 1 if self.ping_pong and not self.own_slots else 2

    @property
    def row_blocks(self) -> int:
        """How many sub-tiles lie below each other in the part of the tile that one warpgroup computes."""
        return self.warpgroup_rows // self.store_rows if self.store_rows else 1


def shared_memory_bytes(form: KernelForm, tile: TileConfig) -> int:
    """Return the bytes of shared memory that a block of ``form`` asks for."""
    operands = tile.stages * (tile.rows + tile.columns) * TILE_DEPTH * ELEMENT_BYTES
    sub_tile = tile.epilogues * (tile.warpgroup_rows // tile.row_blocks) * tile.store_columns * form.store_bytes
    stored = tile.store_sets * form.num_stored * sub_tile
    loaded = tile.load_stages * 2 * sub_tile
    before = _ALIGNMENT * (3 if form.is_weight_grad else 2 if form.gathers else 1)
    return before + operands + stored + loaded


def why_invalid(form: KernelForm, tile: TileConfig, arch: str) -> str | None:
    """Return why ``tile`` cannot run ``form`` on ``arch``, or None: the one place that knows the limits."""
    used = shared_memory_bytes(form, tile)
    if used > SHARED_MEMORY_BYTES[arch]:
        return f"needs {used} bytes of shared memory, {arch} has {SHARED_MEMORY_BYTES[arch]}"
    if tile.producer_registers + 2 * tile.consumer_registers > _REGISTERS[arch]:
        return f"asks for {tile.producer_registers} + 2 x {tile.consumer_registers} registers of {_REGISTERS[arch]}"
    accumulators = tile.warpgroup_rows * tile.columns // 128
    if accumulators > 208:
        return f"holds {accumulators} accumulators a thread, more than fit beside the rest in 255 registers"
    if tile.store_columns % 16 != 0:
        return f"store_columns={tile.store_columns} must be a multiple of 16"
    if tile.columns > 256 or tile.columns % (form.halves * tile.store_columns) != 0:
        return f"columns={tile.columns} must be at most 256 and a multiple of {form.halves} x {tile.store_columns}"
    sub_tiles = tile.columns // (form.halves * tile.store_columns)
    if sub_tiles % tile.store_sets != 0:
        return f"store_sets={tile.store_sets} does not divide the {sub_tiles} sub-tiles"
    if tile.cuts_last_column and (form is KernelForm.down_backward or form.is_weight_grad):
        return f"{form.value} cannot cut the last column: its accumulators would keep what an earlier tile left there"
    if tile.store_rows is not None and (form is not KernelForm.down_backward or tile.store_rows != 64):
        return f"store_rows={tile.store_rows} must be None, or 64 in down_backward"
    if tile.warpgroup_rows % 64 != 0:
        return f"gives a warpgroup {tile.warpgroup_rows} rows, and a product has 64"
    if form.is_weight_grad:
        gathered = tile.rows if form.gathers_left else tile.columns
        if gathered not in (64, 128, 256):
            return f"gathers {gathered} values of a row, which a warp cannot share evenly"
        if tile.ping_pong:
            return f"{form.value} has no ping-pong: it lost by 5 to 60 % everywhere"
    if form is KernelForm.down_backward:
        if tile.store_sets < 2:
            return "down_backward needs store_sets >= 2"
        sub_tiles *= tile.row_blocks
        # With one stage a sub-tile would wait for a load that starts after it. Barriers' parities are constants: a
        # stage is loaded an even number of times a tile, or where tiles of the two alternate in it, any number.
        loads_per_tile, rest = divmod(sub_tiles, max(tile.load_stages, 1))
        if tile.load_stages < 2 or rest != 0 or (loads_per_tile % 2 != 0 and tile.epilogues == 2):
            return f"load_stages={tile.load_stages} must be at least 2 and divide the {sub_tiles} sub-tiles (evenly)"
    return None


def choose_tile(
    form: KernelForm, contraction: int, columns: int, rows_per_expert: int, *, arch: str = "sm90"
) -> TileConfig:
    """Return the tile measured for these widths at the nearest number of rows per expert, or the rule's.

    Widths decide more than rows do: a training step's micro-batch has half the tokens of the layers that were measured,
    and their tiles are its best too, where the rule's are up to a tenth slower.
    """
    measured = _table().get((arch, form.value, contraction, columns))
    if measured is None:
        return rule_for(form, contraction, columns)
    bucket = rows_bucket(rows_per_expert)
    return measured[min(measured, key=lambda other: (abs(other - bucket), other))]


def rule_for(form: KernelForm, contraction: int, columns: int) -> TileConfig:
    """Return the tile for these widths where no measurement says otherwise (docs/kernels.md has the measurements)."""
    gather: dict[str, Any] = {"producer_registers": 56, "consumer_registers": 224}
    load: dict[str, Any] = {"producer_registers": 40, "consumer_registers": 232}
    weight_grad: dict[str, Any] = {"ping_pong": False, **gather}
    match form:
        case KernelForm.up | KernelForm.up_inference:
            if columns >= 768:
                return TileConfig(columns=192, ping_pong=True, stages=5, store_columns=32, store_sets=1, **gather)
            if contraction >= 4096:  # a long way from epilogue to epilogue: the least traffic wins
                return TileConfig(columns=256, ping_pong=False, stages=4, store_columns=32, store_sets=1, **gather)
            return TileConfig(columns=128, ping_pong=True, stages=6, store_columns=32, store_sets=1, **gather)
        case KernelForm.rows_matmul_k_major | KernelForm.rows_matmul_n_major:
            return TileConfig(
                columns=192, ping_pong=True, stages=5, store_columns=64, store_sets=1, cuts_last_column=True, **load
            )
        case KernelForm.down_backward:
            deep: dict[str, Any] = {"store_columns": 32, "store_rows": 64, "store_sets": 2, "load_stages": 4}
            return TileConfig(columns=128, ping_pong=True, stages=5, **deep, **gather)
        case KernelForm.weight_grad_left:
            return TileConfig(columns=256, stages=4, store_columns=64, store_sets=2, **weight_grad)
        case KernelForm.weight_grad_right:
            return TileConfig(rows=256, columns=128, stages=4, store_columns=64, store_sets=1, **weight_grad)
        case KernelForm.weight_grad_left_into:  # values of twice the size: half the columns in as much memory
            return TileConfig(columns=256, stages=4, store_columns=32, store_sets=2, **weight_grad)
        case KernelForm.weight_grad_right_into:
            return TileConfig(rows=256, columns=128, stages=4, store_columns=32, store_sets=1, **weight_grad)


def rows_bucket(rows_per_expert: int) -> int:
    """Return the bucket of the table: rows per expert up to the next power of two share one."""
    return max(rows_per_expert - 1, 0).bit_length()


def table_entries() -> list[dict]:
    """Return the entries of tile_table.json as they are written there."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@cache
def _table() -> dict[tuple, dict[int, TileConfig]]:
    table: dict[tuple, dict[int, TileConfig]] = {}
    for e in table_entries():
        buckets = table.setdefault((e["arch"], e["form"], e["contraction"], e["columns"]), {})
        buckets[rows_bucket(e["rows_per_expert"])] = TileConfig(**e["tile"])
    return table
