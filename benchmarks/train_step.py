"""Times whole training steps: the model, batches, sharding and optimiser of ``train.py``, without a run folder.

    python -m benchmarks.train_step --shapes olmoe-1b-7b --backends cute_sm90,portable --compile --json F
    torchrun --nproc_per_node 2 -m benchmarks.train_step --shapes olmoe-1b-7b,sonic-7b --compile --json F

Every shape, routing, backend and checkpointing takes ``--warm-up`` steps, in which it compiles, and ``--steps`` timed
ones in windows of ``--window``; the host waits for the device at the end of a window only, and the median window is
reported. When all rows are timed, each is built again and two of its steps are profiled for the split of their time:
a profiler that has once run makes every launch of its process slower. Weights are drawn on the device; text is prepared
text (``python -m data.prepare``) unless ``--random-tokens`` says otherwise. MFU counts model FLOPs (model/counting.py)
against the card's dense bf16 peak: ``causal`` the half of attention's scores that the mask keeps, ``full`` all of them.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.options import add_overrides, output_file
from benchmarks.steps import Steps, check_run, compose_run, leaving_with_a_message
from benchmarks.timing import new_record, write_record
from model.counting import count_parameters, flops_per_token
from training.breakdown import Sizes
from training.compilations import count_compilations
from training.config import DeviceName, RunConfig
from training.environment import hide_objects
from training.metrics import SECONDS_PER_DAY
from training.profiling import Recording
from training.step_graph import STEPS_BEFORE_GRAPH
from training.world import World, open_world

SHAPES = {
    "olmoe-1b-7b": "olmoe_1b_7b",
    "sonic-7b": "sonic_7b",
    "sonic-1.4b": "sonic_1_4b_8_128",
    "qwen3-30b-a3b": "qwen3_30b_a3b",
    "tiny": "tiny",
}
# Dense bf16 with the power limit of the SXM modules, from NVIDIA's data sheets.
PEAK_FLOPS = {"H200": 989.4e12, "H100 80GB HBM3": 989.4e12, "B200": 2250e12}
PROFILED_STEPS = 2


class Choice(NamedTuple):
    """What one row is about, each by its name in the configuration."""

    shape: str
    routing: str
    backend: str
    checkpointing: str


def run_config(arguments: argparse.Namespace, choice: Choice, world: World) -> RunConfig:
    """Return the configuration of one row."""
    sequences = arguments.micro_batch_sequences
    overrides = [
        f"model={SHAPES[choice.shape]}",
        f"routing@model.moe.routing={choice.routing}",
        f"model.moe.routing.tile_m={arguments.tile_m}",
        f"data.root={arguments.data}",
        f"data.sequence_length={arguments.sequence_length}",
        f"kernels.backend={choice.backend}",
        f"train.micro_batch_sequences={sequences}",
        f"train.global_batch_sequences={sequences * arguments.accumulation * world.size}",
        f"train.precision={arguments.precision}",
        "train.num_steps=10000",  # a long run's learning rates
        "optim.lr=3e-4",
        f"parallel.activation_checkpointing={choice.checkpointing}",
        f"parallel.compile={str(arguments.compile).lower()}",
    ]
    if arguments.layers is not None:
        overrides.append(f"model.num_layers={arguments.layers}")
    return compose_run(*overrides, *arguments.set)


def measure(steps: Steps, arguments: argparse.Namespace, *, start_s: float) -> dict[str, Any]:
    """Return the row of one configuration; ``start_s`` is when its building began, by time.perf_counter."""
    world, config = steps.world, steps.config
    losses = [steps.take().losses.ce for _ in range(arguments.warm_up)]
    hide_objects()
    _wait(world)
    ready_s = time.perf_counter() - start_s
    compiled = count_compilations(steps.backend)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    windows_s = []
    for _ in range(arguments.steps // arguments.window):
        begin_s = time.perf_counter()
        losses += [steps.take().losses.ce for _ in range(arguments.window)]
        _wait(world)
        windows_s.append((time.perf_counter() - begin_s) / arguments.window)
    peak_bytes = steps.peak_bytes
    compiled_later = count_compilations(steps.backend)
    step_s = statistics.median(windows_s)
    tokens_per_s = steps.tokens / step_s
    return {
        "step_s": step_s,
        "window_step_s": windows_s,
        "tokens_per_s_per_gpu": tokens_per_s / world.size,
        "tokens_per_day": tokens_per_s * SECONDS_PER_DAY,
        **_mfu(config, tokens_per_s / world.size, world.device),
        "peak_gib": None if peak_bytes is None else peak_bytes / 2**30,
        "ready_s": ready_s,
        "compiled": compiled,
        "compiled_while_timed": {name: compiled_later[name] - number for name, number in compiled.items()},
        "losses": torch.stack(losses).tolist(),
    }


def _mfu(config: RunConfig, tokens_per_s: float, device: torch.device) -> dict[str, float | None]:
    """Return the share of the card's peak that the model's FLOPs take, None for a card that is not in the table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    flops = flops_per_token(config.model, sequence_length=config.data.sequence_length)
    conventions = {"mfu_causal": flops.causal, "mfu_full": flops.noncausal}
    return {key: None if peak is None else tokens_per_s * value / peak for key, value in conventions.items()}


