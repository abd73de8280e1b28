"""Times the Hopper kernels alone and beside a kernel that holds some multiprocessors, with units claimed and dealt.

    python -m benchmarks.claimed_units --shapes olmoe,7b-n256 --held 16 --json benchmarks/results/NAME.json

In a training step NCCL's kernels hold multiprocessors when one of ours starts; here a kernel that only waits does, for
half and for all of the time that ours takes alone. Both orders have to give the same bits before their times count, and
they take turns, because a card under load changes its clocks.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from benchmarks.moe_layer import Layer, make_layer
from benchmarks.options import at_least, names_of, need_backends, need_gpu, output_file
from benchmarks.shapes import SHAPES
from benchmarks.timing import in_turns, new_record, write_record
from benchmarks.tune_tiles import make_step
from moe_kernels.cute.ops import CuteSm90Backend
from moe_kernels.cute.tiles import KernelForm, choose_tile

ROUNDS = 7
_HEAD_START_MS = 0.15  # in which the host gets ahead and the holder starts
_HEAD_START_CYCLES = 250_000


class Holder:
    """Holds ``num_held`` multiprocessors on a stream of its own: beside 16 warps there is no room for our blocks."""

    def __init__(self, num_held: int) -> None:
        from benchmarks.hold import hold  # noqa: PLC0415 - triton is not on machines without a GPU

        self._hold = hold
        self._num_held = num_held
        self._ends = torch.zeros(num_held, dtype=torch.int64, device="cuda")
        self._stream = torch.cuda.Stream()
        self._hold[(num_held,)](self._ends, 1000, num_warps=16)

    def time_beside(self, step: Callable[[], Tensor], held_ms: float) -> float:
        """Return the milliseconds of one ``step`` that starts while the holder has ``held_ms`` to go."""
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            self._hold[(self._num_held,)](self._ends, int((held_ms + _HEAD_START_MS) * 1e6), num_warps=16)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def measure(form: KernelForm, shape_name: str, layer: Layer, holder: Holder) -> list[dict]:
    """Return an entry for each order of units."""
    backends = {
        name: CuteSm90Backend(choose=lambda *widths, claims=claims: replace(choose_tile(*widths), claims_units=claims))
        for name, claims in (("claimed", True), ("dealt", False))
    }
    steps = {name: make_step(form, backend, SHAPES[shape_name], layer) for name, backend in backends.items()}
    used = layer.used if not form.is_weight_grad else None
    claimed, dealt = (step()[:used] for step in steps.values())
    assert torch.equal(claimed, dealt), f"{form.value} on {shape_name}: claimed and dealt units give different bits"
    del claimed, dealt
    alone = in_turns(steps, ROUNDS)
    return [
        {
            "shape": shape_name,
            "form": form.value,
            "units": name,
            "alone_ms": alone[name],
            "beside_half_ms": median(holder.time_beside(step, alone[name] / 2) for _ in range(ROUNDS)),
            "beside_ms": median(holder.time_beside(step, alone[name]) for _ in range(ROUNDS)),
        }
        for name, step in steps.items()
    ]


def main() -> None:
    """Run the command line."""
    forms = [form.value for form in KernelForm if not form.accumulates and form is not KernelForm.up_inference]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="olmoe,7b-n256", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--forms", type=names_of(forms), default=",".join(forms))
    parser.add_argument("--held", type=at_least(1), default=16, help="multiprocessors that the other kernel holds")
    parser.add_argument("--json", type=output_file, help="write everything here, after every form")
    arguments = parser.parse_args()
    need_gpu()
    need_backends(["cute_sm90"], [SHAPES[name] for name in arguments.shapes])
    record = new_record(held=arguments.held, entries=[])
    holder = Holder(arguments.held)
    for shape_name in arguments.shapes:
        layer = make_layer(SHAPES[shape_name], "uniform", seed=1)
        for form in map(KernelForm, arguments.forms):
            entries = measure(form, shape_name, layer, holder)
            for entry in entries:
                times = " ".join(f"{key} {entry[key]:.4f}" for key in ("alone_ms", "beside_half_ms", "beside_ms"))
                print(f"{shape_name:10s} {form.value:20s} {entry['units']:8s} {times}")
            record["entries"] += entries
            write_record(record, arguments.json)
        del layer
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
