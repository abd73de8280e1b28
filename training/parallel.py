"""Applied to a model from outside: activation checkpointing, compilation, sharding. The only file that says FSDP.

In that order: what is recomputed is compiled with the block, and the hooks that gather and free its parameters stay
around the compiled code. Sharding is FSDP-2 (``fully_shard``): one unit for every ``parallel.blocks_per_unit`` blocks,
one for the embedding, one for the final norm with the head; where embedding and head are tied, one for all three.
The loss is already divided by the valid tokens of all processes, so gradients are summed over them, not averaged.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from model.decoder import Decoder
from model.moe import MoE
from training.compilations import require_compiler
from training.config import ActivationCheckpointing, ParallelConfig, Precision
from training.copy_in import gather_in, scatter_in
from training.exchange import GradientExchange, SumOfOne
from training.gather import Gather
from training.peer_copies import PeerMemory
from training.world import World

_LIBRARY = torch.library.Library("fsdp", "IMPL")
# FSDP's operators: their signatures, and what takes their place.
_COPIES: dict[str, tuple[str, Callable[..., Any]]] = {
    "all_gather_copy_in": (
        "(Tensor[] all_gather_inputs, Tensor all_gather_output, SymInt[] inp_split_sizes,"
        " SymInt all_gather_input_numel, SymInt rank) -> (Tensor, Tensor)",
        gather_in,
    ),
    "chunk_cat": ("(Tensor[] tensors, int dim, int num_chunks, *, Tensor(a!) out) -> ()", scatter_in),
}
DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
# What is kept, by name because not every build of torch has every attention operator: attention and the MoE op are the
# most expensive parts of a block, and the MoE op keeps x, h and the scores anyway.
_EXPENSIVE_OPS = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "flex_attention",
    "gristmill::flash_attention_4",
    "gristmill::moe_experts_fwd",
}
# Routing again would cost the host half a dozen launches a block, and what is kept instead is small: of what these
# operators return, compiled code keeps what the backward reads, the logits and the plan.
_ROUTING_OPS = {
    "aten::mm.dtype",  # the product of bf16 numbers that stays fp32: the router's logits
    "gristmill::weigh_and_choose",
    "gristmill::plan_from_mask",
    "gristmill::round_to_tiles",
}
_KEPT_OPS = _EXPENSIVE_OPS | _ROUTING_OPS
_PRODUCTS = {"aten::mm", "aten::addmm"}
LARGE_PART = 1 << 22  # values of one process's part of a parameter from which it is gathered in place
KEEPS_EVERY_NTH_PRODUCT = {ActivationCheckpointing.selective: 2, ActivationCheckpointing.elementwise: 1}


def build_parallel(
    make: Callable[[], Decoder],
    world: World,
    config: ParallelConfig,
    *,
    precision: Precision,
    seed: int,
    initialise: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Return the decoder that ``make`` builds, initialised from ``seed``, checkpointed, compiled and sharded.

    With one process and fp32 there is nothing to shard, and its parameters are plain tensors. ``initialise`` sets the
    values in place of ``init_weights``, which draws them on the CPU and takes minutes for billions.

    Raises: ValueError if the processes do not divide as ``config`` asks.
    """
    if world.size == 1 and precision is Precision.fp32:
        with world.device:
            model = make()
        if initialise is None:
            model.init_weights(seed)
        else:
            initialise(model)
        _rewrite_blocks(model, world, config)
        return model
    mesh = build_mesh(world, config)
    # On the meta device first: no process ever holds more than its own shards.
    with torch.device("meta"):
        model = make()
    _rewrite_blocks(model, world, config)
    gather = shard(model, mesh, config, dtype=DTYPES[precision])
    model.to_empty(device=world.device)
    if gather is not None:
        shards = mesh["shard"].size()
        gather.take(parameter for parameter in model.parameters() if gathers_in_place(parameter.shape, shards))
    if initialise is None:
        model.init_weights(seed, write=_write_shard)
    else:
        initialise(model)
    return model


def _write_shard(parameter: Tensor, value: Tensor) -> None:
    """Put this process's part of the whole ``value`` into a sharded parameter; every process has the same value."""
    assert isinstance(parameter, DTensor)
    whole = value.to(parameter.device, parameter.dtype)
    cut = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(cut.to_local())


def _rewrite_blocks(model: Decoder, world: World, config: ParallelConfig) -> None:
    checkpoint_activations(model, config.activation_checkpointing)
    if compiles(config, world.device):
        require_compiler(world.device)
        compile_blocks(model)


def compiles(config: ParallelConfig, device: torch.device) -> bool:
    """Say whether blocks are compiled: as ``parallel.compile`` says, by default on CUDA devices."""
    return device.type == "cuda" if config.compile is None else config.compile