def _split(steps: Steps, traces: Path | None) -> dict[str, Any] | None:
    """Return where the time of a step goes in the first process, from a profile; None in the others."""
    world, moe = steps.world, steps.config.model.moe
    recording = Recording(world.device) if world.is_first else None
    with nullcontext() if recording is None else closing(recording):
        if recording is not None:
            recording.warm()
        steps.take()
        if recording is not None:
            recording.begin()
        for _ in range(PROFILED_STEPS):
            steps.take()
        if recording is not None:
            recording.end()
    if recording is None:
        return None
    sizes = Sizes(num_experts=moe.num_experts, vocab_size=steps.config.model.vocab_size)
    with tempfile.TemporaryDirectory() as scratch:
        name = f"{steps.config.model.num_layers}x{steps.config.model.width}_{moe.routing.train.name}"
        stem = (traces or Path(scratch)) / f"{name}_{steps.backend.name}_{world.size}gpu"
        table = recording.write(stem, sizes, num_steps=PROFILED_STEPS)
    print(table.as_text(), flush=True)
    return {
        "step_s": table.step_s,
        "rows": table.rows,
        "communication_hidden_s": table.communication_hidden_s,
        "kernels": table.kernels,
    }


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    dist.barrier()


def describe(row: dict[str, Any]) -> str:
    """Return the line that is printed for ``row``."""
    mfu = "" if row["mfu_causal"] is None else f"  MFU {row['mfu_causal']:.1%} causal {row['mfu_full']:.1%} full"
    peak = "" if row["peak_gib"] is None else f"  peak {row['peak_gib']:.1f} GiB"
    return (
        f"{row['shape']:14s} {row['routing']:15s} {row['backend']:10s} {row['checkpointing']:11s}"
        f" {row['tokens_per_s_per_gpu']:9.0f} tokens/s/GPU"
        f"  {row['tokens_per_day'] / 1e9:.3f} B tokens/day{mfu}{peak}  step {row['step_s'] * 1e3:.1f} ms"
        f"  ready in {row['ready_s']:.0f} s  ce {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="olmoe-1b-7b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--routing", default="top_k,token_rounding", help="of configs/routing/")
    parser.add_argument("--backends", default="cute_sm90", help="of configs/kernels/")
    parser.add_argument("--data", default="prepared/state_of_the_union", help="a prepared folder (data.root)")
    parser.add_argument("--random-tokens", action="store_true", help="no text: tokens drawn uniformly")
    parser.add_argument("--layers", type=int, help="instead of the shape's, for a short test")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch-sequences", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a process in a step")
    parser.add_argument("--tile-m", type=int, default=128)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--checkpointing", default="selective", help="parallel.activation_checkpointing, several too")
    parser.add_argument("--compile", action="store_true", help="parallel.compile=true, else false")
    add_overrides(parser)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--window", type=int, default=5, help="steps between two waits for the device")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave the split of the time out")
    parser.add_argument("--traces", type=Path, help="folder that keeps the profiles' traces")
    parser.add_argument("--json", type=output_file, help="write everything here, after every row")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line in this process of possibly several."""
    arguments = build_parser().parse_args(argv)
    if arguments.warm_up < 1 or arguments.window < 1 or arguments.steps < 1 or arguments.steps % arguments.window:
        raise SystemExit("--warm-up and --window must be at least 1, and --steps a multiple of --window")
    if unread := [change for change in arguments.set if change.startswith(("run.", "data.root=", "model="))]:
        raise SystemExit(f"--set {' '.join(unread)} is not read here: the device is this machine's, the rest an option")
    if unknown := {name.strip() for name in arguments.shapes.split(",")} - set(SHAPES):
        raise SystemExit(f"--shapes knows {', '.join(SHAPES)}, not {', '.join(sorted(unknown))}")
    world = open_world(DeviceName.auto)
    record = new_record(arguments={name: str(value) for name, value in vars(arguments).items()}, rows=[])
    lists = (arguments.shapes, arguments.routing, arguments.backends, arguments.checkpointing)
    choices = [Choice(*names) for names in product(*(map(str.strip, names.split(",")) for names in lists))]
    with leaving_with_a_message():  # all of them before the first is measured
        configs = [run_config(arguments, choice, world) for choice in choices]
        for config in configs:
            check_run(config, world)
            if config.parallel.cuda_graph and arguments.warm_up <= STEPS_BEFORE_GRAPH:
                raise ValueError(f"with parallel.cuda_graph=true --warm-up must be at least {STEPS_BEFORE_GRAPH + 1}")
    for choice, config in zip(choices, configs, strict=True):
        with leaving_with_a_message():
            row = _row(arguments, choice, config, world)
        if world.is_first:
            record["rows"].append(row)
            print(describe(row), flush=True)
            write_record(record, arguments.json)
    for number, (choice, config) in enumerate(zip(choices, configs, strict=True) if arguments.profile else []):
        with leaving_with_a_message():
            time_split = _profile(arguments, choice, config, world)
        if world.is_first:
            record["rows"][number]["time"] = time_split
            write_record(record, arguments.json)
    world.close()
    return 0


def _profile(arguments: argparse.Namespace, choice: Choice, config: RunConfig, world: World) -> dict[str, Any] | None:
    steps = Steps(config, world, draws_on_device=True, random_tokens=arguments.random_tokens, records=False)
    for _ in range(arguments.warm_up):
        steps.take()
    hide_objects()
    if world.is_first:
        print(*choice, flush=True)
    time_split = _split(steps, arguments.traces)
    steps.close()
    return time_split


def _row(arguments: argparse.Namespace, choice: Choice, config: RunConfig, world: World) -> dict[str, Any]:
    start_s = time.perf_counter()
    steps = Steps(config, world, draws_on_device=True, random_tokens=arguments.random_tokens)
    measured = measure(steps, arguments, start_s=start_s)
    row = {
        **choice._asdict(),
        "backend": steps.backend.name,  # what auto stands for
        "gpus": world.size,
        "attention": steps.model.attention.value,
        "layers": config.model.num_layers,
        "parameters": count_parameters(config.model).total,
        "tokens_per_step": steps.tokens,
        "compile": arguments.compile,
        "text": "random tokens" if arguments.random_tokens else "prepared text",
        **measured,
    }
    steps.close()
    return row


if __name__ == "__main__":
    raise SystemExit(main())
