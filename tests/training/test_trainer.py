import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.store import latest_checkpoint
from moe_kernels import KernelUnavailable
from training.config import RunConfig
from training.run_folder import sole_trainer
from training.sinks import StartError
from training.trainer import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL
from training.trainer import Trainer as TrainerOfWorld
from training.world import World

SmallRun = Callable[..., RunConfig]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def Trainer(config: RunConfig) -> TrainerOfWorld:
    return TrainerOfWorld(config, ALONE)


def logged(config: RunConfig) -> list[dict[str, float]]:
    path = Path(config.run.root) / config.run.name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "progress/resumed" not in line]


def without_time(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not key.startswith(("time/", "throughput/", "compile/"))}
        for line in lines
    ]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def terminate_in_evaluation(trainer: TrainerOfWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading held-out rows send this process SIGTERM first."""
    held_out = trainer.data.held_out
    read = held_out.batch

    def terminate_then_read(first_sample: int, num_sequences: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return read(first_sample, num_sequences)

    monkeypatch.setattr(held_out, "batch", terminate_then_read)


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_run_stopped_and_resumed_twice_is_the_run_that_was_not(small_run: SmallRun, rounding: str) -> None:
    routing = f"model.moe.routing.rounding={rounding}"
    whole = Trainer(small_run("run.name=whole", routing))
    assert whole.fit() == EXIT_DONE
    for stop in (2, 5, 6):
        parts = Trainer(small_run("run.name=parts", routing, f"run.stop_at_step={stop}"))
        assert parts.fit() == EXIT_DONE
        assert parts.state.step == stop
    assert_same(weights(whole), weights(parts))
    for left, right in zip(
        whole.optimizer.state_dict()["state"].values(), parts.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert_same(left, right)
    assert without_time(logged(whole.config)) == without_time(logged(parts.config))


def test_resume_crosses_the_end_of_an_epoch(small_run: SmallRun) -> None:
    whole = Trainer(small_run("run.name=whole"))
    rows = whole.data.train.num_rows
    steps = rows // whole.config.train.global_batch_sequences + 2
    many = (f"train.num_steps={steps}", "checkpoint.every_steps=0")
    whole = Trainer(small_run("run.name=epochs", *many))
    whole.fit()
    assert whole.state.samples > rows
    for stop in (steps - 2, steps - 1, steps):
        parts = Trainer(small_run("run.name=epochs_parts", *many, f"run.stop_at_step={stop}"))
        parts.fit()
    assert_same(weights(whole), weights(parts))


def test_held_out_loss_falls_and_both_routings_are_logged(small_run: SmallRun) -> None:
    config = small_run("train.num_steps=30", "evaluation.every_steps=10", "optim.lr=1e-2")
    Trainer(config).fit()
    evaluations = [line for line in logged(config) if "eval/held_out/ce_top_k" in line]
    assert [line["progress/step"] for line in evaluations] == [10, 20, 30]
    losses = [line["eval/held_out/ce_top_k"] for line in evaluations]
    assert losses[2] < losses[1] < losses[0]
    for line in evaluations:
        gap = line["eval/held_out/ce_train_routing"] - line["eval/held_out/ce_top_k"]
        assert line["eval/held_out/routing_gap"] == gap
        assert gap != 0.0


def test_training_with_top_k_has_no_routing_gap(small_run: SmallRun) -> None:
    config = small_run("routing@model.moe.routing=top_k")
    Trainer(config).fit()
    (evaluation,) = [line for line in logged(config) if "eval/held_out/ce_top_k" in line]
    assert evaluation["eval/held_out/routing_gap"] == 0.0
    for line in logged(config):
        assert line.get("moe/pairs_added_fraction", 0.0) == 0.0
        assert line.get("moe/pairs_dropped_fraction", 0.0) == 0.0


def test_rounded_runs_fill_their_tiles(small_run: SmallRun) -> None:
    config = small_run()
    Trainer(config).fit()
    steps = [line for line in logged(config) if "loss/ce" in line]
    assert len(steps) == 6
    assert all(line["moe/tile_waste_fraction"] == 0.0 for line in steps)
    assert any(line["moe/pairs_added_fraction"] > 0 for line in steps)
    assert any(line["moe/pairs_dropped_fraction"] > 0 for line in steps)


def test_total_loss_is_the_weighted_sum_of_what_is_logged(small_run: SmallRun) -> None:
    config = small_run("train.load_balance_weight=0.3", "train.router_z_weight=0.2")
    Trainer(config).fit()
    for line in logged(config):
        if "loss/total" in line:
            total = line["loss/ce"] + 0.3 * line["loss/load_balance"] + 0.2 * line["loss/router_z"]
            assert line["loss/total"] == pytest.approx(total, rel=4 * torch.finfo(torch.float32).eps)


def test_another_configuration_under_the_same_name_is_refused_with_the_difference(small_run: SmallRun) -> None:
    Trainer(small_run())
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.003 in the run, 0\.5 now") as caught:
        Trainer(small_run("optim.lr=0.5", "train.seed=3"))
    assert "train.seed: 0 in the run, 3 now" in str(caught.value)
    assert "run.name" in str(caught.value)


def test_reporting_may_change_between_the_processes_of_a_run(small_run: SmallRun) -> None:
    Trainer(small_run("run.stop_at_step=2")).fit()
    resumed = Trainer(small_run("logging.every_steps=2", "checkpoint.keep=1", "evaluation.every_steps=3"))
    assert resumed.state.step == 2


def test_other_data_under_the_same_name_is_refused(small_run: SmallRun) -> None:
    trainer = Trainer(small_run())
    (manifest,) = json.loads(trainer.folder.data.read_text())
    name = manifest["train"]["shards"][0]["file"]
    now = manifest["files"][name]["sha256"]
    manifest["files"][name]["sha256"] = "0" * 64
    trainer.folder.data.write_text(json.dumps([manifest]))
    with pytest.raises(ValueError, match=f"{name}.sha256: '{'0' * 64}' in the run, '{now}' now"):
        Trainer(small_run())


def test_vocabulary_below_the_tokenizers_is_refused_before_anything_is_written(
    small_run: SmallRun, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size=256 .*512"):
        Trainer(small_run("model.vocab_size=256"))
    assert not (tmp_path / "runs").exists()


def test_missing_data_is_refused_with_the_command_that_makes_it(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.root.*") as caught:
        Trainer(small_run(f"data.root={tmp_path / 'nowhere'}"))
    assert "python -m data.prepare" in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_held_out_split_below_a_micro_batch_is_refused(small_run: SmallRun) -> None:
    with pytest.raises(ValueError, match=r"evaluation\.max_sequences=4"):
        Trainer(small_run("evaluation.max_sequences=4"))


def test_a_finished_run_does_nothing_and_says_so(small_run: SmallRun, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(small_run()).fit()
    finished = Trainer(small_run())
    before = logged(finished.config)
    with caplog.at_level("INFO"):
        assert finished.fit() == EXIT_DONE
    assert "nothing to do" in caplog.text
    assert logged(finished.config) == before


def test_a_signal_saves_and_leaves_with_its_own_exit_code(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_run())
    take_step = trainer._step

    def step_then_terminate() -> Any:
        result = take_step()
        if trainer.state.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(trainer, "_step", step_then_terminate)
    assert trainer.fit() == EXIT_STOPPED_BY_SIGNAL
    assert trainer.state.step == 2
    checkpoint = latest_checkpoint(trainer.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == "step_00000002"
    assert Trainer(small_run()).state.step == 2


def test_a_signal_during_evaluation_saves_too(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small_run("evaluation.every_steps=2", "checkpoint.every_steps=0"))
    terminate_in_evaluation(trainer, monkeypatch)
    assert trainer.fit() == EXIT_STOPPED_BY_SIGNAL
    checkpoint = latest_checkpoint(trainer.folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == "step_00000002"
    assert not any("eval/held_out/ce_top_k" in line for line in logged(trainer.config))


def test_a_new_run_starts_from_another_runs_weights(small_run: SmallRun) -> None:
    first = Trainer(small_run("run.name=first"))
    first.fit()
    second = Trainer(small_run("run.name=second", f"train.init_from={first.folder.path}", "train.seed=5"))
    assert second.state.step == 0
    assert_same(weights(first), weights(second))
    second.fit()
    assert Trainer(small_run("run.name=second", f"train.init_from={first.folder.path}", "train.seed=5")).state.step == 6


def test_a_start_that_is_not_this_model_is_refused(small_run: SmallRun) -> None:
    Trainer(small_run("run.name=first")).fit()
    other = small_run("run.name=second", "model.norm_eps=1e-6")
    other.train.init_from = str(Path(other.run.root) / "first")
    with pytest.raises(ValueError, match="norm_eps"):
        Trainer(other)


def test_8_bit_states_train_and_resume_bit_for_bit(small_run: SmallRun) -> None:
    pytest.importorskip("torchao", reason="the extra 'lowbit' is not installed")
    whole = Trainer(small_run("run.name=whole", "optim.states=int8"))
    whole.fit()
    for stop in (3, 6):
        parts = Trainer(small_run("run.name=parts", "optim.states=int8", f"run.stop_at_step={stop}"))
        parts.fit()
    assert_same(weights(whole), weights(parts))
    fp32 = Trainer(small_run("run.name=fp32"))
    fp32.fit()
    last, exact = (logged(trainer.config)[-2]["loss/ce"] for trainer in (whole, fp32))
    assert last != exact
    assert last == pytest.approx(exact, rel=0.01)


def test_8_bit_states_without_torchao_are_refused(small_run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"pip install 'torchao.*optim\.states=fp32"):
        Trainer(small_run("optim.states=int8"))


def test_a_batch_ramp_reads_the_same_samples_and_resumes_within_it(small_run: SmallRun) -> None:
    ramp = "train.batch_ramp=[{until_step: 3, sequences: 8}]"
    whole = Trainer(small_run("run.name=whole", ramp))
    whole.fit()
    steps = [line for line in logged(whole.config) if "loss/ce" in line]
    assert [line["progress/tokens"] for line in steps] == [64 * n for n in (8, 16, 24, 40, 56, 72)]
    for stop in (2, 4, 6):
        parts = Trainer(small_run("run.name=parts", ramp, f"run.stop_at_step={stop}"))
        parts.fit()
    assert parts.state.samples == 72
    assert_same(weights(whole), weights(parts))


# Rows long enough that documents end in some of them, of the training's first 24 and the held-out's first 16.
LONG_ROWS = ("data.sequence_length=256", "train.micro_batch_sequences=2", "train.global_batch_sequences=4")
MASKED = (*LONG_ROWS, "data.mask_documents=true")


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_a_run_that_masks_documents_resumes_bit_for_bit(small_run: SmallRun, checkpointing: str) -> None:
    overrides = (*MASKED, f"parallel.activation_checkpointing={checkpointing}")
    whole = Trainer(small_run("run.name=whole", *overrides))
    whole.fit()
    for stop in (2, 6):
        parts = Trainer(small_run("run.name=parts", *overrides, f"run.stop_at_step={stop}"))
        parts.fit()
    assert_same(weights(whole), weights(parts))
    assert without_time(logged(whole.config)) == without_time(logged(parts.config))
    unmasked = Trainer(small_run("run.name=unmasked", *LONG_ROWS))
    unmasked.fit()
    assert any(not torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(unmasked).items())


def test_held_out_loss_of_masked_documents_is_that_of_each_alone(small_run: SmallRun) -> None:
    # Weights so large that a few steps' attention matters.
    trainer = Trainer(small_run(*MASKED, "model.init_std=0.3"))
    trainer.fit()
    (evaluation,) = [line for line in logged(trainer.config) if "eval/held_out/ce_top_k" in line]
    rows = trainer.data.held_out.batch(0, 16)
    assert int(rows.document_BS.max()) > 0
    ce_sum = 0.0
    for ids, labels, number in zip(*rows, strict=True):
        lengths = number.bincount().tolist()
        for document_ids, document_labels in zip(ids.split(lengths), labels.split(lengths), strict=True):
            with torch.no_grad():
                ce_sum += float(trainer.model(document_ids[None], document_labels[None]).ce_sum)
    with torch.no_grad():
        whole_rows = float(trainer.model(rows.input_ids_BS, rows.labels_BS).ce_sum)
    expected = ce_sum / rows.labels_BS.numel()
    assert evaluation["eval/held_out/ce_top_k"] == pytest.approx(expected, rel=1e-6)
    assert whole_rows / rows.labels_BS.numel() != pytest.approx(expected, rel=1e-5)


def test_masking_documents_is_another_run(small_run: SmallRun) -> None:
    Trainer(small_run(*LONG_ROWS))
    with pytest.raises(ValueError, match=r"data\.mask_documents: False in the run, True now"):
        Trainer(small_run(*MASKED))


def test_a_run_older_than_a_key_goes_on_with_the_keys_default(small_run: SmallRun) -> None:
    trainer = Trainer(small_run("run.stop_at_step=2"))
    trainer.fit()
    text = trainer.folder.config.read_text()
    assert "  mask_documents: false\n" in text
    trainer.folder.config.write_text(text.replace("  mask_documents: false\n", ""))
    assert Trainer(small_run()).state.step == 2
    trainer.folder.config.write_text(text.replace("  mask_documents: false\n", ""))
    with pytest.raises(ValueError, match=r"data\.mask_documents: False in the run, True now"):
        Trainer(small_run("data.mask_documents=true"))
    trainer.folder.config.write_text(text + "forgotten: 1\n")
    with pytest.raises(ValueError, match=r"not a configuration of this version: .*forgotten"):
        Trainer(small_run())


def test_a_final_evaluation_that_a_signal_cut_off_is_made_up_for(
    small_run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small_run())
    terminate_in_evaluation(trainer, monkeypatch)
    assert trainer.fit() == EXIT_STOPPED_BY_SIGNAL
    assert trainer.state.step == 6
    assert not any("eval/held_out/ce_top_k" in line for line in logged(trainer.config))
    assert Trainer(small_run()).fit() == EXIT_DONE
    (evaluation,) = [line for line in logged(trainer.config) if "eval/held_out/ce_top_k" in line]
    assert evaluation["progress/step"] == 6
    before = logged(trainer.config)
    assert Trainer(small_run()).fit() == EXIT_DONE
    assert logged(trainer.config) == before


def test_a_run_that_another_process_trains_is_refused(small_run: SmallRun) -> None:
    first, second = Trainer(small_run()), Trainer(small_run())
    with sole_trainer(first.folder, is_first=True), pytest.raises(StartError, match=r"another process.*run\.name"):
        second.fit()
    assert second.fit() == EXIT_DONE


def test_rounding_that_leaves_a_layer_no_token_is_refused_with_the_knobs(small_run: SmallRun) -> None:
    # Rounding down keeps none of the pairs of an expert that has less than a tile of them.
    routing = ("model.moe.routing.rounding=down", "model.moe.routing.allow_below_one_tile=true")
    config = small_run(*routing, "model.moe.routing.tile_m=512")
    with pytest.raises(StartError, match=r"every expert of MoE layers \[0.*micro-batch.*tile_m"):
        Trainer(config).fit()


def test_what_a_killed_save_left_is_removed_when_the_run_goes_on(small_run: SmallRun) -> None:
    trainer = Trainer(small_run("run.stop_at_step=3"))
    trainer.fit()
    left = trainer.folder.checkpoints / "step_00000009.partial"
    (left / "tensors").mkdir(parents=True)
    resumed = Trainer(small_run("run.stop_at_step=4"))
    assert resumed.state.step == 3
    resumed.fit()
    assert not left.exists()


def test_attention_that_cannot_run_here_is_refused_before_anything_is_written(
    small_run: SmallRun, tmp_path: Path
) -> None:
    with pytest.raises(KernelUnavailable, match="flash_attn_4"):
        Trainer(small_run("kernels.attention=flash_attn_4"))
    assert not (tmp_path / "runs").exists()


def test_recomputed_h_changes_no_loss(small_run: SmallRun) -> None:
    kept, recomputed = small_run("run.name=kept"), small_run("run.name=recomputed", "parallel.recompute_h=true")
    trainers = [Trainer(kept), Trainer(recomputed)]
    assert [trainer.model.moe_layers()[0].recompute_h for trainer in trainers] == [False, True]
    for trainer in trainers:
        trainer.fit()
    assert without_time(logged(kept)) == without_time(logged(recomputed))
