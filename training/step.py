"""One optimiser step: micro-batches in, updated parameters out, with every number that a log line needs.

The loop around it is in trainer.py; the losses' formulas are in model/losses.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import record_function

from data.batch import IGNORED_LABEL, Batch
from model.decoder import Decoder, DecoderOutput
from model.documents import Documents
from model.losses import (
    global_load_balance_loss,
    load_fraction,
    micro_batch_load_balance_loss,
    router_z_loss,
    sequence_load_balance_loss,
)
from model.moe import MoEStats
from model.router import updated_expert_bias
from moe_kernels import RoutingKind
from training.breakdown import CLIP
from training.config import BalanceScope, TrainConfig
from training.load import ExpertLoad
from training.optim import clipped_step
from training.parallel import gradient_norm, synchronise_gradients
from training.world import World


class MicroBatch(NamedTuple):
    """One forward's batch, and the global index of its first sequence.

    The index seeds stochastic rounding, so that a micro-batch is rounded alike whichever process computes it, and when.
    """

    batch: Batch
    first_sample: Tensor  # an int64 scalar on the batch's device

    @classmethod
    def of(cls, batch: Batch, first_sample: int) -> "MicroBatch":
        """Return the micro-batch whose first sequence has that index.

        A tensor, because compiled code is made anew for every value of a number, and a recorded step reads its inputs
        on the device; filled there, because a copy from the host would wait.
        """
        return cls(batch, torch.full((), first_sample, dtype=torch.int64, device=batch.input_ids_BS.device))

    def rounding_seed(self, seed: int) -> Tensor:
        """Return the seed of its rounding in the run with ``train.seed`` = ``seed``: an int64 scalar on its device."""
        return self.first_sample + (seed << 40)

    @property
    def num_tokens(self) -> int:
        """T, the tokens of the micro-batch."""
        return self.batch.input_ids_BS.numel()


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What an optimiser step reads besides the model.

    ``micro_batches`` are this process's; every process has as many. ``previous_count_LE`` are the top-K counts of the
    step before, None in the first; only ``BalanceScope.global_step`` reads them. ``mask_documents`` is the data's.
    """

    micro_batches: Sequence[MicroBatch]
    previous_count_LE: Tensor | None = None
    mask_documents: bool = False


class Losses(NamedTuple):
    """The losses of one step, scalars on the device; ``total`` alone is weighted and summed."""

    ce: Tensor  # nats per valid token, over all micro-batches
    load_balance: Tensor  # 1 when balanced; mean over layers and micro-batches
    router_z: Tensor  # mean over tokens, layers and micro-batches
    total: Tensor


class Accumulated(NamedTuple):
    """What the forwards and backwards of a step leave behind on the device, besides the gradients.

    Of this process, one entry for each of its micro-batches.
    """

    num_valid: Tensor  # labels that count, over all processes
    losses: list[Losses]
    loads: list[ExpertLoad]


Lap = Callable[[str], None]
Accumulate = Callable[[StepInput, Lap], Accumulated]


class StepResult(NamedTuple):
    """What one optimiser step leaves behind besides the parameters; nothing of it is on the host yet."""

    losses: Losses
    grad_norm: Tensor  # before clipping; where it is not finite, parameters and optimiser were left as they were
    num_valid: Tensor  # labels that count, over all processes
    load: ExpertLoad


def train_step(
    model: Decoder,
    optimizer: Optimizer,
    step_input: StepInput,
    *,
    world: World,
    config: TrainConfig,
    routing: RoutingKind,
    lap: Lap,
    sum_every_micro_batch: bool = False,
    run: Callable[[Accumulate, StepInput, Lap], Accumulated] | None = None,
) -> StepResult:
    """Return the losses, gradient norm and expert load of one optimiser step, over all processes.

    The cross-entropy of every micro-batch is divided by the valid tokens of all of them in all processes, so that the
    gradient is the one of a single large batch whatever the split. ``lap`` is called with the name of each part of the
    step that has just ended. ``sum_every_micro_batch`` is that of ParallelConfig. ``run`` calls the forwards and
    backwards, or stands for them (step_graph.py).

    The host waits for nothing that the device computes. A gradient norm that is not finite leaves the parameters, the
    optimiser and the balancing biases as they were; who has to know of it asks training/guard.py.
    """
    optimizer.zero_grad(set_to_none=True)
    accumulate = partial(
        _accumulate, model, world=world, config=config, routing=routing, sum_every_micro_batch=sum_every_micro_batch
    )
    done = accumulate(step_input, lap) if run is None else run(accumulate, step_input, lap)
    summed = Losses(*world.sum(torch.stack([torch.stack(losses) for losses in done.losses]).sum(0)))
    load = ExpertLoad.sum(done.loads).over(world)
    with record_function(CLIP):
        grad_norm = gradient_norm(model)
    is_finite = clipped_step(optimizer, grad_norm, config.max_grad_norm)
    _move_expert_bias(model, load.top_k_count_LE, config.expert_bias_rate, is_finite)
    lap("optimizer")
    # A copy: with ``run`` the tensor may be filled again by the next step.
    return StepResult(losses=summed, grad_norm=grad_norm, num_valid=done.num_valid.clone(), load=load)


