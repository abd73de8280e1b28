"""What is predicted beside what a step takes: bytes saved by autograd, bytes allocated by a whole step on the CPU, and
bytes that were measured on a GPU. On GPUs: python -m benchmarks.preflight_check."""

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from data.batch import Batch
from launch.activations import Sizes, block_memory, sizes_of
from launch.layout import layout_of
from launch.memory import Parts, peak, step_moments
from launch.preflight import compose_run
from model.attend import AttentionKernel
from model.block import DecoderBlock
from model.config import AttentionConfig, ModelConfig, MoEConfig, QKNorm, RoutingConfig
from model.decoder import Decoder
from model.rope import rotary_tables
from moe_kernels import BackendName, RoutingKind
from moe_kernels.dispatch import BACKENDS
from training.build import Kernels, build_model, choose_kernels
from training.config import ActivationCheckpointing, DeviceName, RunConfig
from training.optim import build_optimizer
from training.parallel import checkpoint_activations, compile_blocks
from training.step import MicroBatch, StepInput, train_step
from training.world import World, open_world

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Long rows and few experts: what the CPU's router keeps and a GPU's does not is small beside the rest.
STEP = (
    "model.vocab_size=512",
    "model.width=128",
    "model.num_layers=3",
    "model.moe.num_experts=4",
    "model.moe.experts_per_token=2",
    "model.moe.expert_width=128",
    "data.sequence_length=512",
    "model.max_positions=512",
    "train.micro_batch_sequences=2",
    "train.num_threads=1",
    "routing@model.moe.routing=top_k",
    "kernels.backend=portable",
    "parallel.compile=false",
)


def config_of(*overrides: str) -> RunConfig:
    return compose_run(list(overrides)).config


def kernels(backend: str = "cute_sm90", attention: str = "sdpa") -> Kernels:
    return Kernels(BACKENDS[BackendName(backend)], AttentionKernel(attention))


def predicted(config: RunConfig, *, gpus: int = 1, backend: str = "cute_sm90", is_compiled: bool = True) -> Parts:
    sizes = sizes_of(config, kernels(backend), is_compiled=is_compiled)
    num = config.train.global_batch_sequences // config.train.micro_batch_sequences // gpus
    return peak(step_moments(config, sizes, layout_of(config, gpus=gpus), num_micro_batches=num)).parts


# -- what autograd saves


