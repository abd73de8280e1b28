"""Every parameter and buffer starts from its stated value, whatever was in memory before."""

import re
from pathlib import Path

import pytest
import torch

from model.config import AttentionConfig, QKNorm, RouterKind
from model.decoder import Decoder
from model.init import initial_value
from model.moe import moe_problem
from moe_kernels import BackendName, resolve_backend
from tests.model.tiny_models import CPU, tiny_config

CONFIG = tiny_config(
    attention={"bias": True},
    moe={"router": RouterKind.sigmoid},
    dense_layers=[1],
    dense_width=24,
    init_std=0.02,
)


def backend_for(config):
    return resolve_backend(BackendName.reference, moe_problem(config, tokens=64, dtype=torch.float32, device=CPU))


def initialised_after_poison(config, seed=0):
    with torch.device("meta"):
        decoder = Decoder(config, backend=backend_for(config))
    decoder.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*decoder.parameters(), *decoder.buffers()):
            tensor.fill_(float("nan"))
    decoder.init_weights(seed)
    return decoder


def test_every_parameter_and_buffer_is_initialised_after_to_empty():
    decoder = initialised_after_poison(CONFIG)
    tensors = dict(decoder.named_parameters()) | dict(decoder.named_buffers())
    assert any(name.endswith("expert_bias") for name in tensors)
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), name
    assert decoder(torch.zeros(1, 4, dtype=torch.int64)).logits_BSV.isfinite().all()


def test_starting_values_are_as_stated():
    decoder = initialised_after_poison(tiny_config(width=128, attention={"bias": True}, init_std=0.02))
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith(".bias"):
            assert (parameter == 0).all(), name
        else:
            assert parameter.abs().max() <= 0.06, name
            # The standard deviation of a normal cut at 3 is 0.9866; the error of an estimate from n draws is 1/√(2n).
            assert parameter.std().item() == pytest.approx(0.9866 * 0.02, rel=5 / (2 * parameter.numel()) ** 0.5), name
            assert abs(parameter.mean().item()) <= 5 * 0.02 / parameter.numel() ** 0.5, name


def test_the_same_seed_gives_the_same_values_and_another_seed_others():
    first, second, other = (initialised_after_poison(CONFIG, seed) for seed in (0, 0, 1))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.get_parameter(name)), name


def test_no_two_matrices_start_alike():
    decoder = initialised_after_poison(CONFIG)
    beginnings = [tuple(parameter.flatten()[:8].tolist()) for parameter in decoder.parameters() if parameter.ndim > 1]
    assert len(set(beginnings)) == len(beginnings)


def test_the_random_state_of_the_process_is_neither_read_nor_moved():
    torch.manual_seed(1)
    decoder = initialised_after_poison(CONFIG)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    value = initial_value("embed.weight", decoder.embed.weight.shape, init_std=0.02, seed=0)
    assert torch.equal(value, decoder.embed.weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_start_alike_in_a_deeper_model():
    shallow, deep = initialised_after_poison(tiny_config()), initialised_after_poison(tiny_config(num_layers=5))
    for name, parameter in shallow.named_parameters():
        assert torch.equal(parameter, deep.get_parameter(name)), name


def test_parameters_on_the_meta_device_are_refused():
    with torch.device("meta"):
        decoder = Decoder(CONFIG, backend=backend_for(CONFIG))
    with pytest.raises(ValueError, match="to_empty"):
        decoder.init_weights(0)


def test_parameter_names_are_those_of_the_file_format():
    decoder = initialised_after_poison(CONFIG)
    names = set(decoder.state_dict())
    attention = {
        f"attention.{projection}.{kind}" for projection in ("qkv_proj", "o_proj") for kind in ("weight", "bias")
    } | {"attention.q_norm.weight", "attention.k_norm.weight", "attention_norm.weight", "mlp_norm.weight"}
    experts = {"moe.router.weight", "moe.router.expert_bias", "moe.w_gate_up", "moe.w_down"}
    dense = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert names == {"embed.weight", "norm.weight", "lm_head.weight"} | {
        f"blocks.{layer}.{name}" for layer in range(3) for name in attention | (dense if layer == 1 else experts)
    }


def test_a_tied_model_has_no_head_of_its_own():
    assert "lm_head.weight" not in initialised_after_poison(tiny_config(tie_embeddings=True)).state_dict()


@pytest.mark.parametrize(
    ("qk_norm", "shapes"), [(QKNorm.none, None), (QKNorm.full_width, (48, 24)), (QKNorm.per_head, (12, 12))]
)
def test_qk_norm_weights_have_the_width_they_normalise(qk_norm, shapes):
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_width=12, qk_norm=qk_norm)
    state = initialised_after_poison(
        tiny_config(
            attention={
                name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_width", "qk_norm")
            }
        )
    ).state_dict()
    names = [f"blocks.0.attention.{norm}.weight" for norm in ("q_norm", "k_norm")]
    assert tuple(state[name].numel() for name in names if name in state) == (shapes or ())


def documented_starts() -> dict[str, str]:
    """Return how docs/model.md says that each parameter starts: normal, 1 or 0."""
    text = (Path(__file__).parents[2] / "docs" / "model.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\S+)` \| \(.*?\| (normal|1|0) \| .+ \|$", text, flags=re.MULTILINE))


def test_the_documentation_states_the_start_of_every_parameter_and_of_nothing_else():
    starts = documented_starts()
    tensors = initialised_after_poison(CONFIG).state_dict()
    assert {re.sub(r"blocks\.\d+\.", "blocks.{l}.", name) for name in tensors} == set(starts)
    for name, tensor in tensors.items():
        start = starts[re.sub(r"blocks\.\d+\.", "blocks.{l}.", name)]
        if start == "normal":
            assert tensor.std() > 0, name
        else:
            assert (tensor == float(start)).all(), name
