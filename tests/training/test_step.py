from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from data.batch import Batch
from model.config import AttentionConfig, ModelConfig, MoEConfig, RouterKind, RoutingConfig
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import BackendName, Rounding, RoutingKind, resolve_backend
from training.config import BalanceScope, OptimConfig, TrainConfig
from training.optim import build_optimizer
from training.step import MicroBatch, StepInput, StepResult, train_step
from training.world import World

MODEL = ModelConfig(
    vocab_size=50,
    width=16,
    num_layers=2,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_width=8),
    moe=MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, routing=RoutingConfig(tile_m=8)),
)


def build(seed: int = 0, *, config: ModelConfig = MODEL) -> Decoder:
    problem = moe_problem(config, tokens=64, dtype=torch.float32, device=torch.device("cpu"))
    model = Decoder(config, backend=resolve_backend(BackendName.reference, problem))
    model.init_weights(seed)
    return model


def batches(num: int, *, sequences: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(50, (sequences, 17), generator=generator)
        labels = ids[:, 1:].clone()
        # Uneven on purpose: a mean of means would weigh the sparse micro-batches' tokens more.
        labels[torch.rand(labels.shape, generator=generator) < 0.2 * len(made)] = -100
        made.append(Batch(ids[:, :-1], labels, torch.zeros_like(labels, dtype=torch.int32)))
    return made


def step(
    model: Decoder,
    micro_batches: Sequence[Batch],
    *,
    routing: RoutingKind = RoutingKind.top_k,
    previous_count_LE: torch.Tensor | None = None,
    mask_documents: bool = False,
    optimizer: Optimizer | None = None,
    **changes: Any,
) -> StepResult:
    config = TrainConfig(num_steps=1, micro_batch_sequences=1, global_batch_sequences=1, max_grad_norm=1e9, **changes)
    firsts = accumulate((batch.input_ids_BS.shape[0] for batch in micro_batches), initial=0)
    numbered = [MicroBatch.of(batch, first) for batch, first in zip(micro_batches, firsts, strict=False)]
    return train_step(
        model,
        optimizer or build_optimizer(model, OptimConfig(lr=1e-3)),
        StepInput(micro_batches=numbered, previous_count_LE=previous_count_LE, mask_documents=mask_documents),
        world=World(rank=0, size=1, device=torch.device("cpu")),
        config=config,
        routing=routing,
        lap=lambda part: None,
    )


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def norm_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_accumulated_gradient_is_the_mean_over_valid_tokens_of_one_large_batch() -> None:
    micro_batches = batches(4, sequences=2)
    large = Batch(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    accumulated, whole = build(), build()
    only_ce = {"load_balance_weight": 0.0, "router_z_weight": 0.0}
    left, right = step(accumulated, micro_batches, **only_ce), step(whole, [large], **only_ce)
    assert torch.isclose(left.losses.ce, right.losses.ce, rtol=1e-5)
    assert left.load.top_k_count_LE.equal(right.load.top_k_count_LE)
    for name, gradient in gradients(whole).items():
        assert norm_error(gradients(accumulated)[name], gradient) < 1e-5, name


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_masked_documents_give_the_gradient_of_each_document_in_a_row_of_its_own(num_micro_batches: int) -> None:
    start = 7  # of the second document of every row
    whole_rows = Batch(*(torch.cat(parts) for parts in zip(*batches(4, sequences=2), strict=True)))
    whole_rows.document_BS[:, start:] = 1
    packed = [Batch(*parts) for parts in zip(*(field.chunk(num_micro_batches) for field in whole_rows), strict=True)]
    alone = [Batch(*(field[:, cut] for field in whole_rows)) for cut in (slice(0, start), slice(start, None))]
    only_ce = {"load_balance_weight": 0.0, "router_z_weight": 0.0}
    masked, separate, unmasked = build(), build(), build()
    left, right = step(masked, packed, mask_documents=True, **only_ce), step(separate, alone, **only_ce)
    step(unmasked, packed, **only_ce)
    assert torch.isclose(left.losses.ce, right.losses.ce, rtol=1e-5)
    assert left.load.top_k_count_LE.equal(right.load.top_k_count_LE)
    for name, gradient in gradients(separate).items():
        assert norm_error(gradients(masked)[name], gradient) < 1e-5, name
        assert norm_error(gradients(unmasked)[name], gradient) > 1e-3, name


def test_the_count_before_the_first_step_of_global_balance_masks_documents_too() -> None:
    (batch,) = batches(1, sequences=4)
    batch.document_BS[:, 5:] = 1
    model = build()
    result = step(model, [batch], mask_documents=True, balance_scope=BalanceScope.global_step)
    counted = step(
        build(),
        [batch],
        mask_documents=True,
        balance_scope=BalanceScope.global_step,
        previous_count_LE=result.load.top_k_count_LE,
    )
    assert result.losses.load_balance == counted.losses.load_balance


PREVIOUS = torch.tensor([[90, 10, 20, 8], [1, 2, 3, 122]])
# What each knob makes of the loss, with nothing else in it but the cross-entropy.
AUXILIARY = {
    "z": {"load_balance_weight": 0.0, "router_z_weight": 10.0},
    "sequence": {"load_balance_weight": 10.0, "router_z_weight": 0.0, "balance_scope": BalanceScope.sequence},
    "global": {
        "load_balance_weight": 10.0,
        "router_z_weight": 0.0,
        "balance_scope": BalanceScope.global_step,
        "previous_count_LE": PREVIOUS,
    },
    "global, first step": {
        "load_balance_weight": 10.0,
        "router_z_weight": 0.0,
        "balance_scope": BalanceScope.global_step,
    },
}


@pytest.mark.parametrize("auxiliary", AUXILIARY)
def test_auxiliary_gradient_does_not_depend_on_accumulation(auxiliary: str) -> None:
    micro_batches = batches(4, sequences=2)
    large = Batch(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    accumulated, whole, without = build(), build(), build()
    step(accumulated, micro_batches, **AUXILIARY[auxiliary])
    step(whole, [large], **AUXILIARY[auxiliary])
    step(without, [large], load_balance_weight=0.0, router_z_weight=0.0)
    for name, gradient in gradients(whole).items():
        assert norm_error(gradients(accumulated)[name], gradient) < 1e-5, name
    router = "blocks.0.moe.router.weight"
    assert norm_error(gradients(whole)[router], gradients(without)[router]) > 1e-2


def test_micro_batch_balance_is_the_mean_of_each_micro_batchs_own() -> None:
    micro_batches = batches(4, sequences=2)
    alone = [float(step(build(), [batch]).losses.load_balance) for batch in micro_batches]
    together = step(build(), micro_batches).losses.load_balance
    assert float(together) == pytest.approx(sum(alone) / 4, rel=1e-6)


def test_global_balance_lowers_the_probability_of_who_was_crowded_in_the_step_before() -> None:
    model = build()
    (batch,) = batches(1, sequences=4)

    def probability_LE() -> torch.Tensor:
        with torch.no_grad():
            return model(batch.input_ids_BS).moe.prob_sum_BE.sum(1)

    before_LE = probability_LE()
    step(model, [batch], **AUXILIARY["global"] | {"load_balance_weight": 1e4})
    after_LE = probability_LE()
    for layer, crowded in enumerate(PREVIOUS.argmax(-1).tolist()):
        assert after_LE[layer, crowded] < before_LE[layer, crowded]


SIGMOID = replace(MODEL, moe=replace(MODEL.moe, router=RouterKind.sigmoid, normalize_top_k=True))


def test_expert_bias_moves_once_a_step_towards_balance() -> None:
    model = build(config=SIGMOID)
    result = step(model, batches(4, sequences=2), expert_bias_rate=0.25)
    for moe, count_E in zip(model.moe_layers(), result.load.top_k_count_LE, strict=True):
        expected_E = 0.25 * torch.sign(count_E.double().mean() - count_E)
        assert expected_E.count_nonzero() > 0
        assert torch.equal(moe.router.expert_bias, expected_E.float())


def test_expert_bias_does_not_depend_on_accumulation() -> None:
    micro_batches = batches(4, sequences=2)
    large = Batch(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    accumulated, whole = build(config=SIGMOID), build(config=SIGMOID)
    step(accumulated, micro_batches)
    step(whole, [large])
    for left, right in zip(accumulated.moe_layers(), whole.moe_layers(), strict=True):
        assert torch.equal(left.router.expert_bias, right.router.expert_bias)


def test_stochastic_rounding_is_seeded_by_the_sample_whatever_the_split() -> None:
    routing = replace(MODEL.moe.routing, rounding=Rounding.stochastic)
    config = replace(MODEL, moe=replace(MODEL.moe, routing=routing))
    first, second = batches(2, sequences=2)
    both = step(build(config=config), [first, second], routing=RoutingKind.token_rounding, seed=7)
    again = step(build(config=config), [first, second], routing=RoutingKind.token_rounding, seed=7)
    other = step(build(config=config), [first, second], routing=RoutingKind.token_rounding, seed=8)
    assert torch.equal(both.load.rows_L, again.load.rows_L)
    assert both.losses.ce == again.losses.ce
    assert both.losses.ce != other.losses.ce


@pytest.mark.parametrize("knob", ["load_balance_weight", "router_z_weight"])
def test_each_auxiliary_weight_reaches_the_router(knob: str) -> None:
    micro_batches = batches(1, sequences=4)
    off, on = build(), build()
    step(off, micro_batches, load_balance_weight=0.0, router_z_weight=0.0)
    step(on, micro_batches, **({"load_balance_weight": 0.0, "router_z_weight": 0.0} | {knob: 1.0}))
    name = "blocks.0.moe.router.weight"
    assert norm_error(gradients(on)[name], gradients(off)[name]) > 1e-3


def test_every_parameter_gets_a_gradient_and_moves() -> None:
    model = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(model, batches(2, sequences=4))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.norm()) > 0, name
        assert not torch.equal(parameter, before[name]), name


def test_grad_norm_is_the_norm_of_all_gradients_before_clipping() -> None:
    model = build()
    result = step(model, batches(2, sequences=4))
    expected = torch.stack([gradient.norm() for gradient in gradients(model).values()]).norm()
    assert torch.isclose(result.grad_norm, expected, rtol=1e-5)
