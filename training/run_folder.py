"""The folder of a run: what it is, whether this process may go on with it, and what was written of it.

    <run.root>/<run.name>/
        config.yaml      the resolved configuration
        data.json        the manifests of the prepared data
        tokenizer/       a copy, so that an export needs nothing else
        metrics.jsonl    one object a line (metrics.py)
        checkpoints/     checkpoint/store.py
        profile/         with profile=true (profiling.py)
        lock             held while a process trains

Checkpoints themselves are in checkpoint/.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.loader import PreparedData
from training.config import RunConfig
from training.sinks import StartError

log = logging.getLogger(__name__)

# What a process may change when it goes on with a run: where it lives, how often it reports, where it logs.
FREE_SECTIONS = ("run", "parallel", "logging", "evaluation", "checkpoint", "profile", "profiler")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def data(self) -> Path:
        """The manifests of the prepared data, JSON."""
        return self.path / "data.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder."""
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """All metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def profile(self) -> Path:
        """The folder of what ``profile=true`` writes."""
        return self.path / "profile"

    def remove_unfinished_saves(self) -> None:
        """Remove checkpoints that a killed process left unfinished; only while ``sole_trainer`` holds the run."""
        for path in sorted(self.checkpoints.glob("step_*.partial")):
            log.warning("removing %s, which was cut off while being written", path)
            shutil.rmtree(path)


@contextmanager
def sole_trainer(folder: RunFolder, *, is_first: bool) -> Iterator[None]:
    """Hold the run for this process and those that torchrun started with it.

    Raises: StartError if another process holds it.
    """
    if not is_first:
        yield
        return
    with (folder.path / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise StartError(
                f"another process is training {folder.path}: wait for it, stop it, or give this run another run.name"
            ) from problem
        yield


def config_values(config: RunConfig) -> dict[str, Any]:
    """Return ``config`` as nested plain values, enums by name: what config.yaml and the checkpoints hold."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def open_run(config: RunConfig, data: PreparedData) -> RunFolder:
    """Return the run's folder: made now, or found with the same configuration and the same data.

    Raises: ValueError with every difference if a run of that name has another configuration or other data.
    """
    folder = RunFolder(Path(config.run.root) / config.run.name)
    values = config_values(config)
    manifests = [asdict(source.manifest) for source in data.sources]
    if folder.config.exists():
        _refuse_other_run(folder, values, manifests)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.tokenizer.exists():
        partial = folder.path / "tokenizer.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(data.tokenizer_folder, partial)
        partial.rename(folder.tokenizer)
    _write(folder.data, json.dumps(manifests, indent=2) + "\n")
    # Last: a folder with a config.yaml is a run.
    _write(folder.config, OmegaConf.to_yaml(values))
    return folder


def _refuse_other_run(folder: RunFolder, values: dict[str, Any], manifests: list[dict[str, Any]]) -> None:
    recorded = _recorded_values(folder.config)
    differences = [
        f"  {key}: {before!r} in the run, {now!r} now"
        for key, before, now in differing_values(recorded, values)
        if key.split(".")[0] not in FREE_SECTIONS and key != "data.root"
    ]
    recorded_manifests = json.loads(folder.data.read_text(encoding="utf-8"))
    # Where the files lie and which command wrote them may differ; their bytes may not.
    differences += [
        f"  prepared data, {key}: {before!r} in the run, {now!r} now"
        for key, before, now in differing_values(_files(recorded_manifests), _files(manifests))
    ]
    if differences:
        raise ValueError(
            f"{folder.path} holds a run with another configuration:\n" + "\n".join(differences) + "\n"
            "Give this one a name of its own with run.name=..., or repeat the run's values to go on with it"
        )


def _recorded_values(path: Path) -> dict[str, Any]:
    """Return the values of a run's config.yaml, with today's defaults for keys that are younger than the run."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), OmegaConf.load(path))
    except OmegaConfBaseException as problem:
        raise ValueError(f"{path} is not a configuration of this version: {problem}") from problem
    values = OmegaConf.to_container(merged, enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _files(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return {f"source {number}": manifest["files"] for number, manifest in enumerate(manifests)}


def differing_values(before: Any, now: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value before, value now) wherever two nested values differ; absent ones are None."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [(prefix, before, now)]
    found: list[tuple[str, Any, Any]] = []
    for key in sorted(set(before) | set(now), key=str):
        dotted = f"{prefix}.{key}" if prefix else str(key)
        found += differing_values(before.get(key), now.get(key), dotted)
    return found


def check_vocabulary(config: RunConfig, data: PreparedData) -> None:
    """Raises: ValueError if the model has fewer rows than the tokenizer has tokens."""
    needed = data.manifest.vocab_size
    if config.model.vocab_size < needed:
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {needed} tokens of the tokenizer in "
            f"data.root={config.data.root}: set model.vocab_size={needed} or more"
        )


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
