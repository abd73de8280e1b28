"""Counts the bytes of one routed layer, held between forward and backward and at the peak: ours and peers.

    python -m benchmarks.memory --shapes 7b-n256,olmoe --backends cute_sm90,sonicmoe,scattermoe --json F

Each of our backends is measured with and without recompute_h. Per contender: what autograd saves, every storage once,
without and with the weights; what is asked of the allocator and still held between forward and backward, output not
counted; and the most that is held at once over both, above what stood before (inputs, weights, plan). ``counted_bytes``
is what ours should take by count. Uniform top-K routing, bf16; the allocator's rounding is not in the numbers. On a CPU
the profiler sees the allocations.
"""

import argparse
import gc
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.moe_layer import CONTENDERS, Contender, Layer, make_contender, make_layer
from benchmarks.options import names_of, need_backends, output_file
from benchmarks.peers import PEERS, Peer, available
from benchmarks.shapes import SHAPES, MoEShape
from benchmarks.timing import new_record, write_record
from moe_kernels import BackendName, moe_experts
from moe_kernels.dispatch import BACKENDS
from moe_kernels.testing import saved_for_backward

PAPER_SHAPES = [name for name in SHAPES if name.startswith(("1.4b", "7b", "30b", "120b"))]
_BETWEEN = "between forward and backward"


class LayerBytes(NamedTuple):
    """The bytes of one layer."""

    saved: int  # by autograd, weights not counted
    saved_with_weights: int
    held: int  # asked of the allocator in the forward and not returned, besides the output
    peak: int  # most held at once over forward and backward, output and gradients included


def make_contenders(name: str, layer: Layer, peers: dict[str, Peer]) -> list[Contender]:
    """Return the contender that a peer is, or the two that one of our backends makes."""
    contender = make_contender(name, layer, peers)
    assert contender is not None  # only routings other than top-K leave one out
    if name in peers:
        return [contender]
    backend, leaves = BACKENDS[BackendName(name)], contender.leaves
    recomputing = Contender(
        f"{name} recompute_h", leaves, lambda: moe_experts(*leaves, layer.plan, backend=backend, recompute_h=True)
    )
    return [contender, recomputing]


def measure(contender: Contender, dout_TD: Tensor) -> LayerBytes:
    """Return the bytes of one forward and backward, after one that compiles and tunes what has to be."""
    torch.autograd.grad(contender.forward(), contender.leaves, dout_TD)
    weights = {tensor.untyped_storage().data_ptr() for tensor in contender.leaves[1:3]}
    with saved_for_backward() as saved:
        out_TD = contender.forward()
    del out_TD
    with_weights = sum(saved.values())
    without = sum(size for address, size in saved.items() if address not in weights)
    measure_step = _measure_on_gpu if dout_TD.is_cuda else _measure_on_cpu
    return LayerBytes(without, with_weights, *measure_step(contender, dout_TD))


def _measure_on_gpu(contender: Contender, dout_TD: Tensor) -> tuple[int, int]:
    """Return held and peak bytes: what was asked of the caching allocator, before it rounds."""
    gc.collect()  # what an earlier contender left in a cycle would be freed in between, and be missing from both
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    out_TD = contender.forward()
    held = torch.cuda.memory_stats()["requested_bytes.all.current"] - before - out_TD.nbytes
    torch.autograd.grad(out_TD, contender.leaves, dout_TD)
    return held, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


def _measure_on_cpu(contender: Contender, dout_TD: Tensor) -> tuple[int, int]:
    """Return held and peak bytes from the allocations that the profiler saw."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out_TD = contender.forward()
        with record_function(_BETWEEN):
            pass
        torch.autograd.grad(out_TD, contender.leaves, dout_TD)
    now = held = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
        elif event.name() == _BETWEEN:
            held = now - out_TD.nbytes
    return held, peak


def counted_bytes(shape: MoEShape, rows: int, *, recompute_h: bool) -> LayerBytes:
    """Return what our layer should take with 16-bit values and ``rows`` allocated rows.

    Saved are x, h, the rows' scores and the plan; without the plan and x, which exist before, that is what is held. The
    peak is the highest of these moments; weight gradients stay once they are there, as do out and the scores:

        forward    h + a + y; h + y + out
        backward   h + dh + score·a; dh + score·a + dw_down; dh + rows of dx + dx; dh + dx + dw_gate_up

    What a backend needs beside them for a moment (parts of dscore: rows · N / 128 numbers) is not counted.
    """
    T, D, N, E, _ = shape
    x = out = dx = 2 * T * D
    h, a, y, scores = 4 * rows * N, 2 * rows * N, 2 * rows * D, 4 * rows
    dw_down, dw_gate_up, dscore = 2 * E * D * N, 4 * E * D * N, 4 * T * E
    plan = 4 * (3 * rows + (E + 1) + (T + 1))
    kept = 0 if recompute_h else h
    dh, scaled_a, rows_of_dx = h, a, y
    forward = max(kept + a + y, kept + y + out)
    gradients = dscore + dw_down
    backward = max(
        h + dh + scaled_a + dscore,
        dh + scaled_a + gradients,
        dh + rows_of_dx + dx + gradients,
        dh + dx + dw_gate_up + gradients,
    )
    saved = x + kept + scores + plan
    return LayerBytes(saved, saved + dw_down + dw_gate_up, kept + scores, scores + max(forward, out + backward))


def measure_shape(shape: MoEShape, names: list[str], peers: dict[str, Peer], device: torch.device) -> dict:
    """Return the bytes of every contender by its name, and of ours by count."""
    layer = make_layer(shape, "uniform", seed=0, device=device.type)
    results = {}
    for name in names:
        for contender in make_contenders(name, layer, peers):
            results[contender.name] = measure(contender, layer.dout_TD)
    for recompute_h in (False, True):
        label = "by count" + recompute_h * " recompute_h"
        results[label] = counted_bytes(shape, layer.plan.R, recompute_h=recompute_h)
    return results


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", type=names_of(SHAPES), default=",".join(PAPER_SHAPES), help=f"of {', '.join(SHAPES)}"
    )
    parser.add_argument(
        "--backends", type=names_of(CONTENDERS), default="cute_sm90", help=f"backends, and peers: {', '.join(PEERS)}"
    )
    parser.add_argument("--json", type=output_file, help="write everything here, after every shape")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names, peers = available(options.backends, tunes=False)
    if device.type == "cpu" and (others := set(names) - {"portable", "reference"}):
        parser.error(
            f"--backends {', '.join(sorted(others))}: torch finds no CUDA device to run them on; "
            "portable and reference run without one"
        )
    if not names:
        parser.error(f"none of --backends {','.join(options.backends)} is there to be measured")
    if device.type == "cuda":
        need_backends([name for name in names if name not in PEERS], [SHAPES[name] for name in options.shapes])
    record = new_record(shapes={})
    print(f"{'MiB':35s}     saved  with weights      held      peak")
    for shape_name in options.shapes:
        results = measure_shape(SHAPES[shape_name], names, peers, device)
        for label, result in results.items():
            saved, with_weights, held, peak = (value / 2**20 for value in result)
            print(f"{shape_name:12s} {label:22s} {saved:9.1f} {with_weights:13.1f} {held:9.1f} {peak:9.1f}", flush=True)
        record["shapes"][shape_name] = {label: result._asdict() for label, result in results.items()}
        write_record(record, options.json)
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
