"""What the command lines of benchmarks share: refusals that come before anything is measured."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks.shapes import MoEShape


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return argparse's ``type`` for names of ``known`` with commas between them."""
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not of {', '.join(names)}")
        return chosen

    return parse


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """Return argparse's ``type`` for numbers from ``least`` on."""

    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind.__name__}") from None
        if not number >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return parse


def output_file(text: str) -> Path:
    """Return the path of a file that can be written: argparse's ``type``, so that nothing is measured for nothing."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} is no file that can be written: a folder, or in none, or read-only")
    return path


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, which may be given again: argparse would drop all but the last."""
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="more overrides, as for train.py"
    )


def need_gpu() -> None:
    """Leave with an error where there is no GPU to time."""
    if not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device, and this benchmark times what runs on one")


def need_backends(names: Iterable[str], shapes: Iterable[MoEShape]) -> None:
    """Leave with the first reason why a backend cannot run one of ``shapes`` in bf16 on this GPU."""
    # Here, because how long these imports take is part of what cold_start.py times.
    from moe_kernels import BackendName  # noqa: PLC0415
    from moe_kernels.dispatch import BACKENDS, KernelUnavailable, check_runs  # noqa: PLC0415

    for name in names:
        for shape in shapes:
            sizes = {"D": shape.D, "N": shape.N, "E": shape.E}
            try:
                check_runs(BACKENDS[BackendName(name)], **sizes, dtype=torch.bfloat16, device=torch.device("cuda"))
            except KernelUnavailable as error:
                sys.exit(f"error: {error}")
