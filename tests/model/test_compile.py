"""Blocks compile whole, and once for each kind of forward: no seed, step, document or layer compiles them anew."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from model.attend import AttentionKernel
from model.config import RoutingConfig
from model.decoder import Decoder
from model.documents import Documents
from moe_kernels import BackendName, Rounding, RoutingKind
from tests.model.tiny_models import build, relative_difference, tiny_config, token_ids

STOCHASTIC = RoutingConfig(tile_m=8, rounding=Rounding.stochastic)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(*, backend: str = "eager", **options) -> Decoder:
    decoder = build(tiny_config(moe={"routing": STOCHASTIC}), backend=BackendName.portable, **options)
    for block in decoder.blocks:
        block.compile(fullgraph=True, dynamic=False, backend=backend)
    return decoder


def documents(first: int) -> Documents:
    number = (torch.arange(16) >= first).long().expand(3, 16)
    return Documents(number, torch.where(number == 0, torch.arange(16), torch.arange(16) - first))


def gradients(decoder: Decoder, **options) -> list[Tensor]:
    decoder.zero_grad()
    decoder(*token_ids(decoder.config), **options).ce_sum.backward()
    return [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]


def test_training_compiles_once_for_each_routing():
    decoder = compiled()
    for seed in range(4):
        gradients(decoder, routing=RoutingKind.token_rounding, seed=seed)
        assert num_graphs() == 1  # shared by all layers
    for seed in (torch.tensor(5), torch.tensor(6)):
        gradients(decoder, routing=RoutingKind.token_rounding, seed=seed)
        assert num_graphs() == 1
    for _ in range(2):
        gradients(decoder, routing=RoutingKind.top_k)
        assert num_graphs() == 2


def test_documents_compile_once_wherever_they_begin():
    decoder = compiled()
    for first in (3, 7, 16):
        gradients(decoder, routing=RoutingKind.top_k, documents=documents(first))
        assert num_graphs() == 1


def test_evaluation_compiles_once_for_each_routing_and_batch_size():
    decoder = compiled()
    input_ids, labels = token_ids(decoder.config)
    with torch.no_grad():
        for _ in range(2):
            for batch in (slice(0, 3), slice(0, 1)):  # the last batch is short
                for routing in (RoutingKind.top_k, RoutingKind.token_rounding):
                    decoder(input_ids[batch], labels[batch], routing=routing, seed=0)
    assert num_graphs() == 4


@pytest.mark.parametrize(("with_documents", "recompute_h"), [(False, False), (True, True)])
def test_a_compiled_decoder_has_the_gradients_of_the_plain_one(with_documents, recompute_h):
    options = {"routing": RoutingKind.token_rounding, "seed": 3}
    if with_documents:
        options["documents"] = documents(5)
    config = tiny_config(moe={"routing": STOCHASTIC})
    expected = gradients(build(config, backend=BackendName.portable), **options)
    actual = gradients(compiled(backend="aot_eager", recompute_h=recompute_h), **options)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_difference(ours, theirs) <= 1e-5


def test_flex_attention_takes_every_batch_of_documents_without_being_compiled_anew():
    decoder = compiled(attention=AttentionKernel.flex)
    input_ids, labels = token_ids(decoder.config)
    plain = build(tiny_config(moe={"routing": STOCHASTIC}), backend=BackendName.portable)
    with torch.no_grad():  # torch has no backward of FlexAttention for CPUs
        for first in (3, 7, 16):
            actual = decoder(input_ids, labels, documents=documents(first)).ce_sum
            assert num_graphs() == 1
            assert relative_difference(actual, plain(input_ids, labels, documents=documents(first)).ce_sum) <= 1e-5
