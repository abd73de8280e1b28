"""MoE layers by name: the shapes of SonicMoE's paper and of public models, with what a layer of each must compute."""

from typing import NamedTuple


class MoEShape(NamedTuple):
    """One routed layer as it is benchmarked."""

    T: int  # tokens
    D: int  # model width
    N: int  # expert width
    E: int  # experts
    K: int  # experts per token


# The three with T = 16384 below qwen3-next have few tokens for each expert: what token rounding is for.
SHAPES = {
    "1.4b-n256": MoEShape(40960, 768, 256, 128, 8),
    "1.4b-n512": MoEShape(40960, 768, 512, 64, 4),
    "1.4b-n1024": MoEShape(40960, 768, 1024, 32, 2),
    "7b-n256": MoEShape(24576, 1536, 256, 128, 8),
    "7b-n512": MoEShape(24576, 1536, 512, 64, 4),
    "7b-n1024": MoEShape(24576, 1536, 1024, 32, 2),
    "30b-n256": MoEShape(32768, 4096, 256, 256, 16),
    "30b-n512": MoEShape(32768, 4096, 512, 128, 8),
    "30b-n1024": MoEShape(32768, 4096, 1024, 64, 4),
    "120b-n512": MoEShape(32768, 4096, 512, 256, 16),
    "120b-n1024": MoEShape(32768, 4096, 1024, 128, 8),
    "120b-n2048": MoEShape(32768, 4096, 2048, 64, 4),
    "olmoe": MoEShape(32768, 2048, 1024, 64, 8),
    "qwen3-30b": MoEShape(32768, 2048, 768, 128, 8),
    "qwen3-next": MoEShape(32768, 2048, 512, 512, 10),
    "sparse-d1536": MoEShape(16384, 1536, 1024, 128, 2),
    "sparse-d4096": MoEShape(16384, 4096, 1024, 256, 4),
    "qwen3-next-16k": MoEShape(16384, 2048, 512, 512, 10),
    "gpt-oss-20b": MoEShape(32768, 2880, 2880, 32, 4),
    "gpt-oss-120b": MoEShape(32768, 2880, 2880, 128, 4),
    "qwen3-235b": MoEShape(32768, 4096, 1536, 128, 8),
    "glm-4.5-air": MoEShape(32768, 4096, 1408, 128, 8),
    "dsv3": MoEShape(32768, 7168, 2048, 256, 8),
    "kimi-k2": MoEShape(32768, 7168, 2048, 384, 8),
}


class Work(NamedTuple):
    """The least that one op must do: operations, and bytes of device memory with every value moved once."""

    flops: int
    bytes: int


def work_of(shape: MoEShape, rows: int) -> dict[str, Work]:
    """Return the work of each op of the layer for ``rows`` expert rows of 16-bit values. Gathered rows count once."""
    T, D, N, E, _ = shape
    product = 2 * rows * D * N
    tokens, weights, h, a, y = 2 * T * D, 2 * E * D * N, 4 * rows * N, 2 * rows * N, 2 * rows * D
    return {
        "up": Work(2 * product, tokens + 2 * weights + h + a),
        "down": Work(product, a + weights + y),
        "combine": Work(2 * rows * D, y + tokens),
        "down_backward": Work(product, tokens + weights + 2 * h + a),
        "dw_down": Work(product, tokens + a + weights),
        "dw_gate_up": Work(2 * product, tokens + h + 2 * weights),
        "dx": Work(2 * product, h + 2 * weights + y),
        "sum": Work(rows * D, y + tokens),
    }