def compile_blocks(model: Decoder, *, backend: str = "inductor") -> None:
    """Compile every block of ``model`` whole, for the shapes it meets; blocks that are alike share their code.

    As with checkpointing, ``forward`` is replaced: the block around it stays the module that is sharded later, and its
    hooks run outside of the compiled code. ``backend`` is torch.compile's.
    """
    # Blocks share one function: two kinds of blocks, in training, evaluation under two routings, and short batches.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)


def num_shards(config: ParallelConfig, num_processes: int) -> int:
    """Return how many processes hold one copy of the model between them.

    Raises: ValueError if ``parallel.shard_degree`` does not divide ``num_processes``.
    """
    shards = config.shard_degree or num_processes
    if num_processes % shards != 0:
        raise ValueError(f"parallel.shard_degree={shards} does not divide the {num_processes} processes of this run")
    return shards


def gathers_in_place(shape: Sequence[int], shards: int) -> bool:
    """Say whether ``parallel.gather_in_place`` has a parameter of that shape gathered where it is used."""
    # Others are padded, or cut along their width (there are more processes than experts), or not worth a message.
    return shape[0] % shards == 0 and prod(shape) // shards >= LARGE_PART


def check_expert_cut(shards: int, *, num_experts: int, gate_up_width: int, width: int) -> None:
    """Raise ValueError if ``shards`` processes are more than the experts and do not divide the experts' widths."""
    if shards > num_experts and (gate_up_width % shards != 0 or width % shards != 0):
        raise ValueError(
            f"{shards} processes share {num_experts} experts, so these are cut along their width, but "
            f"2 · model.moe.expert_width = {gate_up_width} and model.width={width} do not both divide by {shards}: "
            "lower parallel.shard_degree"
        )


def check_peer_copies(config: ParallelConfig, world: World) -> None:
    """Raise ValueError if ``parallel.peer_copies`` is asked of processes whose GPUs are not those of one host."""
    if not config.peer_copies:
        return
    shards, local = num_shards(config, world.size), int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.device.type != "cuda":
        raise ValueError(
            f"parallel.peer_copies=true copies between GPUs, and this run computes on the {world.device.type}: set "
            "parallel.peer_copies=false (parallel=one_host sets it and parallel.cuda_graph, parallel=fsdp neither)"
        )
    if local % shards != 0:
        raise ValueError(
            f"parallel.peer_copies=true copies between the GPUs of one host, which has {local} processes, and {shards} "
            f"hold a copy of the model between them: set parallel.shard_degree to a divisor of {local}, or "
            "parallel.peer_copies=false"
        )
    for other in range(torch.cuda.device_count()):
        if other != world.device.index and not torch.cuda.can_device_access_peer(world.device.index, other):
            raise ValueError(
                f"parallel.peer_copies=true, but {world.device} cannot read the memory of cuda:{other}: set "
                "parallel.peer_copies=false"
            )


