"""How a run's parameters lie on its processes: the units that FSDP gathers and sums together, as training/parallel.py
makes them, and each process's share of them."""

from dataclasses import dataclass
from math import ceil, prod

from model.counting import parameter_shapes
from training.config import Precision, RunConfig
from training.parallel import gathers_in_place, num_shards


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are gathered together, and whose gradients are summed together."""

    whole: int  # numbers
    shard: int  # numbers of one process, padding included
    in_place: int  # numbers of those that parallel.gather_in_place gathers where they are used

    @property
    def copied(self) -> int:
        """Numbers of those that come through FSDP's buffers."""
        return self.whole - self.in_place


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parameters of a run on its processes."""

    shards: int  # processes that hold one copy between them
    replicas: int  # copies
    is_sharded: bool  # by FSDP, if only over one process; else these are plain parameters
    embed: Unit
    blocks: tuple[Unit, ...]  # each block alone
    units: tuple[Unit, ...]  # what of them is gathered together
    head: Unit  # the final norm and the head; empty where they belong to ``embed``
    is_tied: bool

    @property
    def total(self) -> Unit:
        """All parameters."""
        return _joined([self.embed, *self.blocks, self.head])


def layout_of(config: RunConfig, *, gpus: int) -> Layout:
    """Return the layout of a run in ``gpus`` processes, whose parallel.shard_degree divides them."""
    shards = num_shards(config.parallel, gpus)
    is_tied = config.model.tie_embeddings
    is_sharded = gpus > 1 or config.train.precision is not Precision.fp32
    in_place = is_sharded and config.parallel.gather_in_place
    shapes_of: dict[str, list[tuple[int, ...]]] = {"head": []}
    for name, shape in parameter_shapes(config.model).items():
        shapes_of.setdefault(_unit_of(name, is_tied=is_tied), []).append(shape)
    unit_of = {
        name: Unit(
            whole=sum(map(prod, shapes)),
            shard=sum(_shard(shape, shards) for shape in shapes),
            in_place=sum(prod(shape) for shape in shapes if in_place and gathers_in_place(shape, shards)),
        )
        for name, shapes in shapes_of.items()
    }
    blocks = [unit_of[f"blocks.{layer}"] for layer in range(config.model.num_layers)]
    size = config.parallel.blocks_per_unit
    return Layout(
        shards=shards,
        replicas=gpus // shards,
        is_sharded=is_sharded,
        embed=unit_of["embed"],
        blocks=tuple(blocks),
        units=tuple(_joined(blocks[start : start + size]) for start in range(0, len(blocks), size)),
        head=unit_of["head"],
        is_tied=is_tied,
    )


def _joined(blocks: list[Unit]) -> Unit:
    return Unit(
        whole=sum(block.whole for block in blocks),
        shard=sum(block.shard for block in blocks),
        in_place=sum(block.in_place for block in blocks),
    )


def _unit_of(name: str, *, is_tied: bool) -> str:
    if name.startswith("blocks."):
        return ".".join(name.split(".")[:2])
    return "embed" if is_tied or name == "embed.weight" else "head"


def _shard(shape: tuple[int, ...], shards: int) -> int:
    """Numbers of one process: cut along the first dimension and padded, experts along their width if they are few."""
    if len(shape) == 3 and shards > shape[0]:
        return prod(shape) // shards
    return ceil(shape[0] / shards) * prod(shape[1:])
