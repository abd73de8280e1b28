"""Held-out loss during a run, under the evaluation's routing and under the training's. Judging exports is elsewhere."""

import torch
from torch import Tensor

from data.batch import IGNORED_LABEL, Batch
from data.loader import RowSource
from model.decoder import Decoder
from moe_kernels import RoutingKind
from training.config import RunConfig
from training.environment import StopRequest
from training.step import documents_to_mask
from training.world import World


def held_out_losses(
    model: Decoder, rows: RowSource, config: RunConfig, *, world: World, stop: StopRequest
) -> dict[str, float] | None:
    """Return the ``eval/held_out/…`` metrics, or None if any process was asked to stop meanwhile.

    Reads whole micro-batches of the training's size, because token rounding depends on it, from the start of the
    held-out rows; the same rows serve both routings, and processes share them.

    Raises: ValueError if the held-out split holds less than one micro-batch.
    """
    size = config.train.micro_batch_sequences
    num_batches = num_evaluation_batches(rows.num_rows, config)
    kinds = {"ce_top_k": config.model.moe.routing.evaluation, "ce_train_routing": config.model.moe.routing.train}
    metrics: dict[str, float] = {}
    for name, routing in kinds.items():
        sums = torch.zeros(2, dtype=torch.float64, device=world.device)  # nats and valid labels
        for index in range(world.rank, num_batches + -num_batches % world.size, world.size):
            if world.any(bool(stop)):
                return None
            # Every process takes part in every forward, because it holds shards that the others need. Past the last
            # batch it repeats the first, and that does not count.
            is_real = index < num_batches
            batch = rows.batch(index * size if is_real else 0, size).to(world.device)
            loss = _batch_loss(model, batch, routing=routing, mask_documents=config.data.mask_documents)
            sums += loss * is_real
        ce_sum, num_valid = world.sum(sums).tolist()
        metrics[f"eval/held_out/{name}"] = ce_sum / num_valid
    metrics["eval/held_out/routing_gap"] = metrics["eval/held_out/ce_train_routing"] - metrics["eval/held_out/ce_top_k"]
    return metrics


def num_evaluation_batches(num_rows: int, config: RunConfig) -> int:
    """Return how many micro-batches of held-out rows an evaluation reads.

    Raises: ValueError if there is not one.
    """
    wanted = num_rows if config.evaluation.max_sequences is None else min(num_rows, config.evaluation.max_sequences)
    num_batches = wanted // config.train.micro_batch_sequences
    if num_batches == 0:
        raise ValueError(
            f"the held-out split has {num_rows} rows of data.sequence_length={config.data.sequence_length} and "
            f"evaluation.max_sequences={config.evaluation.max_sequences}, less than one micro-batch of "
            f"train.micro_batch_sequences={config.train.micro_batch_sequences}"
        )
    return num_batches


@torch.no_grad()
def _batch_loss(model: Decoder, batch: Batch, *, routing: RoutingKind, mask_documents: bool) -> Tensor:
    """Return the summed cross-entropy of a batch in nats, and its number of valid labels."""
    documents = documents_to_mask(batch, mask_documents=mask_documents)
    # A fixed seed: stochastic rounding must not make two evaluations of one model differ.
    output = model(batch.input_ids_BS, batch.labels_BS, routing=routing, seed=0, documents=documents)
    assert output.ce_sum is not None
    return torch.stack([output.ce_sum.double(), (batch.labels_BS != IGNORED_LABEL).sum().double()])
