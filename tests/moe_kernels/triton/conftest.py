"""Where there is no GPU, triton's interpreter runs the kernels on the CPU (tests/conftest.py asks for it)."""

import numpy
import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The device that runs the kernels."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    major, minor, *_ = numpy.__version__.split(".")
    if (int(major), int(minor)) >= (2, 4):
        pytest.skip("triton 3.6's interpreter reads loop bounds in a way that numpy 2.4 refuses")
    return torch.device("cpu")
