"""On a GPU: every attention kernel, compiled blocks and the cross-entropy are as good as plain torch, and as frugal."""

import logging
import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F

from model.attend import AttentionKernel, attend, choose_attention
from model.config import ModelConfig, RoutingConfig
from model.decoder import Decoder
from model.documents import Documents, document_bias, document_blocks
from model.kv_cache import empty_kv_cache
from model.losses import CHUNK_TOKENS, chunked_cross_entropy
from model.rope import rotary_tables
from moe_kernels import BackendName, Rounding, RoutingKind
from moe_kernels.testing import assert_norm_close
from tests.model.tiny_models import build, relative_difference, tiny_config, token_ids
from training.config import ActivationCheckpointing
from training.parallel import checkpoint_activations, compile_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def documents(B: int, S: int, *, length: int = 77) -> Documents:
    place = torch.arange(S, device=CUDA).expand(B, S)
    shift = torch.arange(B, device=CUDA)[:, None] * 5
    number = (place + shift) // length
    return Documents(number, torch.where(number == 0, place, (place + shift) % length))


def plain_attention(query: Tensor, key: Tensor, value: Tensor, sees_BSS: Tensor) -> Tensor:
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(~sees_BSS[:, None], -torch.inf).softmax(-1) @ value


def with_gradients(attention, inputs: list[Tensor], direction: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


def assert_as_near(actual: Tensor, baseline: Tensor, truth: Tensor) -> None:
    """Fail if ``actual`` is more than twice as far from ``truth`` as plain torch in bf16 is, in norm."""
    assert actual.dtype == baseline.dtype
    allowed = 2 * relative_difference(baseline, truth) + torch.finfo(torch.bfloat16).eps / 2
    assert relative_difference(actual, truth) <= allowed


# (kernel, whether rows are packed)
CASES = {
    "sdpa": (AttentionKernel.sdpa, False),
    "sdpa with a bias": (AttentionKernel.sdpa, True),
    "flex": (AttentionKernel.flex, True),
    "flash_attn_4": (AttentionKernel.flash_attn_4, False),
}


@pytest.mark.parametrize("S", [512, 333])
@pytest.mark.parametrize(("A", "H", "G"), [(64, 4, 4), (96, 4, 2), (128, 8, 1)])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_as_good_as_plain_torch(case, A, H, G, S):
    kernel, packed = CASES[case]
    dtype = torch.bfloat16
    if kernel is AttentionKernel.flash_attn_4:
        pytest.importorskip("flash_attn.cute.interface")
    generator = torch.Generator().manual_seed(0)
    # In the layout of projections, (B, S, H, A) in memory.
    inputs = [torch.randn(2, S, n, A, generator=generator).to(CUDA, dtype).transpose(1, 2) for n in (H, G, G)]
    direction = torch.randn(2, H, S, A, generator=generator).to(CUDA, dtype)
    mask, sees_BSS = None, torch.ones(1, S, S, dtype=torch.bool, device=CUDA).tril()
    if packed:
        rows = documents(2, S)
        mask = document_blocks(rows) if kernel is AttentionKernel.flex else document_bias(rows, dtype=dtype)
        sees_BSS = sees_BSS & (rows.number_BS[:, :, None] == rows.number_BS[:, None, :])
    actual = with_gradients(lambda *qkv: attend(*qkv, mask=mask, kernel=kernel), inputs, direction)
    baseline = with_gradients(lambda *qkv: plain_attention(*qkv, sees_BSS), inputs, direction)
    exact = [tensor.double() for tensor in inputs]
    truth = with_gradients(lambda *qkv: plain_attention(*qkv, sees_BSS), exact, direction.double())
    for ours, theirs, true in zip(actual, baseline, truth, strict=True):
        assert_as_near(ours, theirs, true)


@pytest.mark.parametrize("G", [16, 4])
def test_sdpa_takes_cudnn_and_says_so(G, caplog):
    config = tiny_config(attention={"num_heads": 16, "num_kv_heads": G, "head_width": 128})
    with caplog.at_level(logging.INFO, logger="model.attend"):
        chosen = choose_attention(AttentionKernel.auto, config, device=CUDA, dtype=torch.bfloat16, mask_documents=False)
    assert chosen is AttentionKernel.sdpa
    assert "by CUDNN_ATTENTION" in caplog.text
    query = torch.randn(2, 16, 256, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    key = torch.randn(2, G, 256, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    assert "Cudnn" in attend(query, key, key, mask=None).grad_fn.name()


def test_auto_takes_flex_for_documents():
    chosen = choose_attention(
        AttentionKernel.auto, small_config(), device=CUDA, dtype=torch.bfloat16, mask_documents=True
    )
    assert chosen is AttentionKernel.flex


def small_config(*, experts_per_token: int = 2) -> ModelConfig:
    """Return a model whose shapes suit 16-bit kernels, with 4 heads over 2 and stochastic rounding."""
    return tiny_config(
        width=256,
        vocab_size=512,
        num_layers=2,
        max_positions=512,
        init_std=0.02,
        attention={"num_heads": 4, "num_kv_heads": 2, "head_width": 64},
        moe={
            "experts_per_token": experts_per_token,
            "expert_width": 128,
            "routing": RoutingConfig(tile_m=32, rounding=Rounding.stochastic),
        },
    )


def decoder_on_gpu(config: ModelConfig, *, compiled: bool, **options) -> Decoder:
    decoder = build(config, backend=BackendName.portable, dtype=torch.bfloat16, **options).to(CUDA)
    if compiled:
        for block in decoder.blocks:
            block.compile(fullgraph=True, dynamic=False)
    return decoder


def batch(decoder: Decoder) -> tuple[Tensor, Tensor]:
    input_ids, labels = token_ids(decoder.config, sequences=2, positions=300)
    return input_ids.to(CUDA), labels.to(CUDA)


def loss_and_gradients(decoder: Decoder, **options) -> list[Tensor]:
    decoder.zero_grad()
    loss = decoder(*batch(decoder), **options).ce_sum
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_of_attention_moves_the_loss_by_its_roundings_alone(case, compiled):
    kernel, packed = CASES[case]
    if kernel is AttentionKernel.flash_attn_4:
        pytest.importorskip("flash_attn.cute.interface")
    options = {"routing": RoutingKind.top_k, "documents": documents(2, 300) if packed else None}
    config = small_config(experts_per_token=8)  # all of them, so that no rounding moves a token to another expert
    decoder = decoder_on_gpu(config, compiled=compiled, attention=kernel)
    actual = loss_and_gradients(decoder, **options)
    exact = build(config, backend=BackendName.portable).to(CUDA)
    for parameter, rounded in zip(exact.parameters(), decoder.parameters(), strict=True):
        parameter.data.copy_(rounded)
    truth = loss_and_gradients(exact, **options)
    assert relative_difference(actual[0], truth[0]) <= 1e-3
    for ours, theirs in zip(actual[1:], truth[1:], strict=True):
        assert relative_difference(ours, theirs) <= 0.05  # some hundred roundings of 2^-9 in a row, of random sign


@pytest.mark.parametrize("packed", [False, True])
def test_warm_steps_compile_nothing_and_never_wait_for_the_device(packed):
    decoder = decoder_on_gpu(
        small_config(), compiled=True, attention=AttentionKernel.flex if packed else AttentionKernel.sdpa
    )
    input_ids, labels = batch(decoder)

    def step(seed, length):
        rows = documents(2, 300, length=length) if packed else None
        for routing in (RoutingKind.token_rounding, RoutingKind.top_k):
            decoder(input_ids, labels, routing=routing, seed=seed, documents=rows).ce_sum.backward()
            with torch.no_grad():
                decoder(input_ids, labels, routing=routing, seed=seed, documents=rows)

    step(2, 77)
    warm = num_graphs()
    assert warm > 0
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed, length in ((3, 50), (4, 120), (5, 300)):
            step(seed, length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert num_graphs() == warm


def test_a_compiled_block_keeps_no_fp32_copy_of_the_stream():
    decoder = decoder_on_gpu(small_config(), compiled=True)
    x_BSD = torch.randn(2, 300, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    tables = rotary_tables(torch.arange(300, device=CUDA), head_width=64, theta=1e4)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        decoder.blocks[0](x_BSD, tables, routing=RoutingKind.top_k, seed=None)
    assert any(tensor.numel() == x_BSD.numel() for tensor in kept)
    wide = [tuple(tensor.shape) for tensor in kept if tensor.dtype is torch.float32 and tensor.numel() >= x_BSD.numel()]
    assert wide == []


@pytest.mark.parametrize("mode", [ActivationCheckpointing.elementwise, ActivationCheckpointing.selective])
@pytest.mark.parametrize("routing", [RoutingKind.top_k, RoutingKind.token_rounding])
def test_a_checkpointed_block_routes_once_and_its_gradients_stay(routing, mode):
    config = small_config(experts_per_token=8)  # all of them, so that no rounding moves a token to another expert
    decoder = decoder_on_gpu(config, compiled=False)
    checkpoint_activations(decoder, mode)
    compile_blocks(decoder)
    loss_and_gradients(decoder, routing=routing, seed=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        actual = loss_and_gradients(decoder, routing=routing, seed=1)
    calls = {event.key: event.count for event in recorded.key_averages()}
    num_layers = len(decoder.moe_layers())
    assert calls["gristmill::weigh_and_choose"] == num_layers
    assert calls.get("gristmill::plan_from_mask", 0) + calls.get("gristmill::round_to_tiles", 0) == num_layers
    if routing is RoutingKind.top_k:
        plain = decoder_on_gpu(config, compiled=True)
        for ours, theirs in zip(actual, loss_and_gradients(plain, routing=routing), strict=True):
            assert relative_difference(ours, theirs) <= 0.05


def test_decoding_over_a_cache_gives_the_logits_of_the_whole():
    decoder = decoder_on_gpu(small_config(experts_per_token=8), compiled=False)
    input_ids, _ = batch(decoder)
    with torch.no_grad():
        whole = decoder(input_ids[:, :40]).logits_BSV
        cache = empty_kv_cache(decoder.config, num_sequences=2, dtype=torch.bfloat16, device=CUDA)
        pieces = []
        for piece in input_ids[:, :40].split([30, 1, 9], dim=1):
            output = decoder(piece, cache=cache)
            pieces.append(output.logits_BSV)
            cache = output.cache
    assert relative_difference(torch.cat(pieces, 1), whole) <= 0.05


def cross_entropy_inputs(dtype, *, T: int, D: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device=CUDA).manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator, device=CUDA).to(dtype).requires_grad_()
    weight_VD = (3 * D**-0.5 * torch.randn(V, D, generator=generator, device=CUDA)).to(dtype).requires_grad_()
    label_T = torch.randint(V, (T,), generator=generator, device=CUDA)
    label_T[::7] = -100
    return x_TD, weight_VD, label_T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cross_entropy_is_as_good_as_plain_torch(dtype):
    x_TD, weight_VD, label_T = cross_entropy_inputs(dtype, T=3000, D=256, V=20_011)

    def results(loss, inputs):
        return [loss.detach(), *torch.autograd.grad(loss / 2000, inputs)]

    # The last chunk is short, and of another shape than the others.
    actual = results(chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=1024), (x_TD, weight_VD))
    logits_TV = (x_TD @ weight_VD.T).float()
    plain = results(F.cross_entropy(logits_TV, label_T, reduction="sum"), (x_TD, weight_VD))
    exact = [tensor.detach().double().requires_grad_() for tensor in (x_TD, weight_VD)]
    truth = results(F.cross_entropy(exact[0] @ exact[1].T, label_T, reduction="sum"), exact)
    for ours, theirs, true in zip(actual, plain, truth, strict=True):
        if dtype is torch.float32:
            assert_norm_close(ours, theirs, 1e-5)
        else:
            assert_as_near(ours, theirs, true)
    with torch.no_grad():
        alone = chunked_cross_entropy(x_TD, weight_VD, label_T, chunk_tokens=1024)
    assert relative_difference(alone, actual[0]) <= 1e-5


def test_no_chunk_of_logits_is_ever_wide_and_nothing_is_compiled_twice():
    T, D, V = 4 * CHUNK_TOKENS, 1024, 50_304
    x_TD, weight_VD, label_T = cross_entropy_inputs(torch.bfloat16, T=T, D=D, V=V)
    chunked_cross_entropy(x_TD, weight_VD, label_T).backward()
    warm = num_graphs()
    assert warm == 1
    x_TD.grad = weight_VD.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    chunked_cross_entropy(x_TD, weight_VD, label_T).backward()
    peak = torch.cuda.max_memory_allocated() - before
    # The logits of a chunk in 16 bits, the weight's gradient in fp32 twice, dx, and some small ones.
    assert peak <= 2 * CHUNK_TOKENS * V + 2 * 4 * V * D + 2 * T * D + 32 * 2**20
    assert num_graphs() == warm
