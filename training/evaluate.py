"""Held-out loss during a run, under the evaluation's routing and under the training's. Judging exports is elsewhere."""

import torch

from data.loader import RowSource
from model.decoder import Decoder
from moe_kernels import RoutingKind
from training.config import RunConfig
from training.environment import StopRequest


def held_out_losses(
    model: Decoder, rows: RowSource, config: RunConfig, *, stop: StopRequest
) -> dict[str, float] | None:
    """Return the ``eval/held_out/…`` metrics, or None if ``stop`` was asked for meanwhile.

    Reads whole micro-batches of the training's size, because token rounding depends on it, from the start of the
    held-out rows; the same rows serve both routings.

    Raises: ValueError if the held-out split holds less than one micro-batch.
    """
    size = config.train.micro_batch_sequences
    num_batches = num_evaluation_batches(rows.num_rows, config)
    kinds = {"ce_top_k": config.model.moe.routing.evaluation, "ce_train_routing": config.model.moe.routing.train}
    metrics: dict[str, float] = {}
    for name, routing in kinds.items():
        ce_sum = 0.0
        num_valid = 0
        for index in range(num_batches):
            if stop:
                return None
            batch_sum, batch_valid = _batch_loss(model, rows, first=index * size, size=size, routing=routing)
            ce_sum += batch_sum
            num_valid += batch_valid
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
def _batch_loss(model: Decoder, rows: RowSource, *, first: int, size: int, routing: RoutingKind) -> tuple[float, int]:
    batch = rows.batch(first, size).to(model.embed.weight.device)
    # A fixed seed: stochastic rounding must not make two evaluations of one model differ.
    output = model(batch.input_ids_BS, batch.labels_BS, routing=routing, seed=0)
    assert output.ce_sum is not None
    return float(output.ce_sum), int((batch.labels_BS != -100).sum())
