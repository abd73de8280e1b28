"""Where there is no GPU, triton's interpreter runs the kernels on the CPU (tests/conftest.py asks for it)."""

import pytest
import torch


@pytest.fixture
def device(triton_device: torch.device) -> torch.device:
    """The device that runs the kernels."""
    return triton_device
