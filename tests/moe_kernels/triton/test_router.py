"""Weights, choice and sums of one launch, and the gradient of the other, are as good as torch's."""

import pytest
import torch

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from model.config import MoEConfig, RouterKind, RoutingConfig
from model.router import Router, RouterSums
from moe_kernels import Rounding, RoutingKind
from moe_kernels.routing.top_k import top_k_mask
from moe_kernels.testing import assert_as_good_as
from moe_kernels.triton.router import split_bf16, weigh_and_choose

SCALE = 1.7
# (T, E, K, sequences): chunks that are not full, one token a sequence, more lanes than experts, the largest.
SHAPES = [(60, 7, 3, 3), (5, 64, 8, 5), (34, 130, 5, 2), (17, 1, 1, 1), (6, 1024, 32, 2)]
KINDS = [(sigmoid, normalize) for sigmoid in (False, True) for normalize in (False, True)]


def plain(logits_TE, top_k_mask_TE, B, *, sigmoid, normalize):
    """Return (scores, probability sums, z sum, entropy sum, largest logit) in plain torch."""
    prob_TE = affinity_TE = logits_TE.softmax(-1)
    if sigmoid:
        affinity_TE = logits_TE.sigmoid()
        prob_TE = affinity_TE / affinity_TE.sum(-1, keepdim=True)
    mass_T1 = (affinity_TE * top_k_mask_TE).sum(-1, keepdim=True) if normalize else 1.0
    prob_sum_BE = prob_TE.unflatten(0, (B, -1)).sum(1)
    z_sum = logits_TE.logsumexp(-1).square().sum()
    return affinity_TE / mass_T1 * SCALE, prob_sum_BE, z_sum, torch.special.entr(prob_TE).sum(), logits_TE.max()


def grads_of(outputs, logits_TE, seed):
    generator = torch.Generator().manual_seed(seed)
    pulls = [torch.randn(output.shape, generator=generator).to(output) for output in outputs[:3]]
    return torch.autograd.grad(outputs[:3], logits_TE, pulls)[0]


@pytest.mark.parametrize(("T", "E", "K", "B"), SHAPES)
@pytest.mark.parametrize(("sigmoid", "normalize"), KINDS)
def test_weights_sums_and_gradients_are_as_good_as_torchs(device, T, E, K, B, sigmoid, normalize):
    generator = torch.Generator().manual_seed(T)
    logits_TE = (2 * torch.randn(T, E, generator=generator)).to(device).requires_grad_()
    bias_E = 0.1 * torch.randn(E, generator=generator).to(device) if sigmoid else None
    options = {"sigmoid": sigmoid, "normalize": normalize}
    routed = weigh_and_choose(logits_TE, bias_E, K=K, num_sequences=B, scale=SCALE, transposed=True, **options)
    mask_TE = routed.top_k_mask_TE
    affinity_TE = routed.prob_ET.t()
    assert torch.equal(mask_TE, top_k_mask(affinity_TE if bias_E is None else affinity_TE + bias_E, K))
    assert torch.equal(routed.top_k_mask_ET.t(), mask_TE)
    assert torch.equal(routed.top_k_count_BE, mask_TE.unflatten(0, (B, -1)).sum(1))
    outputs = (routed.score_TE, routed.prob_sum_BE, routed.z_sum, routed.entropy_sum, routed.logit_max)
    again_TE, exact_TE = (logits_TE.detach().to(dtype).requires_grad_() for dtype in (torch.float32, torch.float64))
    baseline, truth = (plain(tensor, mask_TE, B, **options) for tensor in (again_TE, exact_TE))
    for actual, same_dtype, expected in zip(outputs, baseline, truth, strict=True):
        assert_as_good_as(actual, same_dtype, expected)
    grad, same_dtype, expected = (
        grads_of(values, leaf, seed=1)
        for values, leaf in ((outputs, logits_TE), (baseline, again_TE), (truth, exact_TE))
    )
    assert_as_good_as(grad, same_dtype, expected)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_each_gradient_reaches_the_logits_alone(device, used):
    leaf_TE = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    options = {"sigmoid": False, "normalize": True}
    routed = weigh_and_choose(leaf_TE, None, K=2, num_sequences=3, scale=SCALE, transposed=False, **options)
    output = (routed.score_TE, routed.prob_sum_BE, routed.z_sum)[used]
    exact_TE = leaf_TE.detach().double().requires_grad_()
    expected = plain(exact_TE, routed.top_k_mask_TE, 3, **options)[used]
    weight = torch.linspace(-1, 1, output.numel(), device=device).view_as(output) + 0.5
    (grad,), (truth,) = (
        torch.autograd.grad((value * weight.to(value.dtype)).sum(), leaf)
        for value, leaf in ((output, leaf_TE), (expected, exact_TE))
    )
    # A gradient is a short chain of fp32 roundings on values of order one.
    torch.testing.assert_close(grad.double(), truth, rtol=1e-5, atol=2e-6)
    assert truth.abs().max() > 1e-3


