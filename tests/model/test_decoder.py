"""The decoder as a whole: what it returns, what its arguments change, and what changes nothing."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.config import QKNorm, RouterKind, RoutingConfig
from model.moe import MoEStats
from model.norm import RMSNorm
from model.rope import rotary_tables, rotate
from moe_kernels import BackendName, Rounding, RoutingKind
from moe_kernels.testing import saved_for_backward
from tests.model.tiny_models import build, hf_twin, relative_difference, tiny_config, token_ids

ROUTINGS = [RoutingKind.top_k, RoutingKind.token_rounding]


def losses(decoder, *, routing=RoutingKind.token_rounding, seed=None):
    return losses_of(decoder, *token_ids(decoder.config), routing=routing, seed=seed)


def losses_of(decoder, input_ids, labels, *, routing=RoutingKind.token_rounding, seed=None):
    output = decoder(input_ids, labels, routing=routing, seed=seed)
    return output, output.ce_sum + output.moe.prob_sum_BE.square().sum() / 100 + output.moe.z_sum.sum()


def test_the_summed_loss_is_that_of_the_logits():
    decoder = build(tiny_config())
    input_ids, labels = token_ids(decoder.config)
    with_labels, without = decoder(input_ids, labels), decoder(input_ids)
    assert with_labels.logits_BSV is None
    assert without.ce_sum is None
    expected = F.cross_entropy(without.logits_BSV.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(with_labels.ce_sum, expected)


@pytest.mark.parametrize("routing", RoutingKind)
@pytest.mark.parametrize("kind", RouterKind)
def test_counts_are_those_of_the_routing(routing, kind):
    config = tiny_config(moe={"router": kind}, dense_layers=[1], dense_width=24)
    decoder = build(config)
    input_ids, _ = token_ids(config)
    stats = decoder(input_ids, routing=routing).moe
    (B, S), (E, K), L = input_ids.shape, (8, 2), 2
    assert stats.top_k_count_BE.shape == stats.prob_sum_BE.shape == (L, B, E)
    assert stats.top_k_count_BE.dtype == stats.row_count_E.dtype == stats.pairs_added.dtype == torch.int64
    assert (stats.top_k_count_BE.sum(-1) == S * K).all()
    torch.testing.assert_close(stats.prob_sum_BE.sum(-1), torch.full((L, B), float(S)))
    for name in ("z_sum", "entropy_sum", "logit_max", "pairs_added", "pairs_dropped", "tokens_without_expert"):
        assert getattr(stats, name).shape == (L,), name
    assert (stats.row_count_E.sum(-1) == B * S * K + stats.pairs_added - stats.pairs_dropped).all()
    changed = (stats.pairs_added + stats.pairs_dropped).sum()
    assert (changed > 0) == (routing is not RoutingKind.top_k)
    if routing is RoutingKind.token_rounding:
        assert (stats.row_count_E % config.moe.routing.tile_m == 0).all()
    assert stats.prob_sum_BE.requires_grad
    assert stats.z_sum.requires_grad
    assert not stats.entropy_sum.requires_grad
    assert not stats.logit_max.requires_grad


@pytest.mark.parametrize("kind", RouterKind)
def test_sums_of_the_stats_are_their_definitions(kind):
    config = tiny_config(num_layers=1, moe={"router": kind})
    decoder = build(config)
    input_ids, _ = token_ids(config)
    stats = decoder(input_ids).moe
    block = decoder.blocks[0]
    tables = rotary_tables(torch.arange(input_ids.shape[1]), head_width=8, theta=1e4)
    x_BSD = decoder.embed(input_ids)
    x_BSD = x_BSD + block.attention(block.attention_norm(x_BSD), tables)[0]
    logits_BSE = block.mlp_norm(x_BSD) @ block.moe.router.weight.T
    if kind is RouterKind.softmax:
        prob_BSE = logits_BSE.softmax(-1)
    else:
        prob_BSE = logits_BSE.sigmoid() / logits_BSE.sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(stats.z_sum[0], logits_BSE.logsumexp(-1).square().sum())
    torch.testing.assert_close(stats.entropy_sum[0], -(prob_BSE * prob_BSE.log()).sum())
    torch.testing.assert_close(stats.logit_max[0], logits_BSE.max())
    torch.testing.assert_close(stats.prob_sum_BE[0], prob_BSE.sum(1))
    count_BE = torch.zeros(prob_BSE.shape).scatter_(-1, prob_BSE.topk(2).indices, 1).sum(1).long()
    assert torch.equal(stats.top_k_count_BE[0], count_BE)


def test_tokens_that_rounding_leaves_without_an_expert_are_counted():
    config = tiny_config(num_layers=1, moe={"routing": RoutingConfig(tile_m=16, rounding=Rounding.down)})
    decoder = build(config)
    outputs = []
    decoder.blocks[0].moe.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    stats = decoder(token_ids(config)[0], routing=RoutingKind.token_rounding).moe
    assert stats.tokens_without_expert.item() == (outputs[0] == 0).all(-1).sum().item() > 0


def test_the_routing_switch_changes_the_plan_and_nothing_else():
    decoder = build(tiny_config(num_layers=1))
    input_ids, _ = token_ids(decoder.config)
    state = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    top_k = decoder(input_ids)
    rounded = decoder(input_ids, routing=RoutingKind.token_rounding)
    assert relative_difference(rounded.logits_BSV, top_k.logits_BSV) > 0
    for name in ("top_k_count_BE", "prob_sum_BE", "z_sum", "entropy_sum", "logit_max"):
        assert torch.equal(getattr(rounded.moe, name), getattr(top_k.moe, name)), name
    assert all(torch.equal(tensor, state[name]) for name, tensor in decoder.state_dict().items())
    assert torch.equal(decoder(input_ids).logits_BSV, top_k.logits_BSV)
    # A tile of one row has nothing to round.
    unrounded = build(tiny_config(num_layers=1, moe={"routing": RoutingConfig(tile_m=1)}))
    assert torch.equal(unrounded(input_ids, routing=RoutingKind.token_rounding).logits_BSV, top_k.logits_BSV)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_train_and_eval_mode_change_nothing(routing):
    decoder = build(tiny_config())
    input_ids, _ = token_ids(decoder.config)
    training = decoder.train()(input_ids, routing=routing)
    evaluating = decoder.eval()(input_ids, routing=routing)
    assert torch.equal(training.logits_BSV, evaluating.logits_BSV)
    for ours, theirs in zip(training.moe, evaluating.moe, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("backend", [BackendName.reference, BackendName.portable])
def test_activation_checkpointing_gives_identical_counts_and_gradients(backend):
    config = tiny_config(moe={"routing": RoutingConfig(tile_m=8, rounding=Rounding.stochastic)})
    plain, checkpointed = build(config, backend=backend), build(config, backend=backend)
    for block in checkpointed.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs
        )
    (expected, expected_loss), (actual, actual_loss) = losses(plain, seed=5), losses(checkpointed, seed=5)
    expected_loss.backward()
    actual_loss.backward()
    for name, ours, theirs in zip(MoEStats._fields, actual.moe, expected.moe, strict=True):
        assert torch.equal(ours, theirs), name
    for name, parameter in checkpointed.named_parameters():
        assert parameter.grad.any(), name
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), name


def test_the_whole_step_compiles_without_a_graph_break():
    decoder = build(tiny_config(num_layers=1), backend=BackendName.portable)
    _, expected_loss = losses(decoder)
    expected_loss.backward()
    expected = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    # aot_eager traces forward and backward as any backend would, and needs no compiler.
    _, loss = torch.compile(losses_of, fullgraph=True, backend="aot_eager")(decoder, *token_ids(decoder.config))
    loss.backward()
    assert relative_difference(loss, expected_loss) <= 1e-5
    for name, parameter in decoder.named_parameters():
        assert relative_difference(parameter.grad, expected[name]) <= 1e-5, name


def test_reference_and_portable_backends_agree():
    by_backend = {}
    for backend in (BackendName.reference, BackendName.portable):
        decoder = build(tiny_config(), backend=backend)
        output, loss = losses(decoder)
        loss.backward()
        by_backend[backend] = (output, {name: parameter.grad for name, parameter in decoder.named_parameters()})
    (expected, expected_grads), (actual, actual_grads) = by_backend.values()
    assert torch.equal(actual.moe.row_count_E, expected.moe.row_count_E)
    for name, grad in actual_grads.items():
        assert relative_difference(grad, expected_grads[name]) <= 1e-5, name


@pytest.mark.parametrize("backend", [BackendName.reference, BackendName.portable])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_bf16_runs_with_fp32_losses_and_bf16_gradients(backend, routing):
    config = tiny_config(attention={"num_kv_heads": 2, "qk_norm": QKNorm.per_head}, moe={"router": RouterKind.sigmoid})
    decoder = build(config, backend=backend, dtype=torch.bfloat16)
    output, loss = losses(decoder, routing=routing)
    assert output.ce_sum.dtype == output.moe.prob_sum_BE.dtype == output.moe.z_sum.dtype == torch.float32
    loss.backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    assert decoder(token_ids(config)[0]).logits_BSV.dtype == torch.bfloat16
    truth, _ = losses(build(config), routing=RoutingKind.top_k)
    rounded, _ = losses(decoder, routing=RoutingKind.top_k)
    assert rounded.ce_sum.item() == pytest.approx(truth.ce_sum.item(), rel=2**-7)


def test_fp64_gradients_equal_finite_differences():
    config = tiny_config(num_layers=2, moe={"router": RouterKind.sigmoid, "normalize_top_k": True})
    decoder = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    direction = {
        name: torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for name, parameter in decoder.named_parameters()
    }
    _, loss = losses(decoder)
    loss.backward()
    slope = sum((parameter.grad * direction[name]).sum() for name, parameter in decoder.named_parameters()).item()
    step, values = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            for name, parameter in decoder.named_parameters():
                parameter.add_(sign * step * direction[name])
            values.append(losses(decoder)[1].item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def test_layers_round_stochastically_from_seeds_of_their_own():
    config = tiny_config(num_layers=4, moe={"routing": RoutingConfig(tile_m=16, rounding=Rounding.stochastic)})
    decoder = build(config)
    with torch.no_grad():  # without attention and experts' contributions every layer sees the same stream
        for block in decoder.blocks:
            block.attention.o_proj.weight.zero_()
            block.moe.w_down.zero_()
            block.mlp_norm.weight.copy_(decoder.blocks[0].mlp_norm.weight)
            block.moe.router.weight.copy_(decoder.blocks[0].moe.router.weight)
    input_ids, _ = token_ids(config)
    rows_LE = decoder(input_ids, routing=RoutingKind.token_rounding, seed=3).moe.row_count_E
    assert len({tuple(row_count_E.tolist()) for row_count_E in rows_LE}) > 1


def test_a_seed_is_the_same_as_a_number_and_as_a_tensor():
    decoder = build(tiny_config(moe={"routing": RoutingConfig(tile_m=16, rounding=Rounding.stochastic)}))
    input_ids, _ = token_ids(decoder.config)
    seeds = (3, torch.tensor(3), torch.tensor(3, dtype=torch.int32), 4)
    rows = [decoder(input_ids, routing=RoutingKind.token_rounding, seed=seed).moe.row_count_E for seed in seeds]
    assert all(torch.equal(same, rows[0]) for same in rows[1:3])
    assert not torch.equal(rows[0], rows[3])


def test_a_seed_whose_layers_leave_64_bits_is_refused_where_it_is_read():
    stochastic = build(tiny_config(moe={"routing": RoutingConfig(tile_m=16, rounding=Rounding.stochastic)}))
    input_ids, _ = token_ids(stochastic.config)
    with pytest.raises(ValueError, match="does not fit"):
        stochastic(input_ids, routing=RoutingKind.token_rounding, seed=2**63 // 3)
    assert stochastic(input_ids, routing=RoutingKind.top_k, seed=2**63).logits_BSV.any()


def test_recomputing_h_keeps_less_and_gives_the_same_gradients():
    config = tiny_config()
    gradients, kept_bytes = [], []
    for recompute_h in (False, True):
        decoder = build(config, recompute_h=recompute_h)
        with saved_for_backward() as kept:
            loss = losses(decoder)[1]
        loss.backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
        kept_bytes.append(sum(kept.values()))
    assert kept_bytes[1] < kept_bytes[0]
    for saved, recomputed in zip(*gradients, strict=True):
        assert torch.equal(saved, recomputed)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_past_is_blind_to_the_future_except_by_rounding(routing):
    config = tiny_config()
    decoder = build(config)
    input_ids, _ = token_ids(config, sequences=1)
    changed = input_ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % config.vocab_size
    before, after = (decoder(ids, routing=routing).logits_BSV for ids in (input_ids, changed))
    assert not torch.equal(before[:, -1], after[:, -1])
    if routing is RoutingKind.top_k:
        torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=1e-5, atol=1e-6)


def test_wrong_shapes_are_refused_in_words():
    decoder = build(tiny_config())
    with pytest.raises(ValueError, match="max_positions"):
        decoder(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected"):
        decoder(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="labels"):
        decoder(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_equals_that_of_transformers_bit_for_bit(theta, dtype):
    from transformers.models.olmoe.modeling_olmoe import apply_rotary_pos_emb

    twin = hf_twin(build(tiny_config(attention={"rope_theta": theta})))
    position_S = torch.arange(4096)
    query = torch.randn(1, 2, 4096, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = twin.model.rotary_emb(query, position_S[None])
    expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    tables = rotary_tables(position_S, head_width=8, theta=theta)
    assert tables.cos_SA.dtype == tables.sin_SA.dtype == torch.float32
    assert torch.equal(rotate(query, tables), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_that_of_transformers_bit_for_bit(dtype):
    from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 32, generator=generator).to(dtype), torch.randn(32, generator=generator).to(dtype)
    ours, theirs = RMSNorm(32, eps=1e-5).to(dtype), OlmoeRMSNorm(32, eps=1e-5).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(weight)
        theirs.weight.copy_(weight)
    assert torch.equal(ours(x), theirs(x))
