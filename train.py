"""Train a fine-grained Mixture-of-Experts model: ``python train.py [group=choice] [key=value] ...``.

Without arguments: the tiny model on the bundled text, on whatever this machine has. Under torchrun: one process a GPU.
See README.md.
"""

import logging
import os
import sys

# Before torch is imported: OpenMP threads that wait awake for microseconds only. Waiting awake for longer, the default,
# made a step of the tiny model 20 times as long on two cores that were busy with something else too; not waiting awake
# at all, 1.5 times as long on free cores (AMD EPYC, 2 cores, torch 2.13).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from moe_kernels import KernelUnavailable
from training.config import RunConfig, check_choices, register_schemas
from training.environment import EXIT_INTERRUPTED
from training.run_folder import folder_of
from training.sinks import StartError
from training.trainer import Trainer
from training.world import World, open_world

register_schemas()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(values: DictConfig) -> None:
    """Train the run that Hydra composed; leaves with a message, not a trace, if it cannot start."""
    # From here on a failure is ours: Hydra would cut its trace to the last line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        sys.exit("error: --multirun would train one run after another in this process; start one command a run")
    try:
        exit_code = run(values)
    except KeyboardInterrupt:  # before training has begun, or the second of two
        print("interrupted: nothing was saved that was not before", file=sys.stderr)
        exit_code = EXIT_INTERRUPTED
    sys.exit(exit_code)


@record
def run(values: DictConfig) -> int:
    """End with the exit code of the run, or return that of one that cannot start; torchrun reports what it raises."""
    try:
        config = OmegaConf.to_object(values)
        assert isinstance(config, RunConfig)
    except (ValueError, OmegaConfBaseException) as problem:
        return _refuse(problem)
    except AttributeError as problem:  # what OmegaConf raises for a key that +key=value added
        return _refuse(f"{problem}; a key cannot be added with +, it needs a field in a dataclass (CONTRIBUTING.md)")
    world = None
    try:
        world = open_world(config.run.device)
        level = logging.INFO if world.is_first else logging.ERROR
        logging.basicConfig(level=level, format="%(levelname).1s %(name)s: %(message)s", stream=sys.stdout)
        trainer = Trainer(config, world)
    except (ValueError, KernelUnavailable) as problem:
        return _refuse(problem, world)
    except OSError as problem:
        return _refuse(f"the run in {folder_of(config).path} (run.root, run.name) cannot start: {problem}", world)
    try:
        exit_code = trainer.fit()
    except StartError as problem:
        return _refuse(problem, world)
    except FloatingPointError as problem:
        return _refuse(f"{problem}. {trainer.way_around()}", world)
    except OSError as problem:  # a disk without room, above all
        return _refuse(f"the run in {trainer.folder.path} (run.root, run.name) stops: {problem}", world)
    world.leave(exit_code)


def _refuse(problem: object, world: World | None = None) -> int:
    print(f"error: {problem}", file=sys.stderr)
    if world is not None:
        world.leave(1, alone=True)
    return 1


if __name__ == "__main__":
    try:
        check_choices(sys.argv[1:])
    except ValueError as problem:
        sys.exit(_refuse(problem))
    main()
