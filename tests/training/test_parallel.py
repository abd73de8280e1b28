from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from model.config import AttentionConfig, ModelConfig, MoEConfig, RoutingConfig
from model.decoder import Decoder
from model.documents import Documents
from model.moe import moe_problem
from moe_kernels import BackendName, RoutingKind, resolve_backend
from tests.training.op_counter import OpCounter
from training import parallel
from training.audit import audit_first_step
from training.config import ActivationCheckpointing, DeviceName, OptimConfig, ParallelConfig, Precision, RunConfig
from training.optim import build_optimizer
from training.parallel import DTYPES, build_mesh, build_parallel, checkpoint_activations, compile_blocks
from training.trainer import Trainer
from training.world import World, open_world

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
CONFIG = ModelConfig(
    vocab_size=50,
    width=16,
    num_layers=2,
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_width=8),
    moe=MoEConfig(num_experts=4, experts_per_token=2, expert_width=8, routing=RoutingConfig(tile_m=8)),
)


@pytest.fixture
def own_group() -> Iterator[World]:
    """A world of one process with a process group, as a start without torchrun has."""
    world = open_world(DeviceName.cpu)
    yield world
    world.close()


def norm_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
    return float((whole.float() - truth).norm() / truth.norm())


def build(world: World = ALONE, *, precision: Precision = Precision.fp32, **options: Any) -> Decoder:
    problem = moe_problem(CONFIG, tokens=64, dtype=DTYPES[precision], device=world.device)
    backend = resolve_backend(BackendName.reference, problem)
    return build_parallel(
        lambda: Decoder(CONFIG, backend=backend), world, ParallelConfig(**options), precision=precision, seed=0
    )


def two_documents_a_row() -> Documents:
    place_BS = torch.arange(16).expand(4, 16)
    start_BS = torch.tensor([[1], [5], [9], [15]])
    return Documents((place_BS >= start_BS).int(), place_BS - start_BS * (place_BS >= start_BS))


def forward_backward(model: Decoder, documents: Documents | None = None) -> dict[str, torch.Tensor]:
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(0))
    output = model(ids[:, :-1], ids[:, 1:], routing=RoutingKind.token_rounding, documents=documents)
    (output.ce_sum + output.moe.z_sum.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("documents", [None, two_documents_a_row()], ids=["whole_rows", "documents"])
@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("elementwise", 1), ("selective", 1), ("full", 2)])
def test_the_moe_op_runs_once_a_step_unless_everything_is_recomputed(
    mode: str, times: int, documents: Documents | None
) -> None:
    model = build(activation_checkpointing=ActivationCheckpointing[mode])
    with OpCounter() as counter:
        forward_backward(model, documents)
    assert counter.calls["gristmill::moe_experts_fwd"] == times * CONFIG.num_layers
    assert counter.calls["gristmill::moe_experts_bwd"] == CONFIG.num_layers
    attention = sum(n for name, n in counter.calls.items() if "scaled_dot_product" in name and "backward" not in name)
    assert attention == times * CONFIG.num_layers


