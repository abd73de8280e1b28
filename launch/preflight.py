"""What a run will need, before there is a GPU: ``python -m launch.preflight <overrides of train.py> --gpus N``.

Prints peak memory by part, what each choice of activation checkpointing would change, tokens of a step, sizes on disk
and, with a throughput, days. Builds no model. Leaves with 0 if the run fits, 1 if it does not, 2 for a configuration
that train.py would refuse. How bytes are counted: memory.py and activations.py; what is printed: docs/preflight.md.
"""

import argparse
import json
import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from launch.plan import ThroughputError, make_plan, throughput_from
from launch.report import as_json, as_text
from model.attend import AttentionKernel, choose_attention
from model.counting import count_parameters
from model.flash_attention_4 import why_not_on_any_device
from model.moe import moe_problem
from moe_kernels import BackendName, KernelUnavailable, resolve_backend
from moe_kernels.dispatch import BACKENDS, Backend
from training.build import Kernels, check_steps, check_tiles
from training.config import CONFIGS, RunConfig, check_choices, register_schemas
from training.parallel import DTYPES, check_expert_cut, num_shards
from training.world import World

EXIT_FITS, EXIT_TOO_LARGE, EXIT_REFUSED = 0, 1, 2
_ARCH = "sm90"
_MOST = 1e18  # of anything that is asked for in numbers


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A configuration, and what its model is called in configs/model/."""

    config: RunConfig
    model_name: str


def compose_run(overrides: list[str]) -> Composed:
    """Return the configuration that ``train.py`` would run with these overrides.

    Raises: ValueError, AttributeError, HydraException or OmegaConfBaseException for one that it would refuse.
    """
    register_schemas()
    check_choices(overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        values = compose("train", overrides=overrides, return_hydra_config=True)
    model_name = str(values.hydra.runtime.choices["model"])
    with open_dict(values):
        del values["hydra"]
    config = OmegaConf.to_object(values)
    assert isinstance(config, RunConfig)
    return Composed(config=config, model_name=model_name)


def check_processes(config: RunConfig, gpus: int) -> None:
    """Raise ValueError if ``gpus`` processes cannot share the run's steps or its parameters, or not record steps."""
    check_steps(config, World(rank=0, size=gpus, device=torch.device("cuda")))
    moe = config.model.moe
    check_expert_cut(
        num_shards(config.parallel, gpus),
        num_experts=moe.num_experts,
        gate_up_width=2 * moe.expert_width,
        width=config.model.width,
    )


def planned_backend(config: RunConfig) -> tuple[Backend, str | None]:
    """Return the backend that computes the experts on Hopper GPUs, and why ``auto`` passed over the fastest one.

    Packages that are missing here are no reason: they are needed on the machine with the GPUs (doctor.py).
    Raises: ValueError or KernelUnavailable for a backend that cannot run the shape, or whose tiles do not fit.
    """
    dtype = DTYPES[config.train.precision]
    name = config.kernels.backend
    problem = moe_problem(config.model, tokens=config.micro_batch_tokens, dtype=dtype, device=torch.device("cpu"))
    problem = replace(problem, arch=_ARCH)
    if name is BackendName.reference:
        raise ValueError("kernels.backend=reference is slow and no part of a plan: use auto, portable or cute_sm90")
    fastest = BACKENDS[BackendName.cute_sm90]
    reason = fastest.why_not(problem)
    if reason is not None and "is not installed" in reason:
        reason = None
    refusal = None
    if reason is None and name in (BackendName.auto, BackendName.cute_sm90):
        backend = fastest
    else:
        if name is BackendName.auto:
            refusal = f"{fastest.name}: {reason}"
            name = BackendName.portable
        backend = resolve_backend(name, problem)
    check_tiles(config, backend)
    return backend, refusal


