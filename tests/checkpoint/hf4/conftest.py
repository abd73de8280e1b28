"""Exports for the tests of transformers 4.

Run them with --confcutdir=tests/checkpoint/hf4: fixtures above this folder import packages that are not needed here.
"""

import os
from pathlib import Path

import pytest

VARIABLE = "GRISTMILL_EXPORTS"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"hf4: reads the exports in ${VARIABLE}, made by tests/checkpoint/make_exports.py"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``export`` once for each folder in $GRISTMILL_EXPORTS that has a receipt."""
    if "export" not in metafunc.fixturenames:
        return
    place = os.environ.get(VARIABLE)
    if place is None:
        reason = f"set {VARIABLE} to a folder made by tests/checkpoint/make_exports.py"
        metafunc.parametrize("export", [pytest.param(None, marks=pytest.mark.skip(reason=reason))])
        return
    exports = sorted(path.parent for path in Path(place).glob("*/gristmill_receipt.json"))
    if not exports:
        raise pytest.UsageError(f"{VARIABLE}={place} holds no exports")
    metafunc.parametrize("export", exports, ids=[path.name for path in exports])