def build_mesh(world: World, config: ParallelConfig) -> DeviceMesh:
    """Return a mesh of (replicas, shards) processes, or of shards alone where they hold one copy together.

    Raises: ValueError if the processes do not divide into groups of ``parallel.shard_degree``.
    """
    shards = num_shards(config, world.size)
    if shards == world.size:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(world.device.type, (world.size // shards, shards), mesh_dim_names=("replicate", "shard"))


def checkpoint_activations(model: Decoder, mode: ActivationCheckpointing) -> None:
    """Make every block of ``model`` recompute in the backward what ``mode`` says.

    ``forward`` is replaced on each block rather than the block wrapped, so that the names of its parameters, and with
    them checkpoints and initial values, stay what they are.
    """
    if mode is ActivationCheckpointing.none:
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode in KEEPS_EVERY_NTH_PRODUCT:
        options["context_fn"] = partial(_contexts, KEEPS_EVERY_NTH_PRODUCT[mode])
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def _contexts(nth: int) -> tuple[Any, Any]:
    """Return what a block's forward and its recomputation run in: the first product is kept, and each ``nth`` after.

    In order they are those of queries, keys and values, of attention's projection, and of a dense MLP its three.
    Source: torchtitan 0.2.2, distributed/activation_checkpoint.py, which keeps every second product.
    """
    products = {False: 0, True: 0}  # counted so far, in the forward and in the recomputation

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # FlexAttention is a higher-order operator, which has a name but no overloads.
        names = {op._name} if not isinstance(op, torch._ops.OpOverload) else {op._schema.name, op.name()}
        is_kept = not names.isdisjoint(_KEPT_OPS)
        if not is_kept and not names.isdisjoint(_PRODUCTS):
            is_kept = products[context.is_recompute] % nth == 0
            products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shard(model: Decoder, mesh: DeviceMesh, config: ParallelConfig, *, dtype: torch.dtype) -> Gather | None:
    """Shard ``model`` in place over ``mesh``: parameters stay fp32, are gathered and computed with in ``dtype``.

    Returns what gathers large parameters in place, if ``config`` asks for it: it takes them once they are on a device.

    Raises: ValueError if more processes share a copy than there are experts and the experts' widths do not divide.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the stream has the right dtype already, and rotary tables are fp32 on purpose
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    shards = mesh["shard"].size()
    copy_by_rows(mesh.device_type)
    blocks, size = list(model.blocks), config.blocks_per_unit
    units = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    for unit in units:
        fully_shard(
            unit,
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=_expert_placement(unit, shards),
            **options,
        )
    if model.lm_head is not None:
        fully_shard(model.embed, reshard_after_forward=config.reshard_after_forward, **options)
        # Its backward follows its forward at once: freeing the head's parameters in between would gather them twice.
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    # A tied embedding serves both ends of the forward, so it stays gathered in the root's unit.
    fully_shard(model, reshard_after_forward=False, **options)
    group = mesh["shard"].get_group()
    gather = gathered = memory = exchange = None
    if config.peer_copies and shards > 1:
        # Two memories: a block of one is free in the order of the stream in which parameters, or gradients, come there.
        gathered, memory = PeerMemory(group), PeerMemory(group)
    if config.gather_in_place or gathered is not None:
        gather = Gather(group, dtype, gathered)
    if (config.exchange_gradients or config.peer_copies) and shards > 1:
        exchange = GradientExchange(shards, dtype, memory)
    model.gradient_exchange = exchange  # type: ignore[assignment]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Their base classes are not public; FSDP calls them and asks nothing of their type.
            if gather is not None:
                module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            if exchange is not None:
                module.set_custom_reduce_scatter(exchange.for_unit())  # type: ignore[arg-type]
            elif shards == 1:
                module.set_custom_reduce_scatter(SumOfOne())  # type: ignore[arg-type]
            if mesh.size() > 1:  # for one process FSDP would divide by the factor in a tensor of its own
                module.set_gradient_divide_factor(1.0)
                # Without it gloo is asked for a scaled sum, which it does not have.
                module.set_force_sum_reduction_for_comms(True)
    _prefetch([unit[0] for unit in units], ceil(config.prefetch_blocks / size))
    return gather if config.gather_in_place else None


@cache
def copy_by_rows(device_type: str) -> bool:
    """Let FSDP fill its messages by copy_in.py in this process; return whether this torch's FSDP would.

    There is no public way to say so. The operators that FSDP calls are replaced if they are those that are known.
    """
    if not all(_schema_of(name) == f"fsdp::{name}{signature}" for name, (signature, _) in _COPIES.items()):
        return False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for name, (_, copy) in _COPIES.items():
            _LIBRARY.impl(name, copy, device_type.upper(), allow_override=True)
    return True


def _schema_of(name: str) -> str | None:
    operator = getattr(torch.ops.fsdp, name, None)
    return None if operator is None else str(operator.default._schema)


def _prefetch(firsts: list[Any], num_ahead: int) -> None:
    """Have each unit ask for the parameters of the next ``num_ahead`` it meets, forward and backward.

    ``firsts`` are the units' first blocks: the blocks of a unit are one to FSDP, whichever is named.
    """
    if num_ahead == 0:
        return
    for index, first in enumerate(firsts):
        first.set_modules_to_forward_prefetch(firsts[index + 1 : index + 1 + num_ahead])
        first.set_modules_to_backward_prefetch(firsts[max(0, index - num_ahead) : index][::-1])


def _expert_placement(unit: Sequence[nn.Module], shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Return where a unit's parameters are cut: experts along their width where there are fewer than processes.

    Source: torchtitan (b5bcd76), distributed/fsdp.py.
    """
    by_width: set[int] = set()
    for moe in (module for block in unit for module in block.modules() if isinstance(module, MoE)):
        num_experts, gate_up_width, width = moe.w_gate_up.shape
        if shards <= num_experts:
            continue
        check_expert_cut(shards, num_experts=num_experts, gate_up_width=gate_up_width, width=width)
        by_width |= {id(moe.w_gate_up), id(moe.w_down)}
    return lambda parameter: Shard(1) if id(parameter) in by_width else None


def synchronise_gradients(model: Decoder, is_due: bool, *, add_up: bool) -> None:
    """Sum gradients over processes in the next backward only if ``is_due``; until then they add up whole, in fp32.

    ``add_up`` says whether any of this step's do.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_due)
        exchange = getattr(model, "gradient_exchange", None)
        if exchange is not None:
            exchange.adds_up = add_up


def forget_forwards(model: Decoder) -> None:
    """Take back what forwards without a backward leave in FSDP: gathered parameters, and notes of their order.

    Only a backward clears the notes, from which it tells what to gather next. There is no public way to.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state: Any = module._get_fsdp_state()
            getattr(getattr(state, "_comm_ctx", None), "post_forward_order", []).clear()
            getattr(state._fsdp_param_group, "_post_forward_indices", []).clear()


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the joint norm of all gradients, over all processes: a plain scalar on the device."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
