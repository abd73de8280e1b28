"""A plan as text and as JSON. What its figures mean is in plan.py, memory.py and docs/preflight.md."""

from dataclasses import asdict, fields
from typing import Any

from launch.memory import Parts
from launch.plan import Plan

_GIB = 2**30
_LABELS = {
    "parameters": "parameters, fp32 shards",
    "moments": "optimiser's moments, shards",
    "gradients": "gradients, fp32 shards",
    "unsummed": "gradients waiting to be summed, whole",
    "gathered": "gathered parameters and their buffers",
    "reducing": "gradients being summed, and buffers",
    "activations": "activations",
    "workspace": "workspace of a block",
    "head": "logits and gradients of the head",
    "in_place": "parameters gathered in place",
    "peers": "blocks that other GPUs read",
    "libraries": "cuBLAS workspaces",
}


def as_text(plan: Plan, notes: list[str]) -> str:
    """Return the plan as tables for people."""
    return "\n\n".join(
        [_run(plan, notes), _memory(plan), _alternatives(plan), _imbalances(plan), _disk(plan), _time(plan)]
    )


def as_json(plan: Plan, notes: list[str]) -> dict[str, Any]:
    """Return the plan as JSON values; bytes are whole numbers."""
    return {
        "model": plan.name,
        "parameters": asdict(plan.count),
        "gpus": plan.gpus,
        "shards": plan.layout.shards,
        "notes": notes,
        "peak": {"moment": plan.peak.name, "bytes": plan.peak.parts.total, "parts": asdict(plan.peak.parts)},
        "moments": [{"moment": moment.name, "bytes": moment.parts.total} for moment in plan.moments],
        "assumed": {"context_bytes": plan.context_bytes, "fragmentation": plan.fragmentation},
        "needed_bytes": plan.needed,
        "gpu_bytes": plan.gpu_bytes,
        "fits": plan.fits,
        "alternatives": [asdict(other) | {"checkpointing": other.checkpointing.value} for other in plan.alternatives],
        "peak_if_summed_bytes": plan.peak_if_summed,
        "imbalances": [asdict(imbalance) for imbalance in plan.imbalances],
        "checkpoint_bytes": plan.checkpoint_bytes(),
        "tokens_per_step": plan.tokens_per_step,
        "tokens": plan.tokens,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "days": plan.days,
    }


def _run(plan: Plan, notes: list[str]) -> str:
    s, train, parallel = plan.sizes, plan.config.train, plan.config.parallel
    rows = [
        ("model", f"{plan.name}: {plan.count.total / 1e9:.2f}B parameters, {plan.count.active / 1e9:.2f}B active"),
        ("GPUs", f"{plan.gpus}, of which {plan.layout.shards} hold one copy between them"),
        (
            "step",
            f"{plan.tokens_per_step:,} tokens: {train.micro_batch_sequences} x {s.S} in a micro-batch, "
            f"{plan.num_micro_batches} a GPU",
        ),
        (
            "blocks",
            f"{train.precision.value}, {'compiled' if s.is_compiled else 'not compiled'}, experts on "
            f"{'portable' if s.is_portable else 'cute_sm90'}, checkpointing {parallel.activation_checkpointing.value}"
            f"{', h recomputed' if s.recompute_h else ''}",
        ),
        *(("note", note) for note in notes),
    ]
    return "\n".join(f"{label:<6}  {value}" for label, value in rows)


def _memory(plan: Plan) -> str:
    at_peak = plan.peak.parts
    lines = [f"{'peak memory of one GPU, GiB':<42}  at the peak  most of a step"]
    for field in fields(Parts):
        most = max(getattr(moment.parts, field.name) for moment in plan.moments)
        if most > 0:
            here = getattr(at_peak, field.name)
            lines.append(f"  {_LABELS[field.name]:<40}  {here / _GIB:11.2f}  {most / _GIB:14.2f}")
    allowance = plan.needed - at_peak.total
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines += [
        f"  {'allocated':<40}  {at_peak.total / _GIB:11.2f}  in the {plan.peak.name}",
        f"  {'assumed beyond that':<40}  {allowance / _GIB:11.2f}  context and NCCL {plan.context_bytes / _GIB:g} GiB, "
        f"fragmentation {plan.fragmentation:.0%} of the peak",
        f"  {'needed':<40}  {plan.needed / _GIB:11.2f}  of {plan.gpu_bytes / _GIB:g}: {verdict}",
    ]
    if plan.peak_if_summed is not None:
        label = "if parallel.sum_every_micro_batch=true"
        lines.append(f"  {label:<40}  {plan.peak_if_summed / _GIB:11.2f}  allocated, and more traffic")
    return "\n".join(lines)


def _alternatives(plan: Plan) -> str:
    lines = ["activation_checkpointing  recompute_h  kept by a block, MiB  allocated, GiB"]
    for other in plan.alternatives:
        fits = "" if plan.with_allowances(other.peak) <= plan.gpu_bytes else "  does not fit"
        lines.append(
            f"  {other.checkpointing.value:<22}  {str(other.recompute_h).lower():<11}  "
            f"{other.kept_per_block / 2**20:20.0f}  {other.peak / _GIB:14.2f}{fits}"
            f"{'  <- this run' if other.is_chosen else ''}"
        )
    return "\n".join(lines)


def _imbalances(plan: Plan) -> str:
    lines = ["load of the experts       tokens of the busiest  rows allocated  allocated, GiB"]
    lines += [
        f"  {load.name:<22}  {load.busiest:21,}  {load.rows:14,}  {load.peak / _GIB:14.2f}" for load in plan.imbalances
    ]
    lines.append("  Memory is the same: a layer allocates the rows that its routing can use at most. Time is not.")
    return "\n".join(lines)


def _disk(plan: Plan) -> str:
    lines = ["on disk, GiB, of all GPUs together"]
    lines += [f"  {size / _GIB:9.2f}  {what}" for what, size in plan.checkpoint_bytes().items()]
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    steps = plan.tokens / plan.tokens_per_step
    text = f"{plan.tokens / 1e9:,.3f}B tokens are {steps:,.0f} steps of the full batch"
    if plan.days is None:
        return f"{text}; for days give --throughput or --benchmark"
    assert plan.tokens_per_s_per_gpu is not None
    per_day = plan.tokens_per_s_per_gpu * plan.gpus * 86_400
    return (
        f"{text}, and {plan.days:,.2f} days at {plan.tokens_per_s_per_gpu:,.0f} tokens/s/GPU "
        f"({per_day / 1e9:,.1f}B tokens a day), without evaluation and saves"
    )
