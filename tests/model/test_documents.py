"""Documents packed into a row are as if each were alone: logits, gradients, and nothing of one in another."""

import math

import pytest
import torch
from torch import Tensor

from model.attend import attend
from model.decoder import Decoder
from model.documents import Documents, document_bias
from model.kv_cache import empty_kv_cache
from model.rope import rotary_tables, rotate
from moe_kernels import BackendName, RoutingKind
from tests.model.test_kv_cache import CONFIGS, tolerance
from tests.model.tiny_models import build, hf_twin, in_our_layout, relative_difference, tiny_config, token_ids

LENGTHS = [[5, 1, 10], [16], [3, 4, 9]]  # of the documents of each row
FIRST = slice(0, 5), slice(5, 16)  # of the first row: its first document, and the others


def documents(lengths_of_rows: list[list[int]]) -> Documents:
    number = [[n for n, length in enumerate(lengths) for _ in range(length)] for lengths in lengths_of_rows]
    position = [[place for length in lengths for place in range(length)] for lengths in lengths_of_rows]
    return Documents(torch.tensor(number, dtype=torch.int32), torch.tensor(position))


def each_alone(decoder: Decoder, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and summed loss of every document in a forward of its own."""
    logits, losses = [], []
    for row, lengths in enumerate(LENGTHS):
        pieces = zip(input_ids[row : row + 1].split(lengths, 1), labels[row : row + 1].split(lengths, 1), strict=True)
        outputs = [(decoder(ids).logits_BSV, decoder(ids, labels).ce_sum) for ids, labels in pieces]
        logits.append(torch.cat([output[0] for output in outputs], dim=1))
        losses += [output[1] for output in outputs]
    return torch.cat(logits), torch.stack(losses).sum()


@pytest.mark.parametrize("backend", [BackendName.reference, BackendName.portable])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_each_alone(name, backend):
    packed, alone = build(CONFIGS[name], backend=backend), build(CONFIGS[name], backend=backend)
    input_ids, labels = token_ids(packed.config)
    logits = packed(input_ids, documents=documents(LENGTHS)).logits_BSV
    packed_loss = packed(input_ids, labels, documents=documents(LENGTHS)).ce_sum
    expected_logits, expected_loss = each_alone(alone, input_ids, labels)
    for row in range(len(LENGTHS)):
        for place in range(input_ids.shape[1]):
            ours, theirs = logits[row, place], expected_logits[row, place]
            assert relative_difference(ours, theirs) <= tolerance(packed.config), (row, place)
    assert relative_difference(packed_loss, expected_loss) <= 1e-5
    packed_loss.backward()
    expected_loss.backward()
    for parameter_name, parameter in packed.named_parameters():
        assert parameter.grad.any(), parameter_name
        expected = alone.get_parameter(parameter_name).grad
        assert relative_difference(parameter.grad, expected) <= 1e-5, parameter_name


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_equal_transformers(name):
    decoder = build(CONFIGS[name])
    twin = hf_twin(decoder)
    input_ids, _ = token_ids(decoder.config)
    packed = documents(LENGTHS)
    # Without a cache and an attention mask, transformers 5 takes positions that start anew for documents.
    expected_logits = twin(input_ids=input_ids, position_ids=packed.position_BS, use_cache=False).logits
    logits = decoder(input_ids, documents=packed).logits_BSV
    assert relative_difference(logits, expected_logits) <= 1e-5
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * direction).sum().backward()
    (expected_logits * direction).sum().backward()
    theirs = {hf_name: parameter.grad for hf_name, parameter in twin.named_parameters()}
    for parameter_name, parameter in decoder.named_parameters():
        difference = relative_difference(parameter.grad, in_our_layout(theirs, parameter_name))
        assert difference <= 1e-5, parameter_name


def changed(input_ids: Tensor, where: slice, vocab_size: int) -> Tensor:
    other = input_ids.clone()
    other[0, where] = (other[0, where] + 1) % vocab_size
    return other


@pytest.mark.parametrize("change", FIRST, ids=["earlier", "later"])
@pytest.mark.parametrize("experts_per_token", [2, 8])
def test_tokens_of_one_document_move_no_logit_of_another(change, experts_per_token):
    (kept,) = (part for part in FIRST if part != change)
    decoder = build(tiny_config(moe={"experts_per_token": experts_per_token}))
    input_ids, _ = token_ids(decoder.config)
    other_ids = changed(input_ids, change, decoder.config.vocab_size)
    with torch.no_grad():
        before, after = (decoder(ids, documents=documents(LENGTHS)).logits_BSV for ids in (input_ids, other_ids))
    if experts_per_token == 8:
        # Every expert sees every token, so no product has another shape.
        assert torch.equal(after[0, kept], before[0, kept])
        assert torch.equal(after[1:], before[1:])
    for row, place in [(0, place) for place in range(16)[kept]] + [(1, 0), (2, 15)]:
        assert relative_difference(after[row, place], before[row, place]) <= tolerance(decoder.config)
    assert all(relative_difference(after[0, place], before[0, place]) > 1e-2 for place in range(16)[change])


def test_without_documents_a_stray_token_is_seen():
    decoder = build(tiny_config())
    input_ids, _ = token_ids(decoder.config)
    other_ids = changed(input_ids, FIRST[0], decoder.config.vocab_size)
    with torch.no_grad():
        before, after = (decoder(ids).logits_BSV[0, FIRST[1]] for ids in (input_ids, other_ids))
    assert relative_difference(after, before) > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("read", FIRST, ids=["first", "others"])
def test_logits_of_a_document_have_no_gradient_from_another(name, read):
    (unread,) = (part for part in FIRST if part != read)
    decoder = build(CONFIGS[name])
    embedded = []
    decoder.embed.register_forward_hook(lambda module, args, output: embedded.append(output))
    logits = decoder(token_ids(decoder.config)[0], documents=documents(LENGTHS)).logits_BSV
    (grad_BSD,) = torch.autograd.grad(logits[0, read].square().sum(), embedded)
    assert (grad_BSD[0, read] != 0).any(-1).all()
    assert not grad_BSD[0, unread].any()
    assert not grad_BSD[1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_attention_over_long_documents_is_its_definition(dtype, num_kv_heads):
    # Long enough that the kernel meets whole blocks of keys that a query doesn't see.
    lengths, H, A = [[700, 1, 899], [1600]], 4, 8
    packed = documents(lengths)
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(2, n, 1600, A, generator=generator).to(dtype) for n in (H, num_kv_heads, num_kv_heads, H)]
    query, key, value = (tensor.clone().requires_grad_() for tensor in heads[:3])
    attended = attend(query, key, value, mask=document_bias(packed, dtype=dtype))
    actual = (attended, *torch.autograd.grad((attended * heads[3]).sum(), (query, key, value)))

    exact = [tensor.double() for tensor in heads]
    query, key, value = (tensor.clone().requires_grad_() for tensor in exact[:3])
    scores = query @ key.repeat_interleave(H // num_kv_heads, dim=1).mT / math.sqrt(A)
    place = torch.arange(1600)
    sees = (packed.number_BS[:, :, None] == packed.number_BS[:, None, :]) & (place[:, None] >= place)
    attended = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1) @ value.repeat_interleave(
        H // num_kv_heads, dim=1
    )
    expected = (attended, *torch.autograd.grad((attended * exact[3]).sum(), (query, key, value)))
    # A handful of roundings each, of random sign, over the terms of sums of 1600 in fp32; bf16 keeps its sums in fp32.
    allowed = torch.finfo(dtype).eps * (math.sqrt(16 * 1600) if dtype == torch.float32 else 2)
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_difference(ours, theirs) <= allowed


def test_a_row_of_one_document_is_a_row_without():
    decoder = build(CONFIGS["olmoe_all"])
    input_ids, _ = token_ids(decoder.config)
    whole = documents([[16]] * 3)
    with torch.no_grad():
        masked, plain = decoder(input_ids, documents=whole).logits_BSV, decoder(input_ids).logits_BSV
    assert relative_difference(masked, plain) <= tolerance(decoder.config)


def test_rotary_tables_of_each_row_rotate_each_row():
    position_BS = documents(LENGTHS).position_BS
    x_BHSA = torch.randn(3, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    rotated = rotate(x_BHSA, rotary_tables(position_BS, head_width=8, theta=1e4))
    for row in range(3):
        tables = rotary_tables(position_BS[row], head_width=8, theta=1e4)
        assert torch.equal(rotated[row], rotate(x_BHSA[row : row + 1], tables)[0])


def test_every_layer_gets_positions_that_start_anew():
    # Rotation depends on differences of positions alone, so logits tell this by their rounding only.
    decoder = build(tiny_config())
    seen = []
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    packed = documents(LENGTHS)
    decoder(token_ids(decoder.config)[0], documents=packed)
    expected = rotary_tables(packed.position_BS, head_width=8, theta=decoder.config.attention.rope_theta)
    assert len(seen) == decoder.config.num_layers
    for tables in seen:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(tables, expected, strict=True))
    assert torch.equal(expected.cos_SA[0, 6], expected.cos_SA[1, 0])


def test_one_mask_serves_all_layers_and_is_kept_once():
    decoder = build(tiny_config())
    input_ids, labels = token_ids(decoder.config)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        decoder(input_ids, labels, documents=documents(LENGTHS)).ce_sum.backward()
    masks = [tensor for tensor in kept if tensor.shape[-2:] == (16, 16)]
    assert len({tensor.data_ptr() for tensor in masks}) == 1
    assert len(masks) == decoder.config.num_layers


@pytest.mark.parametrize("routing", RoutingKind)
def test_documents_reach_attention_alone(routing):
    """With its output put at zero, nothing else of the decoder reads them."""
    decoder = build(tiny_config())
    with torch.no_grad():
        for block in decoder.blocks:
            block.attention.o_proj.weight.zero_()
    input_ids, _ = token_ids(decoder.config)
    plain, masked = (
        decoder(input_ids, routing=routing),
        decoder(input_ids, routing=routing, documents=documents(LENGTHS)),
    )
    assert plain.logits_BSV.any()
    assert torch.equal(masked.logits_BSV, plain.logits_BSV)
    for ours, theirs in zip(masked.moe, plain.moe, strict=True):
        assert torch.equal(ours, theirs)


def test_documents_that_do_not_fit_are_refused_in_words():
    decoder = build(tiny_config())
    input_ids, _ = token_ids(decoder.config)
    packed = documents(LENGTHS)
    with pytest.raises(ValueError, match=r"documents\.number_BS has shape \(2, 16\), input ids \(3, 16\)"):
        decoder(input_ids, documents=packed._replace(number_BS=packed.number_BS[:2]))
    with pytest.raises(ValueError, match=r"documents\.position_BS has shape \(16,\), input ids \(3, 16\)"):
        decoder(input_ids, documents=packed._replace(position_BS=packed.position_BS[0]))
    cache = empty_kv_cache(decoder.config, num_sequences=3, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"documents with a cache.*leave them out"):
        decoder(input_ids, documents=packed, cache=cache)