def saved_bytes(run: Callable[[], Any], parameters: list[Tensor]) -> int:
    """Return the bytes of every storage that autograd keeps of ``run``, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it keeps its address from being used again
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


def one_block_sizes(model: ModelConfig, dtype: torch.dtype, **changes: Any) -> Sizes:
    """Return the sizes of two sequences of 64 tokens, uncompiled and not checkpointed but for ``changes``."""
    B, S = 2, 64
    sizes = Sizes(
        model=model,
        T=B * S,
        S=S,
        R=B * S * 2,
        c=dtype.itemsize,
        is_portable=True,
        is_compiled=False,
        checkpointing=ActivationCheckpointing.none,
        recompute_h=False,
        mask_documents=False,
        mask=0,
    )
    return replace(sizes, **changes)


def one_dense_layer(layer: int, *, dense_width: int, qk_norm: QKNorm = QKNorm.full_width) -> ModelConfig:
    """Return two layers of which ``layer`` is dense."""
    return ModelConfig(
        vocab_size=64,
        width=64,
        num_layers=2,
        dense_layers=[layer],
        dense_width=dense_width,
        attention=AttentionConfig(num_heads=6, num_kv_heads=3, head_width=24, qk_norm=qk_norm),
        moe=MoEConfig(num_experts=8, experts_per_token=2, expert_width=40, routing=RoutingConfig(tile_m=16)),
    )


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("qk_norm", QKNorm)
def test_an_uncompiled_block_keeps_what_autograd_saves(qk_norm: QKNorm, dtype: torch.dtype, recompute_h: bool) -> None:
    model = one_dense_layer(1, dense_width=96, qk_norm=qk_norm)
    s = one_block_sizes(model, dtype, recompute_h=recompute_h)
    B, S = 2, s.S
    torch.manual_seed(0)
    for layer in range(2):
        block = DecoderBlock(
            model,
            layer=layer,
            backend=BACKENDS[BackendName.portable],
            attention=AttentionKernel.sdpa,
            recompute_h=recompute_h,
        )
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        block = block.to(dtype)
        x_BSD = torch.randn(B, S, 64).to(dtype).requires_grad_()
        tables = rotary_tables(torch.arange(S), head_width=24, theta=1e4)
        routing = {"routing": RoutingKind.top_k, "seed": None}
        saved = saved_bytes(lambda: block(x_BSD, tables, **routing), list(block.parameters()))  # noqa: B023
        if dtype is torch.float32:
            saved -= tables.cos_SA.nbytes + tables.sin_SA.nbytes  # the decoder's, shared by all layers
        if layer == 0:
            # The router's kernel on a GPU keeps its logits alone; here softmax, entropies and masks are kept too.
            router = block.moe.router
            y_TD = torch.randn(B * S, 64).to(dtype).requires_grad_()
            of_router = saved_bytes(lambda: router(y_TD, **routing), list(router.parameters()))  # noqa: B023
            saved -= of_router - y_TD.nbytes - 4 * s.T * 8
        assert block_memory(s, layer).kept == pytest.approx(saved, rel=0.002)  # offsets, and sums of a sequence


@pytest.mark.parametrize("mode", [ActivationCheckpointing.elementwise, ActivationCheckpointing.selective])
def test_a_compiled_dense_block_keeps_what_its_checkpointing_says(mode: ActivationCheckpointing) -> None:
    model = one_dense_layer(0, dense_width=320)
    s = one_block_sizes(model, torch.bfloat16, is_compiled=True, checkpointing=mode)
    B, S = 2, s.S
    decoder = Decoder(model, backend=BACKENDS[BackendName.portable]).bfloat16()
    checkpoint_activations(decoder, mode)
    compile_blocks(decoder, backend="aot_eager")  # it divides forward and backward as Inductor does
    x_BSD = torch.randn(B, S, 64).bfloat16().requires_grad_()
    tables = rotary_tables(torch.arange(S), head_width=24, theta=1e4)
    block = decoder.blocks[0]
    owned = [*block.parameters(), tables.cos_SA, tables.sin_SA]
    saved = saved_bytes(lambda: block(x_BSD, tables, routing=RoutingKind.top_k, seed=None), owned)
    assert block_memory(s, 0).kept == saved


# -- what a whole step allocates


@pytest.fixture
def own_group() -> Iterator[World]:
    world = open_world(DeviceName.cpu)
    yield world
    world.close()


def allocated_bytes(config: RunConfig, world: World, *, in_evaluation: bool = False) -> int:
    """Return the most that is allocated at once in a step which is not the first, or in a batch of an evaluation.

    Parameters and moments are not counted.
    """
    model = build_model(config, choose_kernels(config, world), world)
    optimizer = build_optimizer(model, config.optim)
    shape = (config.train.micro_batch_sequences, config.data.sequence_length)
    ids_BS = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batch = Batch(ids_BS, ids_BS.roll(-1, 1), torch.zeros(shape, dtype=torch.int32))
    num = config.train.global_batch_sequences // config.train.micro_batch_sequences
    inputs = StepInput(micro_batches=[MicroBatch.of(batch, index) for index in range(num)])

    def step() -> None:
        train_step(
            model, optimizer, inputs, world=world, config=config.train, routing=RoutingKind.top_k, lap=lambda _: None
        )

    def evaluate() -> None:
        with torch.no_grad():
            model(batch.input_ids_BS, batch.labels_BS, routing=RoutingKind.top_k)

    step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()  # what an earlier test left would count as freed by this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        evaluate() if in_evaluation else step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16",),
        ("train.precision=bf16", "parallel.activation_checkpointing=elementwise"),
        ("train.precision=bf16", "parallel.activation_checkpointing=selective", "model.tie_embeddings=true"),
        ("train.precision=bf16", "parallel.activation_checkpointing=full", "model.moe.expert_width=512"),
        ("train.precision=bf16", "parallel.recompute_h=true", "train.global_batch_sequences=6"),
        ("train.precision=bf16", "parallel.blocks_per_unit=2"),
        ("train.precision=bf16", "parallel.reshard_after_forward=false"),
        ("train.precision=bf16", "parallel.reshard_after_forward=false", "parallel.gather_in_place=true"),
        ("train.precision=fp32",),
    ],
    ids=[
        *("none", "elementwise", "selective_tied", "full_wide", "recompute_h_accumulated", "two_blocks_a_unit"),
        *("gathered_once", "in_place", "fp32"),
    ],
)
@pytest.mark.usefixtures("small_parts_in_place")
def test_peak_is_within_a_tenth_of_what_a_step_allocates(overrides: tuple[str, ...], own_group: World) -> None:
    config = config_of(*STEP, "train.global_batch_sequences=2", *overrides)
    parts = predicted(config, backend="portable", is_compiled=False)
    assert (parts.in_place > 0) == config.parallel.gather_in_place
    # What is kept from step to step was there before.
    beyond_state = parts.total - parts.parameters - parts.moments - parts.libraries - parts.in_place
    assert beyond_state == pytest.approx(allocated_bytes(config, own_group), rel=0.1)


@pytest.mark.parametrize("reshards", ["true", "false"])
def test_an_evaluation_beside_a_graph_takes_what_a_forward_allocates(reshards: str, own_group: World) -> None:
    options = (*STEP, "train.precision=bf16", f"parallel.reshard_after_forward={reshards}")
    config = config_of(*options, "train.global_batch_sequences=2")
    recorded = config_of(*options, "train.global_batch_sequences=2", "parallel.cuda_graph=true")
    plain, beside = (predicted(c, backend="portable", is_compiled=False) for c in (config, recorded))
    measured = allocated_bytes(config, own_group, in_evaluation=True)
    libraries = beside.libraries - plain.libraries  # of the stream in which a graph is recorded
    assert libraries > 0
    assert beside.total - plain.total - libraries == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("backend", ["cute_sm90", "portable"])
def test_peak_is_within_a_tenth_of_what_an_h200_allocated(backend: str) -> None:
    record = json.loads((RESULTS / "2026-11-29_h200_train_step_sonic_1_4b.json").read_text(encoding="utf-8"))
    measured = max(line["memory/peak_gib"] for line in record["metrics"][backend] if "memory/peak_gib" in line)
    # What that run did not know yet is left out: its blocks were not compiled.
    overrides = [word for word in record["command"].split()[1:] if not word.startswith(("evaluation", "logging"))]
    parts = predicted(config_of(*overrides), backend=backend, is_compiled=False)
    assert parts.total / 2**30 == pytest.approx(measured, rel=0.1)


# -- what the parts follow from

LARGE = (
    "model=olmoe_1b_7b",
    "train.precision=bf16",
    "data.sequence_length=4096",
    "train.global_batch_sequences=32",
)


def test_more_processes_hold_less_state_each() -> None:
    on_two, on_eight = predicted(config_of(*LARGE), gpus=2), predicted(config_of(*LARGE), gpus=8)
    assert on_eight.parameters == on_two.parameters // 4 > 0
    assert on_eight.moments == on_two.moments // 4 == 2 * on_eight.parameters


def test_replicas_hold_as_much_as_fewer_processes() -> None:
    replicated = predicted(config_of(*LARGE, "parallel.shard_degree=2"), gpus=8)
    assert replicated.parameters == predicted(config_of(*LARGE), gpus=2).parameters


def test_gradients_that_wait_to_be_summed_are_whole() -> None:
    config = config_of(*LARGE)
    waiting = step_moments(
        config,
        sizes_of(config, kernels(), is_compiled=True),
        layout_of(config, gpus=4),
        num_micro_batches=2,
    )
    assert waiting[0].parts.unsummed == 4 * layout_of(config, gpus=4).total.whole
    summed = predicted(config_of(*LARGE, "parallel.sum_every_micro_batch=true"), gpus=4)
    assert summed.unsummed == 0
    assert summed.gradients >= 4 * layout_of(config, gpus=4).total.shard


def test_what_is_not_freed_after_the_forward_is_gathered_in_full() -> None:
    kept = predicted(config_of(*LARGE, "parallel.reshard_after_forward=false"), gpus=8)
    layout = layout_of(config_of(*LARGE), gpus=8)
    assert kept.gathered > 0.9 * 2 * layout.total.whole
    assert predicted(config_of(*LARGE), gpus=8).gathered < 0.2 * 2 * layout.total.whole


def test_two_blocks_a_unit_are_gathered_and_wait_to_be_summed_together() -> None:
    alone, pairs = (predicted(config_of(*LARGE, f"parallel.blocks_per_unit={number}"), gpus=8) for number in (1, 2))
    block = layout_of(config_of(*LARGE), gpus=8).blocks[0].whole
    assert pairs.gathered + pairs.reducing - alone.gathered - alone.reducing >= 2 * block
    assert pairs.parameters == alone.parameters


def test_blocks_that_others_read_are_those_of_the_units_at_work() -> None:
    plain, peers = (predicted(config_of(*LARGE, f"parallel.peer_copies={on}"), gpus=2) for on in ("false", "true"))
    layout = layout_of(config_of(*LARGE), gpus=2)
    ends = layout.embed.whole + layout.head.whole
    # Gathered in bf16: one block at work, the next on its way; micro-batches accumulate, so gradients go in fp32.
    expected = 2 * (ends + 2 * layout.units[0].whole) + 4 * (ends + layout.units[0].whole)
    assert peers.peers == expected
    assert peers.total - plain.total == expected
    assert predicted(config_of(*LARGE, "parallel.peer_copies=true"), gpus=1).peers == 0


def test_what_is_gathered_in_place_is_in_no_other_place() -> None:
    once = (*LARGE, "parallel.reshard_after_forward=false", "parallel.gather_in_place=true")
    layout = layout_of(config_of(*once), gpus=2)
    # All but norms, routers and attention's projections.
    assert 0.98 * layout.total.whole < layout.total.in_place < layout.total.whole
    in_place = predicted(config_of(*once), gpus=2)
    assert in_place.in_place == 2 * layout.total.in_place
    assert in_place.gathered < 0.05 * in_place.in_place
    peers = predicted(config_of(*once, "parallel.peer_copies=true"), gpus=2)
    assert peers.in_place == 0
    small = layout.units[0].whole - layout.units[0].in_place
    ends = layout.embed.whole + layout.head.whole
    places = 2 * layout.total.in_place + 2 * (ends - layout.embed.in_place - layout.head.in_place + 2 * small)
    assert peers.peers == places + 4 * (ends + layout.units[0].whole)


def test_documents_cost_a_bias_for_every_pair_of_positions_unless_attention_reads_blocks() -> None:
    config = config_of(*LARGE, "data.mask_documents=true")
    bias, blocks, none = (
        sizes_of(config_of(*LARGE) if name is None else config, kernels(attention=name or "sdpa"), is_compiled=True)
        for name in ("sdpa", "flex", None)
    )
    assert (bias.mask, blocks.mask, none.mask) == (2 * 4 * 4096 * 4096, 0, 0)
    layout = layout_of(config, gpus=8)
    totals = [
        peak(step_moments(config, sizes, layout, num_micro_batches=1)).parts.activations for sizes in (bias, blocks)
    ]
    assert totals[0] - totals[1] == bias.mask


@pytest.mark.parametrize("is_compiled", [False, True])
def test_every_further_recomputation_keeps_less(is_compiled: bool) -> None:
    sizes = sizes_of(config_of(*LARGE), kernels(), is_compiled=is_compiled)
    order = [ActivationCheckpointing[name] for name in ("none", "elementwise", "selective", "full")]
    kept = [block_memory(replace(sizes, checkpointing=mode), 0).kept for mode in order]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == sizes.stream == 2 * 4 * 4096 * 2048


def test_shards_are_those_that_torch_cuts() -> None:
    config = config_of(*STEP, "model.moe.num_experts=6")
    layout = layout_of(config, gpus=4)
    parameters = build_model(
        config_of(*STEP, "model.moe.num_experts=6", "train.precision=fp32"),
        kernels("portable"),
        World(rank=0, size=1, device=torch.device("cpu")),
    ).named_parameters()
    largest = sum(parameter.chunk(4, dim=0)[0].numel() for _, parameter in parameters)
    assert layout.total.shard == largest