class ProductCounter(TorchDispatchMode):
    """Counts matrix products by the shape of their right-hand side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm"):
            self.calls[tuple(args[-1].shape)] += 1
        return func(*args, **(kwargs or {}))


def products_of_a_backward(mode: ActivationCheckpointing, *, bias: bool, compiled: bool) -> Counter[tuple[int, ...]]:
    """Return the matrix products in the backward of two blocks with experts and a dense one, in a second step."""
    # The widths of the stream, of queries, of all three and of the MLP differ, and with them the weights' shapes.
    config = replace(
        CONFIG,
        num_layers=3,
        dense_layers=[1],
        dense_width=20,
        attention=AttentionConfig(num_heads=3, num_kv_heads=1, head_width=8, bias=bias),
    )
    backend = resolve_backend(
        BackendName.reference, moe_problem(config, tokens=64, dtype=torch.float32, device=ALONE.device)
    )
    model = Decoder(config, backend=backend)
    model.init_weights(0)
    checkpoint_activations(model, mode)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, backend="aot_eager")  # it divides forward and backward as Inductor does
    ids = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        loss = model(ids[:, :-1], ids[:, 1:], routing=RoutingKind.token_rounding).ce_sum
        with ProductCounter() as counter:
            loss.backward()
    return counter.calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_repeats_every_second_product_and_elementwise_none(compiled: bool, bias: bool) -> None:
    once, kept, selective = (
        products_of_a_backward(ActivationCheckpointing[name], bias=bias, compiled=compiled)
        for name in ("none", "elementwise", "selective")
    )
    assert kept == once
    # Attention's projection in all three blocks and up in the dense one, not queries, keys and values (16, 40).
    repeated = {(24, 16): 3, (16, 20): 1}
    assert selective == once + Counter(repeated)


def test_what_selective_checkpointing_keeps_is_attention_the_experts_and_the_routing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "create_selective_checkpoint_contexts", lambda policy: policy)
    aten = torch.ops.aten
    forward, again = (SelectiveCheckpointContext(is_recompute=again) for again in (False, True))

    def kept(nth: int, *ops: Any) -> list[bool]:
        policy: Any = parallel._contexts(nth)
        in_forward = [policy(forward, op) is CheckpointPolicy.MUST_SAVE for op in ops]
        assert [policy(again, op) is CheckpointPolicy.MUST_SAVE for op in ops] == in_forward
        return in_forward

    others = [torch.ops.gristmill.moe_experts_fwd.default, aten._scaled_dot_product_flash_attention.default]
    # The router's product alone has a dtype of its own, and is not counted.
    products = [aten.mm.default, *others, aten.addmm.default, aten.mm.dtype, aten.mm.default, aten.mm.default]
    assert kept(2, *products) == [True, True, True, False, True, True, False]
    assert kept(1, *products) == [True] * 7
    assert kept(1, aten.mul.Tensor) == [False]


@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_checkpointing_keeps_parameter_names_and_gradients(mode: ActivationCheckpointing) -> None:
    plain, other = build(), build(activation_checkpointing=mode)
    expected, actual = forward_backward(plain), forward_backward(other)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_checkpointing_keeps_gradients_with_documents(mode: ActivationCheckpointing) -> None:
    documents = two_documents_a_row()
    expected = forward_backward(build(), documents)
    actual = forward_backward(build(activation_checkpointing=mode), documents)
    whole_rows = forward_backward(build())
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
        assert norm_error(whole_rows[name], gradient) > 1e-3, name


@pytest.mark.parametrize("documents", [None, two_documents_a_row()], ids=["whole_rows", "documents"])
def test_compiled_blocks_give_the_same_gradients(documents: Documents | None) -> None:
    expected, actual = forward_backward(build(), documents), forward_backward(build(compile=True), documents)
    for name, gradient in expected.items():
        assert norm_error(actual[name], gradient) < 1e-5, name


@pytest.mark.parametrize("documents", [None, two_documents_a_row()], ids=["whole_rows", "documents"])
def test_bf16_keeps_parameters_and_gradients_in_fp32_and_computes_in_bf16(
    own_group: World, documents: Documents | None
) -> None:
    model = build(own_group, precision=Precision.bf16)
    seen: list[torch.dtype] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    actual, truth = forward_backward(model, documents), forward_backward(build(), documents)
    baseline = forward_backward(build().to(torch.bfloat16), documents)
    assert seen == [torch.bfloat16]
    for name, parameter in model.named_parameters():
        assert parameter.dtype == actual[name].dtype == torch.float32, name
        error, allowed = (norm_error(grads[name], truth[name]) for grads in (actual, baseline))
        assert 0 < error <= 2 * allowed + torch.finfo(torch.bfloat16).eps, name


def test_sharded_parameters_start_from_the_same_values(own_group: World) -> None:
    sharded, plain = build(own_group, precision=Precision.bf16), build()
    for (name, parameter), (other, expected) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(parameter.full_tensor(), expected), name


def test_processes_that_do_not_divide_are_refused() -> None:
    world = World(rank=0, size=6, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"parallel\.shard_degree=4 does not divide the 6 processes"):
        build_mesh(world, ParallelConfig(shard_degree=4))


def test_a_bf16_run_trains_saves_and_resumes_bit_for_bit(small_run: Callable[..., RunConfig], own_group: World) -> None:
    bf16 = "train.precision=bf16"
    whole = Trainer(small_run("run.name=whole", bf16), own_group)
    whole.fit()
    # Evaluated and saved after every step, with blocks that an evaluation leaves gathered.
    kept = ("parallel.reshard_after_forward=false", "parallel.blocks_per_unit=2")
    often = ("evaluation.every_steps=1", "checkpoint.every_steps=1")
    for stop in (3, 6):
        parts = Trainer(small_run("run.name=parts", bf16, f"run.stop_at_step={stop}", *kept, *often), own_group)
        parts.fit()
    for (name, left), (_, right) in zip(whole.model.named_parameters(), parts.model.named_parameters(), strict=True):
        assert torch.equal(left.full_tensor(), right.full_tensor()), name


def test_a_step_that_processes_cannot_share_is_refused(small_run: Callable[..., RunConfig]) -> None:
    with pytest.raises(ValueError, match=r"train\.global_batch_sequences=16 is 2 micro-batches.*multiple of 24"):
        Trainer(small_run(), World(rank=0, size=3, device=torch.device("cpu")))


def step_once(model: Decoder) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
    forward_backward(model)
    optimizer.step()
    return optimizer


def test_audit_passes_a_model_in_which_everything_learns() -> None:
    model = build()
    audit_first_step(model, step_once(model))


def test_audit_names_a_parameter_that_no_gradient_reached() -> None:
    model = build()
    model.blocks[1].attention.qkv_proj.weight.register_hook(torch.zeros_like)
    with pytest.raises(RuntimeError, match=r"no gradient reached blocks\.1\.attention\.qkv_proj\.weight"):
        audit_first_step(model, step_once(model))


def test_audit_names_a_buffer_that_is_not_finite() -> None:
    model = build()
    model.register_buffer("counts", torch.full((3,), float("nan")))
    with pytest.raises(RuntimeError, match=r"counts hold numbers that are not finite"):
        audit_first_step(model, step_once(model))


def test_processes_that_differ_are_refused(own_group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(gathered: list[Any], values: dict[str, str]) -> None:
        gathered[:] = [values, values | {"code": "other"}]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(ValueError, match="they differ in code"):
        World(rank=0, size=2, device=torch.device("cpu")).require_same(code="mine", data="same")


def test_an_error_of_the_first_process_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rank=1, size=2, device=torch.device("cpu"))
    monkeypatch.setattr(
        dist,
        "broadcast_object_list",
        lambda answer, device: answer.__setitem__(0, (None, ValueError("run.name=x exists"))),
    )
    with pytest.raises(ValueError, match=r"run\.name=x exists"):
        world.first(lambda: pytest.fail("only the first process does this"))
