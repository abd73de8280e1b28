"""From a configuration to the model on its device: what computes it is chosen once, here, and said in the log."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from model.attend import AttentionKernel, choose_attention
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import Backend, RoutingKind, resolve_backend
from training.config import RunConfig
from training.parallel import DTYPES, KEEPS_EVERY_NTH_PRODUCT, build_parallel, check_peer_copies, compiles
from training.step_graph import check_step_graph
from training.world import World

log = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """What computes the two most expensive parts of a block."""

    backend: Backend  # the experts
    attention: AttentionKernel


def choose_kernels(config: RunConfig, world: World) -> Kernels:
    """Return the backend and the attention that ``kernels`` names for this run's shape, and log both.

    Raises: KernelUnavailable if one cannot run, ValueError if the backend's tiles do not fit those that routing fills.
    """
    attention = choose_attention(
        config.kernels.attention,
        config.model,
        device=world.device,
        dtype=DTYPES[config.train.precision],
        mask_documents=config.data.mask_documents,
    )
    kernels = Kernels(_choose_backend(config, world), attention)
    mode = config.parallel.activation_checkpointing
    is_compiled = compiles(config.parallel, world.device)
    if attention is AttentionKernel.flex and mode in KEEPS_EVERY_NTH_PRODUCT and not is_compiled:
        log.warning(
            "FlexAttention makes all scores, S·S for every head, in blocks that are not compiled and recompute by "
            "parallel.activation_checkpointing=%s: parallel.compile=true is faster, and kernels.attention=sdpa too",
            mode.value,
        )
    return kernels


def build_model(
    config: RunConfig, kernels: Kernels, world: World, *, initialise: Callable[[Decoder], None] | None = None
) -> Decoder:
    """Return the run's decoder, initialised from ``train.seed``, checkpointed, compiled and sharded.

    ``initialise`` is that of ``build_parallel``.

    Raises: ValueError if the processes do not divide as ``parallel`` asks.
    """
    return build_parallel(
        lambda: Decoder(
            config.model,
            backend=kernels.backend,
            attention=kernels.attention,
            recompute_h=config.parallel.recompute_h,
        ),
        world,
        config.parallel,
        precision=config.train.precision,
        seed=config.train.seed,
        initialise=initialise,
    )


def check_world(config: RunConfig, world: World) -> None:
    """Raise ValueError if the processes of ``world`` on their devices cannot take the run's steps as it asks."""
    check_steps(config, world)
    check_peer_copies(config.parallel, world)


def check_steps(config: RunConfig, world: World) -> None:
    """Raise ValueError if processes on such devices cannot share the run's steps, or not record them as it asks."""
    check_division(config, world)
    check_step_graph(config, world)


def check_division(config: RunConfig, world: World) -> None:
    """Raise ValueError unless every process gets as many micro-batches of a step as the others."""
    micro = config.train.micro_batch_sequences
    for name, sequences in config.train.batch_sizes().items():
        if sequences % (micro * world.size) != 0:
            raise ValueError(
                f"a step of {name}={sequences} is {sequences // micro} micro-batches of train.micro_batch_sequences="
                f"{micro}, which {world.size} processes cannot share equally: make it a multiple of "
                f"{world.size * micro}"
            )


def _choose_backend(config: RunConfig, world: World) -> Backend:
    dtype = DTYPES[config.train.precision]
    problem = moe_problem(config.model, tokens=config.micro_batch_tokens, dtype=dtype, device=world.device)
    backend = resolve_backend(config.kernels.backend, problem)
    check_tiles(config, backend)
    return backend


def check_tiles(config: RunConfig, backend: Backend) -> None:
    """Raise ValueError if token rounding would fill tiles that ``backend`` does not have."""
    routing = config.model.moe.routing
    if routing.train is RoutingKind.token_rounding and routing.tile_m % backend.tile_m != 0:
        raise ValueError(
            f"model.moe.routing.tile_m={routing.tile_m} is not a multiple of the {backend.tile_m} rows of a tile in "
            f"backend {backend.name}: rounding to it would leave tiles half empty"
        )
