"""The life of a run: build or resume, step, log, evaluate, save, stop. One Trainer in every process."""

import itertools
import json
import logging
import sys
from contextlib import closing, nullcontext

import torch
from torch.profiler import record_function

from checkpoint.metrics import read_metrics
from checkpoint.start import load_start
from checkpoint.state import TrainState
from checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint
from data.loader import open_prepared
from training.audit import audit_first_step, check_weights, code_fingerprint
from training.breakdown import DATA
from training.build import build_model, check_world, choose_kernels
from training.clock import clock_of
from training.compilations import count_compilations
from training.config import RunConfig, WandbMode
from training.deal import deal
from training.environment import StopRequest, fix_numerics, hide_objects, objects_seen_again
from training.evaluate import held_out_losses, num_evaluation_batches
from training.guard import StepGuard
from training.load import ExpertLoad
from training.metrics import Stopwatch
from training.optim import build_optimizer, learning_rate, set_learning_rate
from training.profiling import StepProfiler
from training.run_folder import RunFolder, check_vocabulary, config_values, find_run, open_run, sole_trainer
from training.sinks import ConsoleSink, JsonlSink, Sink, Sinks, StartError, WandbSink, import_wandb, new_wandb_id
from training.step import StepInput, StepResult, train_step
from training.step_graph import StepGraph, peak_bytes
from training.world import World

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: saved, and worth starting again


