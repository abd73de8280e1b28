"""Compares the losses of two backends with the spread that another seed makes, on one GPU.

    python -m benchmarks.loss_parity --shape sonic-1.4b --layers 4 --json F

Both backends train in bf16 from the same weights on the same text, for ``--steps`` steps; four fp32 runs differ in
their seed alone. The distance of two runs is the mean over the steps of the absolute difference of their
cross-entropies. What has to hold: the backends are closer to each other than the two fp32 runs that are farthest apart.
"""

import argparse
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from benchmarks.options import add_overrides, output_file
from benchmarks.steps import Steps, compose_run, leaving_with_a_message
from benchmarks.timing import new_record, write_record
from benchmarks.train_step import SHAPES
from moe_kernels import BackendName
from training.config import DeviceName
from training.world import World, open_world


def losses_of(arguments: argparse.Namespace, world: World, *, backend: str, precision: str, seed: int) -> torch.Tensor:
    """Return the cross-entropy of each step of one run."""
    sequences = arguments.micro_batch_sequences
    overrides = [
        f"model={SHAPES[arguments.shape]}",
        f"model.num_layers={arguments.layers}",
        f"model.moe.routing.tile_m={arguments.tile_m}",
        f"routing@model.moe.routing={arguments.routing}",
        f"data.root={arguments.data}",
        f"data.sequence_length={arguments.sequence_length}",
        f"kernels.backend={backend}",
        f"train.micro_batch_sequences={sequences}",
        f"train.global_batch_sequences={sequences}",
        f"train.precision={precision}",
        f"train.seed={seed}",
        f"train.num_steps={arguments.steps}",
        f"optim.lr={arguments.lr}",
        "parallel.compile=false",
    ]
    steps = Steps(compose_run(*overrides, *arguments.set), world)
    losses = torch.stack([steps.take().losses.ce for _ in range(arguments.steps)]).double().cpu()
    steps.close()
    print(f"{backend:10s} {precision} seed {seed}: ce {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return losses


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the mean absolute difference of two runs' losses, in nats."""
    return float((left - right).abs().mean())


def compare(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the losses of all runs, their distances and whether the backends are close enough."""
    backends = {
        name: losses_of(arguments, world, backend=name, precision=arguments.precision, seed=0)
        for name in (arguments.backend, arguments.against)
    }
    seeds = [
        losses_of(arguments, world, backend=arguments.exact, precision="fp32", seed=seed)
        for seed in range(arguments.seeds)
    ]
    return judge(backends[arguments.backend], backends[arguments.against], seeds) | {
        "losses": {name: losses.tolist() for name, losses in backends.items()},
        "losses_of_seeds": [losses.tolist() for losses in seeds],
    }


def judge(judged: torch.Tensor, against: torch.Tensor, seeds: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the distances between the losses of all runs, and whether the two backends are close enough."""
    apart = distance(judged, against)
    spread = {f"{i}-{j}": distance(seeds[i], seeds[j]) for i, j in combinations(range(len(seeds)), 2)}
    return {
        "backends_nats": apart,
        "largest_of_seeds_nats": max(spread.values()),
        "holds": apart < max(spread.values()),
        "seeds_nats": spread,
        "precision_nats": distance(against, seeds[0]),
    }


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="sonic-1.4b")
    parser.add_argument("--layers", type=int, default=4)
    names = [name.value for name in BackendName]
    parser.add_argument("--backend", choices=names, default="cute_sm90", help="the one that is judged")
    parser.add_argument("--against", choices=names, default="portable", help="the one that it is judged by")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="of these two")
    parser.add_argument("--exact", choices=names, default="auto", help="backend of the fp32 runs")
    parser.add_argument("--routing", default="token_rounding", help="of configs/routing/")
    parser.add_argument("--data", default="prepared/state_of_the_union", help="a prepared folder (data.root)")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--micro-batch-sequences", type=int, default=4)
    parser.add_argument("--tile-m", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    add_overrides(parser)
    parser.add_argument("--json", type=output_file, help="write everything here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if the backends are close enough, else 1."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: it takes two to differ")
    world = open_world(DeviceName.auto)
    with leaving_with_a_message():
        result = compare(arguments, world)
    print(
        f"{arguments.backend} and {arguments.against}: {result['backends_nats']:.5f} nats apart; "
        f"fp32 seeds up to {result['largest_of_seeds_nats']:.5f}: {'holds' if result['holds'] else 'DOES NOT HOLD'}"
    )
    record = new_record(arguments={name: str(value) for name, value in vars(arguments).items()}, **result)
    write_record(record, arguments.json)
    world.close()
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
