"""A pytest plugin: Triton kernels run on the CPU, rounded as NVIDIA hardware rounds, where there is no accelerator.

    pytest -p lastbit.pytest_interpreter

or, in pyproject.toml,

    [tool.pytest.ini_options]
    addopts = "-p lastbit.pytest_interpreter"

It takes effect before conftest.py and test modules are imported, which may import kernels and so Triton. Where torch
finds an accelerator, kernels are compiled unless TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import os

import pytest
import torch

from lastbit.errors import InterpreterError
from lastbit.interpret import interpret_triton


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Begin before the first conftest.py is imported."""
    _interpret()


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Begin before test modules are imported, if a conftest.py names this plugin."""
    _interpret()


def _interpret() -> None:
    if os.environ.get("TRITON_INTERPRET", "0" if torch.accelerator.is_available() else "1") != "1":
        return
    try:
        interpret_triton()
    except InterpreterError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def triton_interpreter() -> None:
    """Have Triton kernels interpreted, or fail with what is to be done for it: for a test on tensors of the CPU."""
    interpret_triton()
