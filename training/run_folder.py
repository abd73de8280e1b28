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
from yaml import YAMLError  # type: ignore[import-untyped]

from checkpoint.store import CONFIG, latest_checkpoint
from data.loader import PreparedData
from training.config import RunConfig
from training.sinks import StartError

log = logging.getLogger(__name__)

# What a process may change when it goes on with a run: where it lives, how often it reports, where it logs.
FREE_SECTIONS = ("run", "parallel", "logging", "evaluation", "checkpoint", "profile", "profiler")

_ANEW = "and else start another run from its weights, with train.init_from=... and a run.name of its own"


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


def folder_of(config: RunConfig) -> RunFolder:
    """Return the paths of the run that ``config`` names, whether it is there or not."""
    return RunFolder(Path(config.run.root) / config.run.name)


def find_run(config: RunConfig, data: PreparedData) -> RunFolder:
    """Return the run's folder, which is not there yet or holds this configuration and this data; nothing is written.

    Raises: ValueError with every difference if a run of that name has another configuration or other data, with the
    file that cannot tell, or with what is in the folder's place.
    """
    folder = folder_of(config)
    for path in (folder.path, *folder.path.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"run.root={config.run.root} and run.name={config.run.name}: {path} is not a folder")
    if folder.config.exists():
        _refuse_other_run(folder, config_values(config), _manifests(data))
    elif folder.metrics.exists() or any(folder.checkpoints.glob("step_*")):
        raise ValueError(f"{folder.path} holds a run but no {folder.config.name}: {_how_to_mend(folder)}")
    return folder


def open_run(config: RunConfig, data: PreparedData) -> RunFolder:
    """Return the run's folder: made now, or found with the same configuration and the same data.

    Raises: ValueError as ``find_run`` does, StartError if another process trains it, OSError if it cannot be written.
    """
    folder = find_run(config, data)
    folder.path.mkdir(parents=True, exist_ok=True)
    with sole_trainer(folder, is_first=True):
        # Before anything is written: on a full disk it is they that fill it.
        folder.remove_unfinished_saves()
        if not folder.tokenizer.exists():
            partial = folder.path / "tokenizer.partial"
            shutil.rmtree(partial, ignore_errors=True)
            try:
                shutil.copytree(data.tokenizer_folder, partial)
            except shutil.Error as problem:  # a list of (source, copy, why)
                raise OSError(f"the tokenizer cannot be copied into the run: {problem.args[0][0][2]}") from problem
            partial.rename(folder.tokenizer)
        _write(folder.data, json.dumps(_manifests(data), indent=2) + "\n")
        # Last: a folder with a config.yaml is a run.
        _write(folder.config, OmegaConf.to_yaml(config_values(config)))
    return folder


def _manifests(data: PreparedData) -> list[dict[str, Any]]:
    return [asdict(source.manifest) for source in data.sources]


def _how_to_mend(folder: RunFolder) -> str:
    """Say what to do about a config.yaml that is missing or damaged; a checkpoint's configuration is the same one."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    another = "give this run another name with run.name=..."
    if checkpoint is None:
        return another
    return f"put it back with `cp {checkpoint / CONFIG} {folder.config}`, or {another}"


def _refuse_other_run(folder: RunFolder, values: dict[str, Any], manifests: list[dict[str, Any]]) -> None:
    recorded = _recorded_values(folder)
    differences = [
        f"  {key}: {before!r} in the run, {now!r} now"
        for key, before, now in differing_values(recorded, values)
        if key.split(".")[0] not in FREE_SECTIONS and key != "data.root"
    ]
    # Where the files lie and which command wrote them may differ; their bytes may not.
    differences += [
        f"  prepared data, {key}: {before!r} in the run, {now!r} now"
        for key, before, now in differing_values(_recorded_files(folder.data), _files(manifests))
    ]
    if differences:
        raise ValueError(
            f"{folder.path} holds a run with another configuration:\n" + "\n".join(differences) + "\n"
            "Give this one a name of its own with run.name=..., or repeat the run's values to go on with it"
        )


def _recorded_values(folder: RunFolder) -> dict[str, Any]:
    """Return the values of a run's config.yaml, with today's defaults for keys that are younger than the run."""
    try:
        loaded = OmegaConf.create(folder.config.read_text(encoding="utf-8"))
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), loaded)
    except (YAMLError, UnicodeDecodeError) as problem:
        raise ValueError(f"{folder.config} is damaged, {_how_to_mend(folder)}: {problem}") from problem
    except OmegaConfBaseException as problem:
        raise ValueError(f"{folder.config} is not a configuration of this version: {problem}") from problem
    values = OmegaConf.to_container(merged, enum_to_str=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _recorded_files(path: Path) -> dict[str, Any]:
    try:
        return _files(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as problem:
        raise ValueError(f"{path} is missing, so nothing says what the run was trained on: put it back, {_ANEW}") from (
            problem
        )
    except (ValueError, LookupError, TypeError) as problem:
        raise ValueError(
            f"{path} is damaged, it must hold the manifests of the run's data ({problem}): put it back, or remove it, "
            f"{_ANEW}"
        ) from problem


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
    # A run that goes on as it is needs no room for this.
    if path.exists() and path.read_bytes() == text.encode():
        return
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