class Trainer:
    """One run, from its configuration to its last checkpoint."""

    def __init__(self, config: RunConfig, world: World) -> None:
        """Open the data and the run folder, build the model, and resume from the newest complete checkpoint.

        Raises: ValueError or KernelUnavailable, before anything is written, naming the knob to turn.
        """
        self.config = config
        self.world = world
        self._stopwatch = Stopwatch(clock=clock_of(world.device))
        self._guard = StepGuard()
        for warning in config.warnings():
            log.warning(warning)
        fix_numerics(config.train.num_threads, seed=config.train.seed)
        check_world(config, world)
        self.data = open_prepared(config.data)
        check_vocabulary(config, self.data)
        num_evaluation_batches(self.data.held_out.num_rows, config)
        if config.logging.wandb is not WandbMode.off:
            import_wandb()
        kernels = choose_kernels(config, world)
        self.backend = kernels.backend
        world.require_same(
            config=json.dumps(config_values(config)),
            data=",".join(source.manifest.sha256 for source in self.data.sources),
            code=code_fingerprint(),
            torch=torch.__version__,
            backend=kernels.backend.name,
            attention=kernels.attention.value,
        )
        self.folder: RunFolder = world.first(lambda: find_run(config, self.data))
        self.model = build_model(config, kernels, world)
        self.optimizer = build_optimizer(self.model, config.optim)
        self._graph = StepGraph(self.model) if config.records_steps else None
        if config.parallel.cuda_graph and config.profile:
            log.info("profile=true: steps are not recorded as a graph, which would have no operators to name")
        self.state = self._resume()
        # Only now: a start that is refused must not leave a run of its name behind.
        world.first(lambda: open_run(config, self.data))
        counts = self.state.top_k_counts
        self._previous_count_LE = None if counts is None else torch.tensor(counts, device=world.device)
        size = config.train.micro_batch_sequences
        self._micro_batches = deal(self.data.train, world, size=size, start=self.state.samples)

    def _resume(self) -> TrainState:
        checkpoint = self.world.first(lambda: latest_checkpoint(self.folder.checkpoints))
        if checkpoint is None:
            wandb_id = self.world.first(lambda: new_wandb_id(self.config.logging))
            log.info("new run in %s", self.folder.path)
            if self.config.train.init_from is not None:
                start = load_start(
                    self.config.train.init_from,
                    model=self.model,
                    config=self.config.model,
                    tokenizer=self.data.tokenizer_folder,
                )
                log.info("weights from %s", start)
            return TrainState(step=0, tokens=0, samples=0, wandb_id=wandb_id)
        state = load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer)
        if state.wandb_id is None:
            state.wandb_id = self.world.first(lambda: new_wandb_id(self.config.logging))
        log.info("resumed %s at step %d, %d tokens", checkpoint, state.step, state.tokens)
        return state

    def fit(self) -> int:
        """Train to the last step, ``run.stop_at_step`` or a signal, and return the exit code of the process."""
        num_steps = self.config.train.num_steps
        last_step = min(num_steps, self.config.run.stop_at_step or num_steps)
        owes_evaluation = self.state.step == num_steps and not self.world.first(self._has_final_evaluation)
        if self.state.step >= last_step and not owes_evaluation:
            log.info(
                "nothing to do: the run is at step %d (train.num_steps=%d, run.stop_at_step=%s)",
                self.state.step,
                num_steps,
                self.config.run.stop_at_step,
            )
            return EXIT_DONE
        with sole_trainer(self.folder, is_first=self.world.is_first):
            return self._train(last_step, owes_evaluation=owes_evaluation)

    def way_around(self) -> str:
        """Say how to go on after a FloatingPointError: this run would come to the same numbers again."""
        if latest_checkpoint(self.folder.checkpoints) is None:
            return (
                "Nothing was saved yet: start again with another run.name and a lower optim.lr or train.max_grad_norm"
            )
        return (
            "Start another run from its newest checkpoint: "
            f"run.name=NEW train.init_from={self.folder.path} and a lower optim.lr (here {self.config.optim.lr:g}) "
            f"or train.max_grad_norm ({self.config.train.max_grad_norm:g})"
        )

    def _has_final_evaluation(self) -> bool:
        """Say whether the last step's held-out losses were logged: a signal may have come before them."""
        if not self.folder.metrics.exists():
            return False
        try:
            lines = read_metrics(self.folder.metrics)
        except ValueError as problem:
            raise StartError(str(problem)) from problem
        last_step = self.config.train.num_steps
        return any(line["progress/step"] == last_step and "eval/held_out/routing_gap" in line for line in lines)

    def _train(self, last_step: int, *, owes_evaluation: bool) -> int:
        num_steps, first_step = self.config.train.num_steps, self.state.step
        own_sinks = self._sinks() if self.world.is_first else []
        with (
            StopRequest() as stop,
            objects_seen_again(),
            Sinks(own_sinks) as sinks,
            closing(self._micro_batches),
            nullcontext() if self._graph is None else closing(self._graph),
            StepProfiler(self.config, self.world, self.folder.profile, step=first_step) as profiler,
        ):
            self._stopwatch.lap("start")
            is_stopping = self._evaluate(sinks, stop) if owes_evaluation else False
            while self.state.step < last_step and not is_stopping:
                result = self._step()
                if self.state.step == first_step + 1:
                    hide_objects()
                if self.config.profile:
                    profiler.step(self.state.step)
                    self._stopwatch.lap("profile")
                is_stopping = self.world.any(bool(stop))
                is_last = self.state.step == last_step or is_stopping
                if is_last or self.state.step % self.config.logging.every_steps == 0:
                    self._guard.settle()
                    sinks.write(self._progress() | self._step_metrics(result))
                    self._stopwatch.lap("log")
                is_end = self.state.step == num_steps
                if not is_stopping and self._is_due(self.config.evaluation.every_steps, is_end=is_end):
                    is_stopping = self._evaluate(sinks, stop)
                if self._is_due(self.config.checkpoint.every_steps, is_end=is_last or is_stopping):
                    self._save()
        if is_stopping:
            name = stop.signal.name if stop.signal else "a signal to another process"
            print(f"stopped by {name} at step {self.state.step}; the same command goes on", file=sys.stderr)
            return EXIT_STOPPED_BY_SIGNAL
        return EXIT_DONE

    def _is_due(self, every_steps: int, *, is_end: bool) -> bool:
        return is_end or (every_steps > 0 and self.state.step % every_steps == 0)

    def _sinks(self) -> list[Sink]:
        jsonl = JsonlSink(self.folder.metrics, start=self._progress())
        sinks: list[Sink] = [ConsoleSink(self.config.train.num_steps), jsonl]
        if self.config.logging.wandb is not WandbMode.off:
            assert self.state.wandb_id is not None
            wandb_sink = WandbSink(
                self.config.logging,
                run_name=self.config.run.name,
                folder=self.folder.path,
                run_id=self.state.wandb_id,
                values=config_values(self.config),
            )
            log.info(wandb_sink.description)
            sinks.append(wandb_sink)
        return sinks

    def _step(self) -> StepResult:
        """Take one optimiser step and move the state past its samples."""
        train = self.config.train
        set_learning_rate(self.optimizer, learning_rate(self.state.step, optim=self.config.optim, train=train))
        num_sequences = train.sequences_at(self.state.step)
        num_mine = num_sequences // train.micro_batch_sequences // self.world.size
        with record_function(DATA):
            micro_batches = list(itertools.islice(self._micro_batches, num_mine))
        self._stopwatch.lap("data")
        result = train_step(
            self.model,
            self.optimizer,
            StepInput(
                micro_batches=micro_batches,
                previous_count_LE=self._previous_count_LE,
                mask_documents=self.config.data.mask_documents,
            ),
            world=self.world,
            config=train,
            routing=self.config.model.moe.routing.train,
            lap=self._stopwatch.lap,
            sum_every_micro_batch=self.config.parallel.sum_every_micro_batch,
            run=self._graph,
        )
        self._guard.watch(self.state.step + 1, result)
        if self.state.step == 0:
            self._guard.settle()
            self._check_rows(result.load)
            check_weights(self.model, step=1)
            audit_first_step(self.model, self.optimizer)
            log.info("first step: every parameter got a gradient, moved and is finite, and so is every buffer")
        self._previous_count_LE = result.load.top_k_count_LE
        tokens = num_sequences * self.config.data.sequence_length
        self.state.step += 1
        self.state.samples += num_sequences
        self.state.tokens += tokens
        self._stopwatch.count_step(tokens)
        return result

    def _check_rows(self, load: ExpertLoad) -> None:
        """Refuse to go on where the training routing kept no pair of a layer: it would never get a gradient."""
        empty = (load.rows_L == 0).nonzero().flatten().tolist()
        if empty:
            raise StartError(
                f"in the first step token rounding left every expert of MoE layers {empty} without a token: "
                f"{self.config.describe_tiles()}. Raise the micro-batch or lower model.moe.routing.tile_m"
            )

    def _progress(self) -> dict[str, float]:
        return {
            "progress/step": self.state.step,
            "progress/tokens": self.state.tokens,
            "progress/epoch": self.state.samples / self.data.train.num_rows,
        }

    def _step_metrics(self, result: StepResult) -> dict[str, float]:
        metrics = {f"loss/{name}": float(value) for name, value in result.losses._asdict().items()}
        metrics["optim/grad_norm"] = float(result.grad_norm)
        metrics["optim/lr"] = float(self.optimizer.param_groups[0]["lr"])
        metrics |= result.load.metrics()
        metrics |= self._stopwatch.window(num_devices=self.world.size)
        metrics |= count_compilations(self.backend)
        device = self.world.device
        if device.type == "cuda":
            metrics["memory/peak_gib"] = peak_bytes(device, self._graph) / 2**30
            torch.cuda.reset_peak_memory_stats(device)
        return metrics

    def _evaluate(self, sinks: Sinks, stop: StopRequest) -> bool:
        """Log the held-out losses; say whether any process was asked to stop meanwhile."""
        self._guard.settle()
        losses = held_out_losses(self.model, self.data.held_out, self.config, world=self.world, stop=stop)
        self._stopwatch.lap("eval")
        if losses is None:
            return True
        sinks.write(self._progress() | losses)
        return False

    def _save(self) -> None:
        self._guard.settle()
        check_weights(self.model, self.state.step)
        assert self._previous_count_LE is not None
        self.state.top_k_counts = self._previous_count_LE.tolist()
        path = save_checkpoint(
            self.folder.checkpoints,
            model=self.model,
            optimizer=self.optimizer,
            state=self.state,
            config=config_values(self.config),
            keep=self.config.checkpoint.keep,
        )
        self._stopwatch.lap("save")
        log.info("saved %s", path)
