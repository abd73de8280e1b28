"""What tile padding costs, and what token rounding makes of it, against tokens per expert: a JSON and its picture.

    python -m benchmarks.rounding_sweep --json benchmarks/results/NAME.json --svg docs/token_rounding.svg

The shape is 7b-n256's with fewer and more tokens. Unused rows are counted in plans that our routing makes of random
logits, uniform and on top of Zipf(1.2) popularity; that needs no GPU. Where there is one, the whole layer, router to
router, is timed with top-K and with rounding too, as replays of CUDA graphs: up to 1024 tokens per expert the host
would take longer to launch the layer, call by call, than the device to compute it. The picture: rounding_plot.py.
"""

import argparse

import torch

from benchmarks.layer_inputs import make_inputs
from benchmarks.options import need_backends, output_file
from benchmarks.rounding_plot import draw
from benchmarks.shapes import SHAPES, MoEShape
from benchmarks.timing import graph_of, in_turns, new_record, write_record
from benchmarks.whole_layer import KINDS, TILE_M, count_tiles, make_router, ours, route
from moe_kernels import BackendName
from moe_kernels.dispatch import BACKENDS

BASE = SHAPES["7b-n256"]
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
LOADS = ("uniform", "zipf")
ROUNDS = 5


def count_point(shape: MoEShape, load: str, device: str) -> dict:
    """Return rows, tiles and the unused share of the tiles' rows under top-K and under rounding."""
    inputs = make_inputs(shape, load, seed=1, device=device)
    router = make_router(shape, inputs.router_ED)
    found: dict = {"tokens": shape.T, "tokens_per_expert": shape.T * shape.K / shape.E, "load": load}
    with torch.no_grad():
        for label, kind in KINDS.items():
            found[label] = count_tiles(route(router, inputs.x_TD, kind).routing.plan)
    return found


def time_point(shape: MoEShape, load: str, backend: str, point: dict) -> None:
    """Add to ``point`` the milliseconds of forward and backward of the whole layer under top-K and under rounding."""
    inputs = make_inputs(shape, load, seed=1)
    layers = {label: ours(shape, inputs, kind, BACKENDS[BackendName(backend)]) for label, kind in KINDS.items()}
    for label, ms in in_turns({label: graph_of(layer.both) for label, layer in layers.items()}, ROUNDS).items():
        point[label]["both_ms"] = ms


def sweep(record: dict, device: str, backend: str | None) -> None:
    """Fill ``record["points"]``; without a backend nothing is timed."""
    for load in LOADS:
        for T in TOKENS:
            shape = BASE._replace(T=T)
            point = count_point(shape, load, device)
            if backend is not None:
                time_point(shape, load, backend, point)
            record["points"].append(point)
            print({key: value for key, value in point.items() if key != "load"} | {"load": load}, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backend",
        choices=[name.value for name in BACKENDS],
        default="cute_sm90",
        help="times the steps; read where there is a GPU",
    )
    parser.add_argument("--json", type=output_file, required=True)
    parser.add_argument("--svg", type=output_file)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        need_backends([arguments.backend], [BASE])
    record = new_record(shape=BASE._asdict(), tile_m=TILE_M, backend=arguments.backend if on_gpu else None, points=[])
    sweep(record, "cuda" if on_gpu else "cpu", record["backend"])
    write_record(record, arguments.json)
    if arguments.svg is not None:
        arguments.svg.write_text(draw(record), encoding="utf-8")


if __name__ == "__main__":
    main()
