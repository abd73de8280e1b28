"""One optimiser step: micro-batches in, updated parameters out, with every number that a log line needs.

The loop around it is in trainer.py; the losses' formulas are in model/losses.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.batch import IGNORED_LABEL, Batch
from model.decoder import Decoder, DecoderOutput
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
from training.config import BalanceScope, TrainConfig
from training.load import ExpertLoad


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """What an optimiser step reads besides the model.

    ``first_sample`` is the global index of the first sequence; with ``train.seed`` it seeds stochastic rounding, so
    that a micro-batch is rounded alike wherever it is computed. ``previous_count_LE`` are the top-K counts of the step
    before, None in the first; only ``BalanceScope.global_step`` reads them.
    """

    micro_batches: Sequence[Batch]
    first_sample: int
    previous_count_LE: Tensor | None = None

    def seeds(self, seed: int) -> list[int]:
        """Return the seed of each micro-batch's rounding."""
        sizes = [batch.input_ids_BS.shape[0] for batch in self.micro_batches]
        return [(seed << 40) + self.first_sample + sum(sizes[:index]) for index in range(len(sizes))]


class Losses(NamedTuple):
    """The losses of one step, scalars on the device; ``total`` alone is weighted and summed."""

    ce: Tensor  # nats per valid token, over all micro-batches
    load_balance: Tensor  # 1 when balanced; mean over layers and micro-batches
    router_z: Tensor  # mean over tokens, layers and micro-batches
    total: Tensor


class StepResult(NamedTuple):
    """What one optimiser step leaves behind besides the parameters."""

    losses: Losses
    grad_norm: Tensor  # before clipping
    load: ExpertLoad


def train_step(
    model: Decoder,
    optimizer: Optimizer,
    step_input: StepInput,
    *,
    config: TrainConfig,
    routing: RoutingKind,
    lap: Callable[[str], None],
) -> StepResult:
    """Return the losses, gradient norm and expert load of one optimiser step.

    The cross-entropy of every micro-batch is divided by the valid tokens of all of them, so that the gradient is the
    one of a single large batch whatever the split. ``lap`` is called with the name of each part of the step that has
    just ended.

    Raises: FloatingPointError, leaving the parameters as they were, if the gradient norm is not finite.
    """
    num_valid = sum(int((batch.labels_BS != IGNORED_LABEL).sum()) for batch in step_input.micro_batches)
    if num_valid == 0:
        raise ValueError(f"a batch of {len(step_input.micro_batches)} micro-batches holds no label to predict")
    fraction_LE = _global_load_fraction(model, step_input, config=config, routing=routing)
    optimizer.zero_grad(set_to_none=True)
    parts: list[Losses] = []
    loads: list[ExpertLoad] = []
    for batch, seed in zip(step_input.micro_batches, step_input.seeds(config.seed), strict=True):
        output = model(batch.input_ids_BS, batch.labels_BS, routing=routing, seed=seed)
        losses = _losses(
            output,
            num_valid=num_valid,
            num_tokens=batch.input_ids_BS.numel(),
            num_micro_batches=len(step_input.micro_batches),
            balance=_Balance(config.balance_scope, model.config.moe.experts_per_token, fraction_LE),
            config=config,
        )
        lap("forward")
        losses.total.backward()
        lap("backward")
        parts.append(Losses(*(loss.detach() for loss in losses)))
        tile_m = model.config.moe.routing.tile_m
        loads.append(ExpertLoad.of(output.moe, num_tokens=batch.input_ids_BS.numel(), tile_m=tile_m))
    load = ExpertLoad.sum(loads)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
    if not bool(torch.isfinite(grad_norm)):
        raise FloatingPointError(
            f"the gradient norm is {float(grad_norm)} (cross-entropy {sum(float(part.ce) for part in parts):.4f}); the "
            "parameters were not updated. Lower optim.lr or train.max_grad_norm, or resume from an earlier checkpoint"
        )
    optimizer.step()
    _move_expert_bias(model, load.top_k_count_LE, config.expert_bias_rate)
    lap("optimizer")
    summed = Losses(*(torch.stack(values).sum() for values in zip(*parts, strict=True)))
    return StepResult(losses=summed, grad_norm=grad_norm, load=load)


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
    num_valid: int,
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
    model: Decoder, step_input: StepInput, *, config: TrainConfig, routing: RoutingKind
) -> Tensor | None:
    """Return each expert's share of pairs that ``BalanceScope.global_step`` holds a step against; None for others.

    The first step of a run has none before it and counts its own first, with one forward pass more.
    """
    if config.balance_scope is not BalanceScope.global_step:
        return None
    if step_input.previous_count_LE is not None:
        return load_fraction(step_input.previous_count_LE)
    counts_LE = [
        model(batch.input_ids_BS, batch.labels_BS, routing=routing, seed=seed).moe.top_k_count_BE.sum(-2)
        for batch, seed in zip(step_input.micro_batches, step_input.seeds(config.seed), strict=True)
    ]
    return load_fraction(torch.stack(counts_LE).sum(0))


@torch.no_grad()
def _move_expert_bias(model: Decoder, count_LE: Tensor, rate: float) -> None:
    """Move the balancing bias of every sigmoid router once, from the counts of the whole step."""
    for moe, count_E in zip(model.moe_layers(), count_LE, strict=True):
        bias_E = moe.router.expert_bias
        if bias_E is not None:
            bias_E.copy_(updated_expert_bias(bias_E, count_E, rate))
