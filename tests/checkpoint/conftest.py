"""Fixtures of the checkpoint tests; nothing here is imported where only transformers is installed (hf4/)."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """make_exports.py: small configurations, and runs of them with random weights."""
    spec = importlib.util.spec_from_file_location("make_exports", Path(__file__).parent / "make_exports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
