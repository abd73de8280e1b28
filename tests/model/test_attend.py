"""Every attention kernel gives the same function, and the one that runs is chosen in words."""

import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from model.attend import AttentionKernel, attend, choose_attention
from model.documents import Documents, document_bias, document_blocks
from moe_kernels import KernelUnavailable
from tests.model.tiny_models import CPU, build, relative_difference, tiny_config, token_ids

PACKAGE = "flash_attn.cute.interface"


def heads(*, S: int, H: int = 4, G: int = 4, A: int = 64, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, S, A, generator=generator).to(dtype) for n in (H, G, G))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def documents(S: int) -> Documents:
    number = torch.arange(S) // torch.tensor([[77], [S]])
    return Documents(number, torch.zeros_like(number))


@pytest.mark.parametrize(("A", "G", "S"), [(64, 4, 256), (96, 2, 301), (128, 1, 129)])
def test_blocks_and_bias_are_the_same_mask(A, G, S):
    query, key, value = (tensor.detach() for tensor in heads(S=S, A=A, G=G))
    packed = documents(S)
    by_blocks = attend(query, key, value, mask=document_blocks(packed))
    by_bias = attend(query, key, value, mask=document_bias(packed, dtype=query.dtype))
    # Sums of at most S terms of order one in fp32, in another order.
    assert relative_difference(by_blocks, by_bias) <= torch.finfo(torch.float32).eps * math.sqrt(S)
    assert relative_difference(by_blocks[0], attend(query, key, value, mask=None)[0]) > 0.1


def test_blocks_without_a_document_in_common_are_left_out():
    S, length = 1024, 256
    number = (torch.arange(S) // length).expand(2, S)
    mask = document_blocks(Documents(number, number))
    assert isinstance(mask, BlockMask)
    # In each document of two blocks the later queries see the earlier keys wholly; on the diagonal they see part.
    assert mask.kv_num_blocks.tolist() == [[[1] * 8]] * 2
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1] * 4]] * 2


def test_the_decoder_gives_flex_attention_blocks():
    by_bias, by_blocks = build(tiny_config()), build(tiny_config(), attention=AttentionKernel.flex)
    input_ids, _ = token_ids(by_bias.config)
    number = torch.tensor([0] * 5 + [1] * 11).expand(3, 16)
    position = torch.tensor([*range(5), *range(11)]).expand(3, 16)
    with torch.no_grad():
        expected, actual = (
            decoder(input_ids, documents=Documents(number, position)).logits_BSV for decoder in (by_bias, by_blocks)
        )
    assert relative_difference(actual, expected) <= 1e-5


def test_auto_is_asked_before_a_decoder_is_built():
    with pytest.raises(ValueError, match="choose_attention"):
        build(tiny_config(), attention=AttentionKernel.auto)


@pytest.mark.parametrize("mask_documents", [False, True])
def test_a_cpu_takes_sdpa_and_says_so(mask_documents, caplog):
    with caplog.at_level(logging.INFO, logger="model.attend"):
        chosen = choose_attention(
            AttentionKernel.auto, tiny_config(), device=CPU, dtype=torch.float32, mask_documents=mask_documents
        )
    assert chosen is AttentionKernel.sdpa
    assert [record.message for record in caplog.records] == ["attention: sdpa by torch on cpu (kernels.attention=auto)"]


