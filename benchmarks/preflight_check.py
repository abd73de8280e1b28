"""Compares what launch.preflight predicts with what torch's allocator gave, on one GPU.

    python -m benchmarks.preflight_check [--cases sonic_1_4b,olmoe_4_layers] [--backends cute_sm90,portable] [--json F]

Every case trains three steps on random ids in a process of its own; measured is the most that was allocated in the
second and third. ``reserved`` is what the allocator took for that, and ``context`` what the device holds besides: the
two allowances that preflight assumes. Nothing in preflight was fitted to any of these cases.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.options import output_file
from benchmarks.steps import Steps
from benchmarks.timing import new_record, write_record
from launch.plan import Plan, make_plan
from launch.preflight import compose_run
from training.build import Kernels
from training.world import open_world

_STEPS = 2  # after one that compiles
CASES: dict[str, tuple[str, ...]] = {
    "sonic_0_5b": (
        "model=sonic_0_5b_8_64",
        "routing@model.moe.routing=top_k",
        "data.sequence_length=4096",
        "train.micro_batch_sequences=4",
        "train.global_batch_sequences=4",
    ),
    "sonic_1_4b": (
        "model=sonic_1_4b_8_128",
        "data.sequence_length=4096",
        "train.micro_batch_sequences=8",
        "train.global_batch_sequences=8",
        "parallel.activation_checkpointing=selective",
    ),
    "sonic_1_8b_accumulated": (
        "model=sonic_1_8b_8_256",
        "data.sequence_length=4096",
        "train.micro_batch_sequences=4",
        "train.global_batch_sequences=8",
        "parallel.activation_checkpointing=elementwise",
    ),
    "olmoe_4_layers": (
        "model=olmoe_1b_7b",
        "model.num_layers=4",
        "data.sequence_length=4096",
        "train.micro_batch_sequences=4",
        "train.global_batch_sequences=4",
        "parallel.recompute_h=true",
    ),
    "olmoe_4_layers_uncompiled": (
        "model=olmoe_1b_7b",
        "model.num_layers=4",
        "data.sequence_length=4096",
        "train.micro_batch_sequences=4",
        "train.global_batch_sequences=4",
        "parallel.compile=false",
    ),
}


def measure(case: str, backend_name: str) -> dict[str, Any]:
    """Return what was predicted and measured for one case, bytes."""
    composed = compose_run([*CASES[case], "train.precision=bf16", f"kernels.backend={backend_name}", "run.device=cuda"])
    config = composed.config
    world = open_world(config.run.device)
    steps = Steps(config, world, draws_on_device=True, random_tokens=True)
    plan = make_plan(
        config,
        Kernels(steps.backend, steps.model.attention),
        name=composed.model_name,
        gpus=1,
        gpu_bytes=torch.cuda.get_device_properties(world.device).total_memory,
        context_bytes=0,
        fragmentation=0.0,
        tokens=None,
        tokens_per_s_per_gpu=None,
    )
    steps.take()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        steps.take()
    torch.cuda.synchronize()
    result = {"case": case, "backend": steps.backend.name, "overrides": list(CASES[case])} | _result(plan)
    steps.close()
    world.close()
    return result


def _result(plan: Plan) -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    measured = torch.cuda.max_memory_allocated()
    predicted = plan.peak.parts.total
    return {
        "predicted": predicted,
        "measured": measured,
        "ratio": predicted / measured,
        "moment": plan.peak.name,
        "reserved": torch.cuda.max_memory_reserved(),
        "context": total - free - torch.cuda.memory_reserved(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print a line a case; return 1 if a prediction is off by more than a tenth or a case failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preflight_check", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--backends", default="cute_sm90,portable")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("--alone", action="store_true", help="measure one case in this process and print its JSON")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(
            "error: torch finds no CUDA device to compare with; python -m launch.preflight predicts without one"
        )
    if options.alone:
        print(json.dumps(measure(options.cases, options.backends)), flush=True)
        return 0
    results: list[dict[str, Any]] = []
    gib = 2**30
    print(f"{'case':<26} {'backend':<10} predicted  measured  ratio  reserved  context  GiB; seconds")
    for case in options.cases.split(","):
        for backend in options.backends.split(","):
            start = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.preflight_check", "--alone", "--cases", case]
            done = subprocess.run([*command, "--backends", backend], stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                print(f"{case:<26} {backend:<10} failed with exit code {done.returncode}", flush=True)
                results.append({"case": case, "backend": backend, "failed": done.returncode})
                continue
            r = json.loads(done.stdout.strip().splitlines()[-1])
            results.append(r)
            print(
                f"{case:<26} {backend:<10} {r['predicted'] / gib:9.2f} {r['measured'] / gib:9.2f} {r['ratio']:6.3f} "
                f"{r['reserved'] / gib:9.2f} {r['context'] / gib:8.2f}  {time.perf_counter() - start:.0f} s, "
                f"{r['moment']}",
                flush=True,
            )
    write_record(new_record(rows=results), options.json)
    return int(any(abs(r.get("ratio", 0.0) - 1) > 0.1 for r in results))


if __name__ == "__main__":
    sys.exit(main())