def planned_attention(config: RunConfig) -> AttentionKernel:
    """Return the kernel that computes attention on GPUs.

    Raises: KernelUnavailable for one that cannot, as far as that is known without the GPU.
    """
    name, masks = config.kernels.attention, config.data.mask_documents
    dtype, head_width = DTYPES[config.train.precision], config.model.attention.head_width

    def chosen(name: AttentionKernel) -> AttentionKernel:
        return choose_attention(name, config.model, device=torch.device("cuda"), dtype=dtype, mask_documents=masks)

    # Asked of sdpa, or of flash-attn-4 where it may do, choose_attention looks at the GPU.
    may_do = why_not_on_any_device(head_width, dtype=dtype, mask_documents=masks) is None
    if name is AttentionKernel.flex or (name is AttentionKernel.flash_attn_4 and not may_do):
        return chosen(name)
    if name is not AttentionKernel.auto:
        return name
    try:
        return chosen(AttentionKernel.flex) if masks else AttentionKernel.sdpa
    except KernelUnavailable:
        return AttentionKernel.sdpa


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight", description=__doc__.split("\n")[0])
    parser.add_argument("overrides", nargs="*", help="as for train.py: model=olmoe_1b_7b train.precision=bf16 ...")
    parser.add_argument("--gpus", type=int, required=True, help="processes of the run, one a GPU")
    parser.add_argument(
        "--gpu-memory-gib", type=float, default=139.0, help="of one GPU (default: 139, what an H200 has for torch)"
    )
    parser.add_argument("--tokens", type=float, help="budget in tokens (default: what the configuration trains on)")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--throughput", type=float, help="tokens per second and GPU")
    speed.add_argument("--benchmark", type=Path, help="a JSON of benchmarks/train_step.py to read the throughput from")
    parser.add_argument("--shape", help="the benchmark's name for the model (default: whatever has as many parameters)")
    parser.add_argument(
        "--context-gib", type=float, help="assumed: CUDA context and kernels, NCCL (default: 1, of several GPUs 3)"
    )
    parser.add_argument(
        "--fragmentation", type=float, default=0.05, help="assumed: share of the peak that the allocator loses"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_intermixed_args(arguments)
    for name, is_above_zero in (
        ("gpus", True),
        ("gpu_memory_gib", True),
        ("tokens", True),
        ("throughput", True),
        ("context_gib", False),
        ("fragmentation", False),
    ):
        value = getattr(options, name)
        if value is not None and not (0 <= value <= _MOST and (value > 0 or not is_above_zero)):
            least = "above 0" if is_above_zero else "0 or more"
            parser.error(f"--{name.replace('_', '-')} {value} must be a number, {least} and at most {_MOST:.0e}")
    if options.shape is not None and options.benchmark is None:
        parser.error("--shape names a row of a benchmark: give --benchmark too")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of a run and return the exit status."""
    options = parse(arguments)
    logging.basicConfig(level=logging.ERROR)
    try:
        composed = compose_run(options.overrides)
        config = composed.config
        check_processes(config, options.gpus)
        backend, refusal = planned_backend(config)
        kernels = Kernels(backend, planned_attention(config))
        throughput, source = options.throughput, None
        if options.benchmark is not None:
            throughput, source = throughput_from(
                options.benchmark,
                shape=options.shape or composed.model_name,
                num_parameters=None if options.shape else count_parameters(config.model).total,
                gpus=options.gpus,
                routing=config.model.moe.routing.train.name,
                backend=backend.name,
            )
    except AttributeError as problem:  # what OmegaConf raises for a key that +key=value added
        return _refuse(f"{problem}; a key cannot be added with +, it needs a field in a dataclass")
    except (ValueError, OSError, KernelUnavailable, ThroughputError, HydraException, OmegaConfBaseException) as problem:
        return _refuse(f"{problem} {problem.__cause__ or ''}".strip())
    context_gib = options.context_gib if options.context_gib is not None else (3.0 if options.gpus > 1 else 1.0)
    plan = make_plan(
        config,
        kernels,
        name=composed.model_name,
        gpus=options.gpus,
        gpu_bytes=int(options.gpu_memory_gib * 2**30),
        context_bytes=int(context_gib * 2**30),
        fragmentation=options.fragmentation,
        tokens=options.tokens,
        tokens_per_s_per_gpu=throughput,
    )
    notes = config.warnings()
    if config.parallel.peer_copies and num_shards(config.parallel, options.gpus) > 1:
        notes.append("parallel.peer_copies: the GPUs that hold a copy between them have to be on one host")
    if source:
        notes.append(source)
    if refusal:
        notes.append(f"backend {backend.name}, refused {refusal}")
    print(json.dumps(as_json(plan, notes), indent=2) if options.json else as_text(plan, notes))
    return EXIT_FITS if plan.fits else EXIT_TOO_LARGE


def _refuse(problem: object) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