CUDA = torch.device("cuda", 0)
REFUSALS = {
    "flex on a CPU": (AttentionKernel.flex, {"device": CPU}, "has no backward on cpu"),
    "flex without documents": (AttentionKernel.flex, {"mask_documents": False}, "data.mask_documents=false"),
    "flex for narrow heads": (AttentionKernel.flex, {}, "heads of 16 at least, and model.attention.head_width=8"),
    "flash-attn-4 with documents": (AttentionKernel.flash_attn_4, {}, "data.mask_documents=true"),
    "flash-attn-4 on a CPU": (
        AttentionKernel.flash_attn_4,
        {"device": CPU, "mask_documents": False},
        "this one is cpu",
    ),
    "flash-attn-4 in fp32": (
        AttentionKernel.flash_attn_4,
        {"dtype": torch.float32, "mask_documents": False},
        "this model in torch.float32",
    ),
    "flash-attn-4 not installed": (AttentionKernel.flash_attn_4, {"mask_documents": False}, r"gristmill\[flash\]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_kernel_that_cannot_run_is_refused_in_words(name, monkeypatch):
    kernel, changes, words = REFUSALS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, PACKAGE, None)  # an import of it fails, as where it is not installed
    arguments = {"device": CUDA, "dtype": torch.bfloat16, "mask_documents": True} | changes
    with pytest.raises(KernelUnavailable, match=f"kernels.attention={kernel.value}: .*{words}.*kernels.attention=auto"):
        choose_attention(kernel, tiny_config(), **arguments)


def test_flash_attn_4_is_refused_for_heads_that_it_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = tiny_config(attention={"head_width": 130})
    with pytest.raises(KernelUnavailable, match="head_width=130"):
        choose_attention(AttentionKernel.flash_attn_4, config, device=CUDA, dtype=torch.bfloat16, mask_documents=False)


def _stand_in_forward(query, key, value, *, causal, return_lse):
    """Do what the package's function of this name does, in its layout."""
    assert causal
    assert return_lse
    query, key, value = (_by_query_head(tensor, query.shape[2]) for tensor in (query, key, value))
    scores = _causal_scores(query, key)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), scores.logsumexp(-1), None, None, None


def _stand_in_backward(query, key, value, out, dout, logsumexp, *, causal, dq, dk, dv):
    assert causal
    H, G, A = query.shape[2], key.shape[2], query.shape[3]
    query, key, value, out, dout = (_by_query_head(tensor, H) for tensor in (query, key, value, out, dout))
    probability = (_causal_scores(query, key) - logsumexp[..., None]).exp()
    dscores = probability * (dout @ value.mT - (dout * out).sum(-1, keepdim=True)) / math.sqrt(A)
    for grad, of_head in ((dq, dscores @ key), (dk, dscores.mT @ query), (dv, probability.mT @ dout)):
        heads_of_grad = H if grad is dq else G
        grad.copy_(of_head.unflatten(1, (heads_of_grad, -1)).sum(2).transpose(1, 2))


def _by_query_head(tensor, H):
    return tensor.transpose(1, 2).repeat_interleave(H // tensor.shape[2], 1)


def _causal_scores(query, key):
    hidden = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    return (query @ key.mT / math.sqrt(query.shape[3])).masked_fill(hidden, -torch.inf)


@pytest.fixture
def stand_in(monkeypatch):
    """A stand-in for the package with the signatures of 4.0.0b36, which has no kernels for CPUs."""
    package = SimpleNamespace(_flash_attn_fwd=_stand_in_forward, _flash_attn_bwd=_stand_in_backward)
    monkeypatch.setitem(sys.modules, PACKAGE, package)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("G", [4, 2])
def test_the_operator_around_flash_attn_4_is_attention(G, compiled, stand_in):
    inputs = heads(S=37, G=G)
    direction = torch.randn(2, 4, 37, 64, generator=torch.Generator().manual_seed(1))

    def attention(query, key, value):
        # Scaled and added to, so that what is compiled holds more than the operator.
        return 2 * attend(query * 1.5, key, value, mask=None, kernel=AttentionKernel.flash_attn_4) + 1

    run = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    actual = run(*inputs)
    query, key, value = inputs
    expected = 2 * attend(query * 1.5, key, value, mask=None) + 1
    grads, expected_grads = (torch.autograd.grad(out, inputs, direction) for out in (actual, expected))
    for ours, theirs in zip((actual, *grads), (expected, *expected_grads), strict=True):
        assert relative_difference(ours, theirs) <= 1e-5


def test_the_operators_around_flash_attn_4_are_well_formed(stand_in):
    inputs = [tensor.transpose(1, 2) for tensor in heads(S=9, G=2)]
    torch.library.opcheck(torch.ops.gristmill.flash_attention_4.default, tuple(inputs))


def test_behind_a_cache_flash_attn_4_gives_way(stand_in):
    query, key, value = heads(S=16)
    whole = attend(query, key, value, mask=None, kernel=AttentionKernel.flash_attn_4)
    last = attend(query[:, :, 11:], key, value, mask=None, kernel=AttentionKernel.flash_attn_4)
    assert relative_difference(last, whole[:, :, 11:]) <= 1e-5