def test_sigmoids_that_underflow_give_zeros_and_no_nan(device):
    logits_TE = torch.full((4, 6), -200.0, device=device, requires_grad=True)
    options = {"sigmoid": True, "normalize": True, "scale": 1.0, "transposed": False}
    routed = weigh_and_choose(logits_TE, None, K=2, num_sequences=1, **options)
    assert (routed.score_TE == 0).all()
    assert (routed.top_k_mask_TE.sum(1) == 2).all()
    (routed.score_TE.sum() + routed.prob_sum_BE.sum()).backward()
    assert logits_TE.grad.isfinite().all()


def test_tokens_that_do_not_divide_into_sequences_are_refused(device):
    with pytest.raises(ValueError, match="num_sequences=3"):
        weigh_and_choose(
            torch.zeros(10, 4, device=device),
            None,
            K=1,
            num_sequences=3,
            sigmoid=False,
            normalize=False,
            scale=1.0,
            transposed=False,
        )


def test_the_operators_compile_whole_and_survive_checkpointing(device):
    logits_TE = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()

    def loss(logits_TE):
        routed = weigh_and_choose(
            logits_TE * 1.0,
            None,
            K=2,
            num_sequences=2,
            sigmoid=False,
            normalize=True,
            scale=1.0,
            transposed=False,
        )
        return (routed.score_TE * routed.top_k_mask_TE).square().sum() + 0.1 * routed.z_sum

    (expected,) = torch.autograd.grad(loss(logits_TE), logits_TE)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (by_compile,) = torch.autograd.grad(compiled(logits_TE), logits_TE)
    checkpointed = torch.utils.checkpoint.checkpoint(loss, logits_TE, use_reentrant=False)
    (by_checkpoint,) = torch.autograd.grad(checkpointed, logits_TE)
    assert torch.equal(by_compile, expected)
    assert torch.equal(by_checkpoint, expected)


@pytest.mark.parametrize(("T", "E"), [(1, 1), (33, 7), (700, 24)])
def test_two_bf16_numbers_hold_16_bits(device, T, E):
    wide_TE = torch.randn(T, E, generator=torch.Generator().manual_seed(0))
    both_T2E = split_bf16(wide_TE.to(device)).cpu()
    error_TE = both_T2E.float().unflatten(1, (2, E)).sum(1) - wide_TE
    # The interpreter cuts bits off where a GPU rounds: one bit for each of the two numbers.
    assert (error_TE.abs() <= 2**-14 * wide_TE.abs()).all()
    if device.type == "cuda":
        high_TE = wide_TE.bfloat16()
        assert torch.equal(both_T2E, torch.cat([high_TE, (wide_TE - high_TE).bfloat16()], dim=1))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gristmill.split_bf16, (wide_TE.to(device),), test_utils=tests)


@pytest.mark.parametrize("kind", RouterKind)
@pytest.mark.parametrize("routing", RoutingKind)
def test_the_routers_kernels_do_what_its_torch_path_does(device, kind, routing):
    config = MoEConfig(
        num_experts=4,
        experts_per_token=2,
        expert_width=4,
        router=kind,
        normalize_top_k=True,
        routed_scale=2.5,
        routing=RoutingConfig(tile_m=8, rounding=Rounding.nearest),
    )
    router = Router(config, width=8)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        router.weight.copy_(torch.randn(4, 8, generator=generator))
        if router.expert_bias is not None:
            router.expert_bias.copy_(0.05 * torch.randn(4, generator=generator))
    x_TD = torch.randn(36, 8, generator=generator)
    expected = router(x_TD, routing=routing, seed=None, num_sequences=3)
    # Logits of torch, so that both choose among the same numbers but for the rounding of the probabilities.
    actual = router.to(device)._routed_by_kernels(
        expected.logits_TE.detach().to(device), routing=routing, seed=None, num_sequences=3
    )
    assert torch.equal(actual.routing.keep_TE.cpu(), expected.routing.keep_TE)
    assert torch.equal(actual.routing.top_k_mask_TE.cpu(), expected.routing.top_k_mask_TE)
    torch.testing.assert_close(actual.score_TE.cpu(), expected.score_TE.detach())
    for name in RouterSums._fields:
        torch.testing.assert_close(getattr(actual.sums, name).cpu(), getattr(expected.sums, name).detach(), msg=name)
