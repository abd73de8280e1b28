"""Between log lines the host asks the device for nothing, and once a run is warm nothing is compiled."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import training.parallel
from tests.training.op_counter import OpCounter
from tests.training.test_trainer import logged
from training.config import RunConfig
from training.trainer import EXIT_DONE, Trainer
from training.world import World

# Operators that give the host a number of the device's, or a size that depends on one.
SYNCING = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "is_nonzero", "item", "nonzero", "masked_select", "_unique2", "bincount")
}


class SyncCounter(OpCounter):
    """Counts operators for which the host would wait."""

    def syncs(self) -> dict[str, int]:
        return {name: count for name, count in self.calls.items() if name in SYNCING}


QUIET = ("logging.every_steps=100", "evaluation.every_steps=0", "checkpoint.every_steps=0", "train.num_steps=100")


@pytest.mark.parametrize(
    "overrides",
    [
        ("routing@model.moe.routing=top_k",),
        ("model.moe.routing.rounding=stochastic", "model.moe.router=sigmoid", "train.balance_scope=global_step"),
        ("data.mask_documents=true", "parallel.activation_checkpointing=selective"),
        ("train.precision=bf16", "parallel.activation_checkpointing=selective"),
    ],
    ids=["top_k", "stochastic", "documents", "sharded"],
)
def test_steps_without_a_log_line_ask_the_device_for_no_number(
    small_run: Callable[..., RunConfig], overrides: tuple[str, ...], sharded_world: World
) -> None:
    trainer = Trainer(small_run("run.device=cpu", "kernels=portable", *QUIET, *overrides), sharded_world)
    trainer._step()  # the first looks at every gradient
    with SyncCounter() as counter:
        for _ in range(3):
            trainer._step()
    trainer._micro_batches.close()
    assert counter.calls["aten::mm"] > 0
    assert counter.syncs() == {}


def test_a_log_line_is_what_asks(small_run: Callable[..., RunConfig], sharded_world: World) -> None:
    # The counter sees what it is for.
    trainer = Trainer(small_run("kernels=portable", *QUIET), sharded_world)
    result = trainer._step()
    with SyncCounter() as counter:
        trainer._step_metrics(result)
    trainer._micro_batches.close()
    assert counter.syncs() != {}


def test_nothing_is_compiled_after_the_first_evaluation(
    small_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_eagerly = partial(training.parallel.compile_blocks, backend="aot_eager")
    monkeypatch.setattr(training.parallel, "compile_blocks", compile_eagerly)
    config = small_run(
        *("kernels=portable", "parallel.compile=true", "parallel.activation_checkpointing=selective"),
        *("model.moe.routing.rounding=stochastic", "evaluation.every_steps=2", "train.num_steps=4"),
        *("data.sequence_length=32", "train.global_batch_sequences=8"),
        *("data.order_seed=3", "evaluation.max_sequences=20"),  # 20 rows: two micro-batches, four rows left over
    )
    assert Trainer(config, World(rank=0, size=1, device=torch.device("cpu"))).fit() == EXIT_DONE
    graphs = [line["compile/graphs"] for line in logged(config) if "compile/graphs" in line]
    torch._dynamo.reset()
    # The blocks are alike, so the training step has one graph; the first evaluation adds one for each routing.
    assert graphs == [1, 1, 3, 3]


def test_a_run_that_compiles_nothing_counts_nothing(small_run: Callable[..., RunConfig]) -> None:
    config = small_run("train.num_steps=2")
    Trainer(config, World(rank=0, size=1, device=torch.device("cpu"))).fit()
    first, last = (line["compile/graphs"] for line in logged(config) if "compile/graphs" in line)
    assert first == last


@pytest.mark.gpu
@pytest.mark.parametrize("compiles", ["true", "false"])
@pytest.mark.parametrize("routing", ["top_k", "token_rounding"])
def test_no_cuda_call_waits_in_five_steps(
    small_run: Callable[..., RunConfig], sharded_world: World, routing: str, compiles: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    config = small_run(
        *(f"routing@model.moe.routing={routing}", "train.precision=bf16", f"parallel.compile={compiles}"),
        *("parallel.activation_checkpointing=selective", "model.moe.routing.tile_m=32", "kernels=portable", *QUIET),
    )
    trainer = Trainer(config, sharded_world)
    for _ in range(3):
        trainer._step()
    trainer._guard.settle()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            trainer._step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer._guard.settle()
    trainer._micro_batches.close()
