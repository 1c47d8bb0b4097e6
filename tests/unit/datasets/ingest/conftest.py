"""The tools as modules, for tests that run them many times."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[4] / "tools"


def load(name):
    """A tool as a module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    """The preprocessing tool."""
    yield load("preprocess_data")
    del sys.modules["preprocess_data"]


@pytest.fixture(scope="module")
def merger():
    """The merging tool."""
    yield load("merge_datasets")
    del sys.modules["merge_datasets"]
