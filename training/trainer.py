"""The life of a run in one process: build or resume, step, log, evaluate, save, stop."""

import logging
import sys

import torch

from checkpoint.state import TrainState
from checkpoint.store import latest_checkpoint, load_checkpoint, save_checkpoint
from data.batch import Batch
from data.loader import open_prepared
from model.decoder import Decoder
from model.moe import moe_problem
from moe_kernels import resolve_backend
from training.config import RunConfig, WandbMode
from training.environment import StopRequest, choose_device, fix_numerics
from training.evaluate import held_out_losses, num_evaluation_batches
from training.metrics import Stopwatch
from training.optim import build_optimizer, learning_rate, set_learning_rate
from training.run_folder import check_vocabulary, config_values, open_run
from training.sinks import ConsoleSink, JsonlSink, Sink, Sinks, WandbSink, import_wandb, new_wandb_id
from training.step import StepInput, StepResult, train_step

log = logging.getLogger(__name__)

EXIT_DONE = 0
EXIT_STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: saved, and worth starting again


class Trainer:
    """One run, from its configuration to its last checkpoint."""

    def __init__(self, config: RunConfig) -> None:
        """Open the data and the run folder, build the model, and resume from the newest complete checkpoint.

        Raises: ValueError or KernelUnavailable, before anything is built or overwritten, naming the knob to turn.
        """
        self.config = config
        self._stopwatch = Stopwatch()
        for warning in config.warnings():
            log.warning(warning)
        fix_numerics(config.train.num_threads)
        self.device = choose_device(config.run.device)
        self.data = open_prepared(config.data)
        check_vocabulary(config, self.data)
        num_evaluation_batches(self.data.held_out.num_rows, config)
        if config.logging.wandb is not WandbMode.off:
            import_wandb()
        problem = moe_problem(config.model, tokens=config.micro_batch_tokens, dtype=torch.float32, device=self.device)
        backend = resolve_backend(config.kernels.backend, problem)
        self.folder = open_run(config, self.data)
        self.model = Decoder(config.model, backend=backend)
        self.model.init_weights(config.train.seed)
        self.model.to(self.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.state = self._resume()
        counts = self.state.top_k_counts
        self._previous_count_LE = None if counts is None else torch.tensor(counts, device=self.device)

    def _resume(self) -> TrainState:
        checkpoint = latest_checkpoint(self.folder.checkpoints)
        if checkpoint is None:
            log.info("new run in %s", self.folder.path)
            return TrainState(step=0, tokens=0, samples=0, wandb_id=new_wandb_id(self.config.logging))
        state = load_checkpoint(checkpoint, model=self.model, optimizer=self.optimizer)
        if state.wandb_id is None:
            state.wandb_id = new_wandb_id(self.config.logging)
        log.info("resumed %s at step %d, %d tokens", checkpoint, state.step, state.tokens)
        return state

    def fit(self) -> int:
        """Train to the last step, ``run.stop_at_step`` or a signal, and return the exit code of the process."""
        num_steps = self.config.train.num_steps
        last_step = min(num_steps, self.config.run.stop_at_step or num_steps)
        if self.state.step >= last_step:
            log.info("nothing to do: the run is at step %d of %d", self.state.step, last_step)
            return EXIT_DONE
        with StopRequest() as stop, Sinks(self._sinks()) as sinks:
            self._stopwatch.lap("start")
            while self.state.step < last_step and not stop:
                result = self._step()
                is_last = self.state.step == last_step or bool(stop)
                if is_last or self.state.step % self.config.logging.every_steps == 0:
                    sinks.write(self._progress() | self._step_metrics(result))
                    self._stopwatch.lap("log")
                if not stop and self._is_due(self.config.evaluation.every_steps, is_end=self.state.step == num_steps):
                    self._evaluate(sinks, stop)
                if self._is_due(self.config.checkpoint.every_steps, is_end=is_last or bool(stop)):
                    self._save()
        if stop:
            print(f"stopped by {stop.signal.name if stop.signal else ''} at step {self.state.step}", file=sys.stderr)
            return EXIT_STOPPED_BY_SIGNAL
        return EXIT_DONE

    def _is_due(self, every_steps: int, *, is_end: bool) -> bool:
        return is_end or (every_steps > 0 and self.state.step % every_steps == 0)

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = [
            ConsoleSink(self.config.train.num_steps),
            JsonlSink(self.folder.metrics, start=self._progress()),
        ]
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
        micro_batches = [
            self._micro_batch(self.state.samples + index * train.micro_batch_sequences)
            for index in range(train.micro_batches_per_step)
        ]
        self._stopwatch.lap("data")
        result = train_step(
            self.model,
            self.optimizer,
            StepInput(
                micro_batches=micro_batches,
                first_sample=self.state.samples,
                previous_count_LE=self._previous_count_LE,
            ),
            config=train,
            routing=self.config.model.moe.routing.train,
            lap=self._stopwatch.lap,
        )
        self._previous_count_LE = result.load.top_k_count_LE
        tokens = train.global_batch_sequences * self.config.data.sequence_length
        self.state.step += 1
        self.state.samples += train.global_batch_sequences
        self.state.tokens += tokens
        self._stopwatch.count_step(tokens)
        return result

    def _micro_batch(self, first_sample: int) -> Batch:
        return self.data.train.batch(first_sample, self.config.train.micro_batch_sequences).to(self.device)

    def _progress(self) -> dict[str, float]:
        return {
            "progress/step": self.state.step,
            "progress/tokens": self.state.tokens,
            "progress/epoch": self.state.samples / self.data.train.num_rows,
        }

    def _step_metrics(self, result: StepResult) -> dict[str, float]:
        metrics = {f"loss/{name}": float(value) for name, value in result.losses._asdict().items()}
        metrics["optim/grad_norm"] = float(result.grad_norm)
        metrics["optim/lr"] = self.optimizer.param_groups[0]["lr"]
        metrics |= result.load.metrics()
        metrics |= self._stopwatch.window(num_devices=1)
        if self.device.type == "cuda":
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
        return metrics

    def _evaluate(self, sinks: Sinks, stop: StopRequest) -> None:
        losses = held_out_losses(self.model, self.data.held_out, self.config, stop=stop)
        self._stopwatch.lap("eval")
        if losses is not None:
            sinks.write(self._progress() | losses)

    def _save(self) -> None:
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
