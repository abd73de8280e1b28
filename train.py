"""Train a fine-grained Mixture-of-Experts model: ``python train.py [group=choice] [key=value] ...``.

Without arguments: the tiny model on the bundled text, on whatever this machine has. See README.md.
"""

import logging
import os
import sys

# Before torch is imported: OpenMP threads that wait asleep. Waiting awake, two of them on two cores that anything else
# uses too made a step of the tiny model 20 times slower (AMD EPYC, 2 cores, torch 2.13).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hydra
from omegaconf import DictConfig, OmegaConf

from moe_kernels import KernelUnavailable
from training.config import RunConfig, register_schemas
from training.trainer import Trainer

register_schemas()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(values: DictConfig) -> None:
    """Build the run that Hydra composed and train it; leaves with a message, not a trace, if it cannot start."""
    # From here on a failure is ours: Hydra would cut its trace to the last line.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s", stream=sys.stdout)
    try:
        config = OmegaConf.to_object(values)
        assert isinstance(config, RunConfig)
        trainer = Trainer(config)
    except (ValueError, KernelUnavailable) as problem:
        sys.exit(f"error: {problem}")
    sys.exit(trainer.fit())


if __name__ == "__main__":
    main()
