"""A run without its folder: the model, optimiser and batches of a configuration, taking steps as training/ does.

What train_step.py times and loss_parity.py compares.
"""

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.tensor import DTensor

from data.batch import Batch
from data.loader import open_prepared
from launch import preflight
from model.decoder import Decoder
from moe_kernels import KernelUnavailable
from training.build import Kernels, build_model, check_world, choose_kernels
from training.config import RunConfig
from training.deal import deal
from training.environment import EXIT_INTERRUPTED, fix_numerics
from training.guard import StepGuard
from training.optim import build_optimizer, learning_rate, set_learning_rate
from training.step import StepInput, StepResult, train_step
from training.step_graph import StepGraph, peak_bytes
from training.world import World


def compose_run(*overrides: str) -> RunConfig:
    """Return the configuration that ``train.py`` would have with these overrides."""
    return preflight.compose_run(list(overrides)).config


@contextmanager
def leaving_with_a_message() -> Iterator[None]:
    """End the process with one line, not a trace, if the body meets what this machine or configuration cannot do."""
    try:
        yield
    except KeyboardInterrupt as why:
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from why
    except (ValueError, OSError, KernelUnavailable, FloatingPointError, OmegaConfBaseException, HydraException) as why:
        cause = f" ({why.__cause__})" if why.__cause__ is not None else ""  # hydra's says which values there are
        raise SystemExit(f"error: {why}{cause}") from why


def check_run(config: RunConfig, world: World) -> Kernels:
    """Return what computes the steps of ``config`` in ``world``.

    Raises: ValueError or KernelUnavailable, as a run does, if they cannot be taken there.
    """
    check_world(config, world)
    return choose_kernels(config, world)


class RandomRows:
    """Rows of uniformly random tokens, in place of prepared text."""

    def __init__(self, config: RunConfig) -> None:
        self._vocab_size, self._S = config.model.vocab_size, config.data.sequence_length

    def batch(self, first_sample: int, num_sequences: int) -> Batch:
        """Return the same rows for the same samples."""
        generator = torch.Generator().manual_seed(first_sample)
        ids = torch.randint(self._vocab_size, (num_sequences, self._S + 1), generator=generator)
        document_BS = torch.zeros(num_sequences, self._S, dtype=torch.int32)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), document_BS)


class Steps:
    """Takes the steps of ``config`` one after another; every process of ``world`` takes part.

    With ``draws_on_device`` the weights are not those of a run but drawn at once where they live, which timing does not
    notice. ``random_tokens`` stand in for prepared text. ``records`` false takes steps one launch after another
    whatever ``parallel.cuda_graph`` says.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        *,
        draws_on_device: bool = False,
        random_tokens: bool = False,
        records: bool = True,
    ) -> None:
        self.config, self.world = config, world
        fix_numerics(config.train.num_threads, seed=config.train.seed)
        kernels = check_run(config, world)
        rows = RandomRows(config) if random_tokens else open_prepared(config.data).train
        self.backend = kernels.backend
        self.model = build_model(config, kernels, world, initialise=draw_on_device if draws_on_device else None)
        self.optimizer = build_optimizer(self.model, config.optim)
        self._graph = StepGraph(self.model) if config.records_steps and records else None
        self._micro_batches = deal(rows, world, size=config.train.micro_batch_sequences)
        self._guard = StepGuard()
        self._previous_count_LE = None
        self._num_taken = 0

    @property
    def tokens(self) -> int:
        """The tokens of a step, over all processes."""
        return self.config.train.global_batch_sequences * self.config.data.sequence_length

    @property
    def peak_bytes(self) -> int | None:
        """The most device memory allocated since its count was reset; None on a CPU."""
        return peak_bytes(self.world.device, self._graph) if self.world.device.type == "cuda" else None

    def take(self, lap: Callable[[str], None] = lambda part: None) -> StepResult:
        """Take the next step; raises FloatingPointError as a run does."""
        train = self.config.train
        set_learning_rate(self.optimizer, learning_rate(self._num_taken, optim=self.config.optim, train=train))
        num_mine = train.global_batch_sequences // train.micro_batch_sequences // self.world.size
        result = train_step(
            self.model,
            self.optimizer,
            StepInput(
                micro_batches=list(itertools.islice(self._micro_batches, num_mine)),
                previous_count_LE=self._previous_count_LE,
                mask_documents=self.config.data.mask_documents,
            ),
            world=self.world,
            config=train,
            routing=self.config.model.moe.routing.train,
            lap=lap,
            sum_every_micro_batch=self.config.parallel.sum_every_micro_batch,
            run=self._graph,
        )
        self._num_taken += 1
        self._previous_count_LE = result.load.top_k_count_LE
        self._guard.watch(self._num_taken, result)
        return result

    def close(self) -> None:
        """Let go of the data's thread, the model, its compiled code, and the memory."""
        self._micro_batches.close()
        if self._graph is not None:
            self._graph.close()
        self._guard.settle()
        gc.unfreeze()
        del self.model, self.optimizer, self._graph, self._guard, self._previous_count_LE
        torch._dynamo.reset()
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def draw_on_device(model: Decoder) -> None:
    """Set parameters to draws of the right scale where they live: normal matrices, norms of 1, biases of 0."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if name.endswith(".bias"):
            local.zero_()
        elif name.endswith("norm.weight"):
            local.fill_(1.0)
        else:
            local.normal_(std=model.config.init_std)
    for moe in model.moe_layers():
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.zero_()