def _accumulate(
    model: Decoder,
    step_input: StepInput,
    lap: Lap,
    *,
    world: World,
    config: TrainConfig,
    routing: RoutingKind,
    sum_every_micro_batch: bool,
) -> Accumulated:
    """Leave the step's gradients, summed over processes, in the parameters, which have none before."""
    micro_batches = step_input.micro_batches
    num_valid = world.sum(
        torch.stack([(micro.batch.labels_BS != IGNORED_LABEL).sum() for micro in micro_batches]).sum()
    )
    fraction_LE = _global_load_fraction(model, step_input, world=world, config=config, routing=routing)
    balance = _Balance(config.balance_scope, model.config.moe.experts_per_token, fraction_LE)
    parts: list[Losses] = []
    loads: list[ExpertLoad] = []
    last = len(micro_batches) - 1
    for index, micro in enumerate(micro_batches):
        is_due = sum_every_micro_batch or index == last
        synchronise_gradients(model, is_due, add_up=last > 0 and not sum_every_micro_batch)
        output = _forward(model, micro, step_input, config=config, routing=routing)
        losses = _losses(
            output,
            num_valid=num_valid,
            num_tokens=micro.num_tokens,
            num_micro_batches=len(micro_batches) * world.size,
            balance=balance,
            config=config,
        )
        lap("forward")
        losses.total.backward()
        lap("backward")
        parts.append(Losses(*(loss.detach() for loss in losses)))
        tile_m = model.config.moe.routing.tile_m
        loads.append(ExpertLoad.of(output.moe, num_tokens=micro.num_tokens, tile_m=tile_m))
    return Accumulated(num_valid, parts, loads)


def documents_to_mask(batch: Batch, *, mask_documents: bool) -> Documents | None:
    """Return what the model needs to keep attention inside the batch's documents; None where it should not."""
    return Documents(batch.document_BS, batch.positions()) if mask_documents else None


def _forward(
    model: Decoder, micro: MicroBatch, step_input: StepInput, *, config: TrainConfig, routing: RoutingKind
) -> DecoderOutput:
    output: DecoderOutput = model(
        micro.batch.input_ids_BS,
        micro.batch.labels_BS,
        routing=routing,
        seed=micro.rounding_seed(config.seed),
        documents=documents_to_mask(micro.batch, mask_documents=step_input.mask_documents),
    )
    return output


class _Balance(NamedTuple):
    scope: BalanceScope
    experts_per_token: int
    fraction_LE: Tensor | None  # of BalanceScope.global_step

    def loss(self, stats: MoEStats, *, num_tokens: int) -> Tensor:
        """Return the load-balancing loss of one micro-batch: 1 when balanced, mean over layers."""
        if self.fraction_LE is not None:
            return global_load_balance_loss(self.fraction_LE, stats.prob_sum_BE, num_tokens=num_tokens)
        by_scope = {
            BalanceScope.micro_batch: micro_batch_load_balance_loss,
            BalanceScope.sequence: sequence_load_balance_loss,
        }
        return by_scope[self.scope](stats.top_k_count_BE, stats.prob_sum_BE, K=self.experts_per_token)


def _losses(
    output: DecoderOutput,
    *,
    num_valid: Tensor,
    num_tokens: int,
    num_micro_batches: int,
    balance: _Balance,
    config: TrainConfig,
) -> Losses:
    """Return one micro-batch's share of the step's losses."""
    assert output.ce_sum is not None
    ce = output.ce_sum / num_valid
    load_balance = balance.loss(output.moe, num_tokens=num_tokens) / num_micro_batches
    router_z = router_z_loss(output.moe.z_sum, num_tokens) / num_micro_batches
    total = ce + config.load_balance_weight * load_balance + config.router_z_weight * router_z
    return Losses(ce=ce, load_balance=load_balance, router_z=router_z, total=total)


@torch.no_grad()
def _global_load_fraction(
    model: Decoder, step_input: StepInput, *, world: World, config: TrainConfig, routing: RoutingKind
) -> Tensor | None:
    """Return each expert's share of pairs that ``BalanceScope.global_step`` holds a step against; None for others.

    The first step of a run has none before it and counts its own first, with one forward pass more.
    """
    if config.balance_scope is not BalanceScope.global_step:
        return None
    if step_input.previous_count_LE is not None:
        return load_fraction(step_input.previous_count_LE)
    counts_LE = [
        _forward(model, micro, step_input, config=config, routing=routing).moe.top_k_count_BE.sum(-2)
        for micro in step_input.micro_batches
    ]
    return load_fraction(world.sum(torch.stack(counts_LE).sum(0)))


@torch.no_grad()
def _move_expert_bias(model: Decoder, count_LE: Tensor, rate: float, is_finite: Tensor) -> None:
    """Move the balancing bias of every sigmoid router once, from the counts of the whole step, if it is finite."""
    for moe, count_E in zip(model.moe_layers(), count_LE, strict=True):
        bias_E = moe.router.expert_bias
        if bias_E is not None:
            bias_E.copy_(torch.where(is_finite, updated_expert_bias(bias_E, count_E, rate), bias_E))
