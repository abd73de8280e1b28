"""Measures candidate tiles of the Hopper kernels and writes the winners to moe_kernels/cute/tile_table.json.

    python -m benchmarks.tune_tiles --shapes olmoe,7b-n256 --json benchmarks/results/NAME.json

Offline, once for a GPU model: what a training run uses is the table in the repository, so every rank and every run
chooses alike. Candidates take turns, each after running untimed for as long, so that the card is as limited by its
power as a training step makes it, and each one's result is compared with the first one's before its time counts. The
table keeps the entries of other shapes.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.moe_layer import Layer, make_layer
from benchmarks.options import names_of, need_backends, need_gpu, output_file
from benchmarks.shapes import SHAPES, MoEShape
from benchmarks.timing import in_turns, new_record, write_record
from moe_kernels.cute.compile import KernelCache, KernelKey, default_cache_folder
from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.cute.tiles import TABLE, KernelForm, TileConfig, rows_bucket, rule_for, table_entries, why_invalid
from moe_kernels.side import GatheredSide

ARCH = "sm90"
ROUNDS, ROUND_MS = 5, 100.0
GATHER = {"producer_registers": 56, "consumer_registers": 224}
LOAD = {"producer_registers": 40, "consumer_registers": 232}


def candidates(form: KernelForm) -> list[TileConfig]:
    """Return the tiles worth measuring for ``form``: what compiled without spills and won somewhere, and its like."""
    rule = rule_for(form, contraction=0, columns=0)
    wide = {"columns": 256, "ping_pong": False}
    match form:
        case KernelForm.up | KernelForm.up_inference:
            in_turn = TileConfig(columns=192, ping_pong=True, stages=5, store_columns=32, store_sets=1, **GATHER)
            tiles = [
                TileConfig(**wide, stages=4, store_columns=32, store_sets=1, **GATHER),
                in_turn,
                replace(in_turn, cuts_last_column=True),
                replace(in_turn, columns=128, stages=6),
            ]
        case KernelForm.rows_matmul_k_major | KernelForm.rows_matmul_n_major:
            in_turn = TileConfig(columns=192, ping_pong=True, stages=5, store_columns=64, store_sets=1, **LOAD)
            tiles = [in_turn, replace(in_turn, stages=4), replace(in_turn, cuts_last_column=True)]
            tiles += [replace(in_turn, **wide, stages=4), replace(in_turn, **wide, stages=4, store_columns=32)]
        case KernelForm.down_backward:
            tiles = [
                rule,
                replace(rule, load_stages=2, own_slots=True),
                replace(rule, **wide, stages=3, load_stages=2, store_rows=None),
                replace(rule, columns=192, load_stages=2, **LOAD),
            ]
        case _:  # weight gradients
            tiles = [rule, replace(rule, store_columns=32, store_sets=2)]
            if form is KernelForm.weight_grad_right:
                tiles.append(replace(rule, rows=128, columns=256, store_sets=2))
    return [tile for tile in dict.fromkeys(tiles) if why_invalid(form, tile, ARCH) is None]


def make_step(form: KernelForm, backend: CuteSm90Backend, shape: MoEShape, layer: Layer) -> Callable[[], Tensor]:
    """Return a call of ``form`` whose result is its first output."""
    D, N = shape.D, shape.N
    plan, x, dout = layer.plan, layer.x_TD, layer.dout_TD
    generator = torch.Generator("cuda").manual_seed(2)

    def rows(width: int) -> Tensor:
        return torch.randn(plan.R, width, device="cuda", generator=generator, dtype=torch.bfloat16)

    match form:
        case KernelForm.up:
            return lambda: backend.up(x, layer.w_gate_up, plan)[0]
        case KernelForm.up_inference:
            return lambda: backend.up_inference(x, layer.w_gate_up, plan)
        case KernelForm.rows_matmul_k_major:
            a_RN = rows(N)
            return lambda: backend.rows_matmul(a_RN, layer.w_down.transpose(1, 2), plan)
        case KernelForm.rows_matmul_n_major:
            dh_R2N = rows(2 * N)
            return lambda: backend.rows_matmul(dh_R2N, layer.w_gate_up, plan)
        case KernelForm.down_backward:
            h_R2N, score_R = rows(2 * N), torch.rand(plan.R, device="cuda", generator=generator)
            return lambda: backend.down_backward(dout, h_R2N, layer.w_down, score_R, plan).dh_R2N
        case KernelForm.weight_grad_left | KernelForm.weight_grad_left_into:
            a_RN = rows(N)
            total = torch.zeros(shape.E, D, N, device="cuda") if form.accumulates else None
            return lambda: backend.weight_grad(dout, a_RN, plan, gathered=GatheredSide.left, into=total)
        case KernelForm.weight_grad_right | KernelForm.weight_grad_right_into:
            dh_R2N = rows(2 * N)
            total = torch.zeros(shape.E, 2 * N, D, device="cuda") if form.accumulates else None
            return lambda: backend.weight_grad(dh_R2N, x, plan, gathered=GatheredSide.right, into=total)


def compile_ahead(shape_names: list[str], forms: list[KernelForm]) -> None:
    """Compile all candidates into the cache on disk, in as many processes as there are cores."""
    keys = [
        KernelKey(form=form, contraction=X, columns=Y, dtype=torch.bfloat16, arch=ARCH, tile=tile)
        for name in shape_names
        for form in forms
        for X, Y in [form.widths(SHAPES[name].D, SHAPES[name].N)]
        for tile in candidates(form)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        list(processes.map(_compile, dict.fromkeys(keys)))


def _compile(key: KernelKey) -> None:
    KernelCache(default_cache_folder()).get(key)


def measure(form: KernelForm, shape_name: str, layer: Layer) -> list[dict]:
    """Return an entry for each candidate, fastest first."""
    shape = SHAPES[shape_name]
    steps: list[tuple[TileConfig, Callable[[], Tensor]]] = []
    expected = None
    for tile in candidates(form):
        step = make_step(form, CuteSm90Backend(choose=lambda *_, t=tile: t), shape, layer)
        result = step()
        if expected is None:
            expected = result.float()
        error = ((result.float() - expected).norm() / expected.norm()).item()
        assert error < 4e-3, f"{form.value} on {shape_name}: {tile} differs from the first candidate by {error:.1e}"
        steps.append((tile, step))
    contraction, columns = form.widths(shape.D, shape.N)
    times = in_turns({str(index): step for index, (_, step) in enumerate(steps)}, ROUNDS, ROUND_MS)
    entries = [
        {
            "arch": ARCH,
            "form": form.value,
            "contraction": contraction,
            "columns": columns,
            "rows_per_expert": layer.plan.R // layer.plan.E,
            "tile": asdict(tile),
            "shape": shape_name,
            "ms": round(ms, 4),
        }
        for (tile, _), ms in zip(steps, times.values(), strict=True)
    ]
    return sorted(entries, key=lambda entry: entry["ms"])


def _question(entry: dict) -> tuple:
    return entry["arch"], entry["form"], entry["contraction"], entry["columns"], rows_bucket(entry["rows_per_expert"])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="olmoe,7b-n256", help=f"of {', '.join(SHAPES)}")
    all_forms = [form.value for form in KernelForm]
    parser.add_argument("--forms", type=names_of(all_forms), default=",".join(all_forms))
    parser.add_argument("--json", type=output_file, required=True, help="write every measurement here")
    arguments = parser.parse_args()
    need_gpu()
    need_backends(["cute_sm90"], [SHAPES[name] for name in arguments.shapes])
    shape_names, forms = arguments.shapes, list(map(KernelForm, arguments.forms))
    compile_ahead(shape_names, forms)
    record = new_record(entries=[])
    winners = {_question(entry): entry for entry in table_entries()}
    for shape_name in shape_names:
        layer = make_layer(SHAPES[shape_name], "uniform", seed=1)
        for form in forms:
            entries = measure(form, shape_name, layer)
            record["entries"] += entries
            winners[_question(entries[0])] = entries[0]
            print(form.value, shape_name, [(e["tile"]["columns"], e["tile"]["stages"], e["ms"]) for e in entries])
            write_record(record, arguments.json)
        del layer
        torch.cuda.empty_cache()
    lines = ",\n".join(" " + json.dumps(entry) for entry in winners.values())
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
