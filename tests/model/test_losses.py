"""The losses equal their definitions, and lie where they are said to."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from model.losses import (
    BalanceConvention,
    chunked_cross_entropy,
    coefficient_factor,
    cross_entropy_with_gradient_,
    global_load_balance_loss,
    load_balance_loss,
    load_fraction,
    micro_batch_load_balance_loss,
    router_z_loss,
    sequence_load_balance_loss,
)
from moe_kernels.testing import assert_norm_close

T, D, V = 50, 12, 31


def cross_entropy_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    label_T = torch.randint(V, (T,), generator=generator)
    label_T[::7] = -100
    return x_TD, weight_VD, label_T


@pytest.mark.parametrize("chunk_tokens", [1, 7, 50, 64])
def test_chunked_cross_entropy_and_its_gradients_equal_the_whole(chunk_tokens):
    x_TD, weight_VD, label_T = cross_entropy_inputs(torch.float64)
    expected = F.cross_entropy(x_TD @ weight_VD.T, label_T, reduction="sum")
    actual = chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=chunk_tokens)
    expected_grads = torch.autograd.grad(3 * expected, (x_TD, weight_VD))
    actual_grads = torch.autograd.grad(3 * actual, (x_TD, weight_VD))
    # fp64 has eps 2.2e-16; sums here have at most 50 terms of size about 10.
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    for actual_grad, expected_grad in zip(actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-12, atol=1e-13)


def test_in_fp32_loss_and_gradients_equal_the_plain_ones_to_five_digits():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(300, 64, generator=generator).requires_grad_()
    weight_VD = (0.3 * torch.randn(4099, 64, generator=generator)).requires_grad_()
    label_T = torch.randint(4099, (300,), generator=generator)
    label_T[::9] = -100
    expected = F.cross_entropy(x_TD @ weight_VD.T, label_T, reduction="sum")
    actual = chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=128)
    assert_norm_close(actual, expected, 1e-5)
    for of_actual, of_expected in zip(
        torch.autograd.grad(actual, (x_TD, weight_VD)), torch.autograd.grad(expected, (x_TD, weight_VD)), strict=True
    ):
        assert_norm_close(of_actual, of_expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_the_logits(dtype):
    generator = torch.Generator().manual_seed(0)
    logits_CV = (4 * torch.randn(T, V, generator=generator)).to(dtype)
    label_C = torch.randint(V, (T,), generator=generator)
    label_C[::7] = -100
    exact_CV = logits_CV.double().requires_grad_()
    expected = F.cross_entropy(exact_CV, label_C, reduction="sum")
    expected.backward()
    assert_norm_close(cross_entropy_with_gradient_(logits_CV, label_C), expected.detach(), 1e-6)
    # Each probability is rounded once, and is exp of a number up to 40 that was rounded in fp32.
    allowed_CV = (torch.finfo(dtype).eps + 40 * torch.finfo(torch.float32).eps) * exact_CV.grad.abs() + 2**-23
    assert ((logits_CV.double() - exact_CV.grad).abs() <= allowed_CV).all()


def test_chunked_cross_entropy_passes_gradcheck():
    x_TD, weight_VD, label_T = cross_entropy_inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, weight: chunked_cross_entropy(x, weight, label_T, chunk_tokens=16), (x_TD, weight_VD)
    )


def test_ignored_labels_give_no_loss_and_no_gradient():
    x_TD, weight_VD, label_T = cross_entropy_inputs()
    ce_sum = chunked_cross_entropy(x_TD, weight_VD, label_T)
    ce_sum.backward()
    ignored_T = label_T == -100
    assert (x_TD.grad[ignored_T] == 0).all()
    assert (x_TD.grad[~ignored_T] != 0).any(dim=-1).all()
    nothing = chunked_cross_entropy(x_TD, weight_VD, torch.full_like(label_T, -100))
    assert nothing == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(nothing, (x_TD, weight_VD)))


def test_bf16_chunks_sum_in_fp32():
    x_TD, weight_VD, label_T = cross_entropy_inputs(torch.bfloat16)
    actual = chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=1)
    expected = F.cross_entropy((x_TD @ weight_VD.T).float(), label_T, reduction="sum")
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    actual.backward()
    assert x_TD.grad.dtype == weight_VD.grad.dtype == torch.bfloat16
    truth_VD = torch.autograd.grad(
        F.cross_entropy(x_TD.double() @ weight_VD.double().T, label_T, reduction="sum"), weight_VD
    )[0]
    # Each of the 50 chunks rounds its probabilities and products to bf16 (eps 2^-8), their sum is fp32.
    assert (weight_VD.grad - truth_VD).norm() <= 2 * 2**-8 * truth_VD.norm()


def test_many_bf16_chunks_add_up_in_fp32():
    generator = torch.Generator().manual_seed(0)
    x_TD = (1 + torch.rand(1500, 4, generator=generator)).bfloat16()
    weight_VD = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    label_T = torch.zeros(1500, dtype=torch.int64)
    chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=1).backward()
    expected_D = -0.5 * x_TD.double().sum(0)
    # In bf16 the sum would stop growing near 256 summands; in fp32 only the result is rounded, by at most 2^-8.
    assert ((weight_VD.grad[0] - expected_D).abs() <= 2**-8 * expected_D.abs()).all()


def test_without_grad_no_gradient_is_computed():
    x_TD, weight_VD, label_T = cross_entropy_inputs()
    product = 2 * T * D * V
    with FlopCounterMode(display=False) as with_grad:
        expected = chunked_cross_entropy(x_TD, weight_VD, label_T)
    assert with_grad.get_total_flops() == 3 * product
    with torch.no_grad(), FlopCounterMode(display=False) as without_grad:
        ce_sum = chunked_cross_entropy(x_TD, weight_VD, label_T)
    assert without_grad.get_total_flops() == product
    assert not ce_sum.requires_grad
    assert torch.equal(ce_sum, expected)


E, K, TOKENS = 16, 4, 1000


def balanced():
    return torch.full((E,), TOKENS * K // E), torch.full((E,), TOKENS / E)


def collapsed():
    count_E, prob_sum_E = torch.zeros(E, dtype=torch.int64), torch.zeros(E)
    count_E[:K], prob_sum_E[:K] = TOKENS, TOKENS / K
    return count_E, prob_sum_E


def mixture(share):
    """Return a router that treats ``share`` of the tokens as the collapsed one does, the rest as the balanced."""
    (even_count, even_prob), (collapsed_count, collapsed_prob) = balanced(), collapsed()
    count_E = ((1 - share) * even_count + share * collapsed_count).round().long()
    return count_E, (1 - share) * even_prob + share * collapsed_prob


def test_balance_loss_is_one_when_balanced_and_e_over_k_when_collapsed():
    assert load_balance_loss(*balanced(), K=K).item() == pytest.approx(1.0, rel=1e-6)
    assert load_balance_loss(*collapsed(), K=K).item() == pytest.approx(E / K, rel=1e-6)


def test_balance_loss_rises_strictly_from_balanced_to_collapsed():
    losses = [load_balance_loss(*mixture(share), K=K).item() for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert all(low < high for low, high in pairwise(losses))


def test_balance_loss_equals_its_definition():
    generator = torch.Generator().manual_seed(0)
    prob_TE = torch.randn(TOKENS, E, generator=generator).softmax(-1)
    chosen_TK = prob_TE.topk(K).indices
    fraction_E = torch.stack([(chosen_TK == expert).sum() / (TOKENS * K) for expert in range(E)])
    expected = E * sum(fraction_E[expert] * prob_TE[:, expert].mean() for expert in range(E))
    count_E = torch.bincount(chosen_TK.flatten(), minlength=E)
    assert load_balance_loss(count_E, prob_TE.sum(0), K=K).item() == pytest.approx(expected.item(), rel=1e-5)


def test_collapsed_but_complementary_layers_are_not_balanced():
    count_E, prob_sum_E = collapsed()
    count_LBE = torch.stack([count_E.roll(K * layer) for layer in range(E // K)]).unsqueeze(1)
    prob_sum_LBE = torch.stack([prob_sum_E.roll(K * layer) for layer in range(E // K)]).unsqueeze(1)
    assert micro_batch_load_balance_loss(count_LBE, prob_sum_LBE, K=K).item() == pytest.approx(E / K, rel=1e-6)


def test_sequences_that_balance_each_other_are_balanced_for_the_micro_batch_only():
    count_E, prob_sum_E = collapsed()
    count_LBE = torch.stack([count_E.roll(K * sequence) for sequence in range(E // K)]).unsqueeze(0)
    prob_sum_LBE = torch.stack([prob_sum_E.roll(K * sequence) for sequence in range(E // K)]).unsqueeze(0)
    assert micro_batch_load_balance_loss(count_LBE, prob_sum_LBE, K=K).item() == pytest.approx(1.0, rel=1e-6)
    assert sequence_load_balance_loss(count_LBE, prob_sum_LBE, K=K).item() == pytest.approx(E / K, rel=1e-6)


def test_global_balance_loss_does_not_depend_on_how_the_step_is_divided():
    generator = torch.Generator().manual_seed(0)
    prob_LBTE = torch.randn(2, 6, 10, E, generator=generator).softmax(-1)
    count_LBE = torch.zeros(prob_LBTE.shape, dtype=torch.int64).scatter_(-1, prob_LBTE.topk(K).indices, 1).sum(2)
    prob_sum_LBE = prob_LBTE.sum(2)
    load_LE = load_fraction(count_LBE.sum(1))
    whole = global_load_balance_loss(load_LE, prob_sum_LBE, num_tokens=60)
    parts = [(slice(0, 1), 10), (slice(1, 3), 20), (slice(3, 6), 30)]
    divided = sum(
        tokens / 60 * global_load_balance_loss(load_LE, prob_sum_LBE[:, rows], num_tokens=tokens)
        for rows, tokens in parts
    )
    assert divided.item() == pytest.approx(whole.item(), rel=1e-6)
    # With its own counts for the load, the whole step is one micro-batch.
    assert whole.item() == pytest.approx(micro_batch_load_balance_loss(count_LBE, prob_sum_LBE, K=K).item(), rel=1e-6)


def test_balance_losses_have_the_gradient_of_the_probabilities():
    count_E = mixture(0.5)[0]
    prob_sum_E = mixture(0.3)[1].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda prob: load_balance_loss(count_E, prob, K=K), prob_sum_E)
    load_balance_loss(count_E, prob_sum_E, K=K).backward()
    assert (prob_sum_E.grad[:K] > prob_sum_E.grad[K:].max()).all()  # descent takes mass from the loaded experts


def test_z_loss_equals_its_definition():
    logits_LTE = torch.randn(3, 20, E, generator=torch.Generator().manual_seed(0))
    z_sum_L = logits_LTE.logsumexp(-1).square().sum(1)
    expected = torch.log(torch.exp(logits_LTE).sum(-1)).pow(2).mean()
    assert router_z_loss(z_sum_L, 20).item() == pytest.approx(expected.item(), rel=1e-6)


def hugging_face_loss(prob_LTE):
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    return load_balancing_loss_func(tuple(prob_LTE.log()), num_experts=E, top_k=K)


def test_the_hugging_face_coefficient_gives_the_hugging_face_loss():
    prob_TE = torch.randn(200, E, generator=torch.Generator().manual_seed(0)).softmax(-1)
    prob_LTE = prob_TE.expand(3, -1, -1)  # the same loads in every layer, where pooling layers changes nothing
    count_LBE = torch.zeros_like(prob_LTE, dtype=torch.int64).scatter_(-1, prob_LTE.topk(K).indices, 1).sum(1, True)
    ours = micro_batch_load_balance_loss(count_LBE, prob_LTE.sum(1, keepdim=True), K=K)
    factor = coefficient_factor(BalanceConvention.hugging_face, K=K, num_moe_layers=3)
    assert hugging_face_loss(prob_LTE).item() == pytest.approx(factor * ours.item(), rel=1e-5)


def test_megatron_adds_layers_and_olmoe_averages_them():
    assert coefficient_factor(BalanceConvention.megatron, K=8, num_moe_layers=16) == 16
    assert coefficient_factor(BalanceConvention.olmoe, K=8, num_moe_layers=16) == 1
