"""The gather-sum's choice of block; its results are tested with the other ops in ../cute/test_gpu_ops.py."""

import pytest

pytest.importorskip("triton", reason="triton comes with CUDA builds of torch")

from moe_kernels.triton.combine import block_width


@pytest.mark.parametrize(
    ("D", "width"),
    [(256, 256), (768, 256), (1536, 512), (2048, 1024), (4096, 1024), (2880, 1024), (200, 256), (8, 256)],
)
def test_blocks_leave_few_lanes_idle(D, width):
    assert block_width(D) == width
