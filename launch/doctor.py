"""Looks a machine over before a run: ``python -m launch.doctor [--run-root runs] [--data PREPARED] [--network]``.

One line a check: ok, warn or FAIL, and what to do. Leaves with 1 if one failed. On a machine without GPUs it says so
and checks the rest. Nothing is changed but a file in run.root that is removed again and the cache of compiled kernels,
and nothing waits for ever. What a run needs is launch.preflight.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

from launch.gpu_checks import check_experts, check_group, check_links, check_rates
from launch.machine_checks import (
    check_data,
    check_disk,
    check_environment,
    check_network,
    check_nvidia_smi,
    check_python,
    check_shared_memory,
    check_software,
)
from launch.probes import Finding, ProgramError, Status, ask

_SHARED_MEMORY = Path("/dev/shm")


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yield the findings, each as soon as it is known."""
    yield from check_python()
    try:
        software = ask("software", timeout_s=120)
    except ProgramError as problem:
        yield Finding(
            status=Status.fail,
            name="torch",
            text=f"{problem}",
            advice="it cannot be imported here: install the project as README.md says",
        )
        return
    gpus = software["gpus"]
    yield from check_software(software)
    yield from check_nvidia_smi()
    yield from check_environment(os.environ, num_gpus=len(gpus), num_cores=os.cpu_count() or 1)
    yield from check_shared_memory(_SHARED_MEMORY, num_gpus=len(gpus))
    yield from check_links(gpus)
    if gpus:
        yield from check_rates(len(gpus))
    yield from check_experts("cuda:0" if gpus else "cpu")
    yield from check_group(len(gpus))
    yield from check_disk(options.run_root, needed_gib=options.needs_gib, write_bytes=options.write_mib * 2**20)
    if options.data is not None:
        yield from check_data(options.data)
    if options.network:
        yield from check_network()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--run-root", type=Path, default=Path("runs"), help="as run.root (default: runs)")
    parser.add_argument("--needs-gib", type=float, default=10.0, help="space to ask for in it (default: 10)")
    parser.add_argument(
        "--write-mib", type=int, default=512, help="to write there to see how fast it is (default: 512)"
    )
    parser.add_argument("--data", type=Path, help="a prepared folder, as data.root")
    parser.add_argument("--network", action="store_true", help="see whether Hugging Face and wandb can be reached")
    options = parser.parse_args(arguments)
    if not 0 <= options.needs_gib < inf:
        parser.error(f"--needs-gib {options.needs_gib} must be a number, 0 or more")
    if options.write_mib < 1:
        parser.error(f"--write-mib {options.write_mib} must be at least 1")
    return options


def main(arguments: list[str] | None = None, *, look: Callable[..., Iterator[Finding]] = examine) -> int:
    """Print a line a finding and return the exit status."""
    counts = dict.fromkeys(Status, 0)
    for finding in look(parse(arguments)):
        counts[finding.status] += 1
        print(finding, flush=True)
    print(f"{counts[Status.ok]} ok, {counts[Status.warn]} to look at, {counts[Status.fail]} failed")
    return 1 if counts[Status.fail] else 0


if __name__ == "__main__":
    sys.exit(main())
