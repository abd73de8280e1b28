"""Where metrics go: the console, metrics.jsonl and Weights & Biases. Their names and meaning are in metrics.py."""

import json
import logging
import os
import secrets
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, Protocol, Self

from training.config import LoggingConfig, WandbMode

log = logging.getLogger(__name__)


class StartError(ValueError):
    """A run that is built cannot start; the message names the knob."""


class Sink(Protocol):
    """Takes the metrics of one moment."""

    def write(self, metrics: dict[str, float]) -> None:
        """Record ``metrics``, which hold ``progress/step`` and ``progress/tokens`` among others."""

    def close(self) -> None:
        """Bring everything to disk and let go."""


class JsonlSink:
    """Appends one JSON object a line to a file.

    A process that goes on with a file first writes ``progress/resumed`` with the progress it starts from: what an
    earlier process logged beyond that was lost, and comes again.
    """

    def __init__(self, path: Path, *, start: dict[str, float]) -> None:
        goes_on = path.exists()
        if goes_on:
            _cut_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")
        if goes_on:
            self.write(start | {"progress/resumed": 1.0})

    def write(self, metrics: dict[str, float]) -> None:
        """Append ``metrics``."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """Prints one line for a training step and one for an evaluation."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def write(self, metrics: dict[str, float]) -> None:
        """Print ``metrics`` on a line."""
        step = int(metrics["progress/step"])
        head = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
        if "eval/held_out/ce_top_k" in metrics:
            body = (
                f"held-out ce {metrics['eval/held_out/ce_top_k']:.4f} (top-K)  "
                f"{metrics['eval/held_out/ce_train_routing']:.4f} (training routing)"
            )
        else:
            body = self._training(metrics, remaining_steps=self._num_steps - step)
        print(f"{head}  {body}", flush=True)

    def _training(self, metrics: dict[str, float], *, remaining_steps: int) -> str:
        parts = [
            f"ce {metrics['loss/ce']:.4f}",
            f"balance {metrics['loss/load_balance']:.3f}",
            f"max/mean load {metrics['moe/load_max_over_mean_max']:.2f}",
            f"grad {metrics['optim/grad_norm']:.2f}",
            f"lr {metrics['optim/lr']:.1e}",
        ]
        if "throughput/tokens_per_day" in metrics:
            per_day = metrics["throughput/tokens_per_day"]
            parts.append(f"{per_day / 1e9:.3f} B tokens/day")
            parts.append(f"ETA {_duration(remaining_steps * metrics['time/step_s'])}")
        return "  ".join(parts)

    def close(self) -> None:
        """Do nothing: the console stays."""


class WandbSink:
    """Writes to Weights & Biases, with tokens on the x-axis; a resumed run keeps its id."""

    def __init__(
        self, config: LoggingConfig, *, run_name: str, folder: Path, run_id: str, values: dict[str, Any]
    ) -> None:
        wandb = import_wandb()
        os.environ.setdefault("WANDB_SILENT", "true")
        self.mode = "online" if config.wandb is WandbMode.online or has_wandb_key(config) else "offline"
        options = {
            "project": config.wandb_project,
            "name": run_name,
            "id": run_id,
            "dir": str(folder),
            "config": values,
        }
        try:
            self._run = wandb.init(**options, mode=self.mode, resume="allow" if self.mode == "online" else None)
        except wandb.errors.Error as problem:
            if config.wandb is not WandbMode.auto or self.mode == "offline":
                raise StartError(
                    f"logging.wandb={config.wandb.value}: {problem}. Use logging=offline, or logging=jsonl"
                ) from problem
            log.warning("wandb is not reachable, so the run is written offline: %s", problem)
            self.mode = "offline"
            self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("progress/tokens")
        self._run.define_metric("*", step_metric="progress/tokens")
        self._folder = folder

    @property
    def description(self) -> str:
        """Say where the run is, and how an offline one gets online."""
        if self.mode == "online":
            return f"wandb: {self._run.url}"
        runs = f"{quote(str(self._folder / 'wandb'))}/offline-run-*-{self._run.id}"
        return f"wandb: offline; upload with: wandb sync {runs}"

    def write(self, metrics: dict[str, float]) -> None:
        """Log ``metrics``."""
        self._run.log(metrics)

    def close(self) -> None:
        """Finish the run, uploading what is left when online."""
        self._run.finish()


def _cut_unfinished_line(path: Path) -> None:
    """Remove what a crash left of a line that was never finished; the next one would be glued to it."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        log.warning("%s: removing %d bytes of a line that was cut off", path, len(data) - len(whole))
        with path.open("r+b") as file:
            file.truncate(len(whole))


def import_wandb() -> Any:
    """Return the wandb module.

    Raises: ValueError with both ways out if it is not installed.
    """
    try:
        import wandb  # noqa: PLC0415 - a machine without it still trains
    except ImportError as problem:
        raise ValueError(
            "logging.wandb needs the wandb package: pip install 'wandb>=0.31,<1', or train with logging=jsonl"
        ) from problem
    return wandb


def has_wandb_key(config: LoggingConfig) -> bool:
    """Say whether ``logging.wandb=auto`` finds an API key: in the environment or where ``wandb login`` left it."""
    if config.wandb is not WandbMode.auto or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return False
    wandb = import_wandb()
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.errors.Error as problem:
        log.warning("the wandb key that is configured cannot be used, so the run is written offline: %s", problem)
        return False


def new_wandb_id(config: LoggingConfig) -> str | None:
    """Return an id for a new run, or None with ``logging.wandb=off``."""
    if config.wandb is WandbMode.off:
        return None
    return secrets.token_hex(4)


class Sinks:
    """Several sinks as one, closed together when the ``with`` block ends."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, metrics: dict[str, float]) -> None:
        """Give ``metrics`` to every sink."""
        for sink in self._sinks:
            sink.write(metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every sink; one that cannot be closed hides no error that came before."""
        failure = value
        raises = logging.raiseExceptions
        # On a full disk each line that wandb cannot log would print a traceback, tens of thousands of lines in all.
        logging.raiseExceptions = raises and value is None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # wandb has many kinds
                if failure is None:
                    failure = error
                else:
                    log.warning("%s could not be closed: %s", type(sink).__name__, error)
        logging.raiseExceptions = raises
        if failure is not value:
            assert failure is not None
            raise failure


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
