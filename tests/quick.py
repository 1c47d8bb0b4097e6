"""What `bash tests/run.sh --quick` runs: a few minutes for work in between, where the whole suite takes twenty.

The tests that only read the repository, one file of each package of unit tests, and of the parity table so many rows that every
feature stands in one: every switch and size of a layout, every network, every format. Tests marked slow stay out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from tests.parity import half_rows
from tests.parity.table import LAYOUT_WORDS, ROWS, read_layout

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/unit"
FILES: Sequence[str] = (
    "tests/test_architecture.py",
    "tests/test_benchmarks.py",
    "tests/test_docs.py",
    "tests/test_quick.py",
    "tests/test_structure.py",
    "tests/test_words.py",
    "tests/oracle/test_first_step.py",
    "tests/parity/test_layouts.py",
    f"{UNIT}/adapters/test_plan.py",
    f"{UNIT}/cli/test_check_config.py",
    f"{UNIT}/config/test_flags.py",
    f"{UNIT}/context_parallel/test_sequence.py",
    f"{UNIT}/datasets/test_gpt.py",
    f"{UNIT}/datasets/ingest/test_records.py",
    f"{UNIT}/dist_checkpointing/test_store.py",
    f"{UNIT}/distributed/test_ddp.py",
    f"{UNIT}/evaluation/test_likelihood.py",
    f"{UNIT}/families/test_hf.py",
    f"{UNIT}/inference/test_engine.py",
    f"{UNIT}/kernels/test_ops.py",
    f"{UNIT}/megatron_lm/test_megatron_settings.py",
    f"{UNIT}/models/test_gpt.py",
    f"{UNIT}/optimizer/test_clip.py",
    f"{UNIT}/parallel/test_collectives.py",
    f"{UNIT}/pipeline_parallel/test_executor.py",
    f"{UNIT}/plan/test_report.py",
    f"{UNIT}/preference/test_rows.py",
    f"{UNIT}/rl/test_losses.py",
    f"{UNIT}/tasks/test_glue.py",
    f"{UNIT}/tensor_parallel/test_layers.py",
    f"{UNIT}/tokenizers/test_bpe.py",
    f"{UNIT}/tools_and_examples/test_launchers.py",
    f"{UNIT}/training/test_loop.py",
    f"{UNIT}/transformer/test_layer.py",
    f"{UNIT}/verify/test_parity.py",
)

Row = tuple[str, ...]  # layout and network; of a row in half precision then its format's flags


def layout_features(row: Row) -> frozenset[str]:
    """The words of a row's layout without their numbers."""
    return frozenset(
        "layout" if word.startswith("layout=") else word if word in LAYOUT_WORDS else word.rstrip("0123456789")
        for word in row[0].split()
    )


def features(row: Row) -> frozenset[str]:
    """What a row shows: the words of its layout without their numbers, its network, its format."""
    _, model, *formats = row
    return layout_features(row) | {f"network {model}", *formats}


def covering(rows: Sequence[Row], features_of: Callable[[Row], frozenset[str]] = features) -> list[Row]:
    """Few rows with every feature of all of them: the one with the most new features for its number of ranks first."""
    missing: set[str] = set().union(*map(features_of, rows))
    chosen: list[Row] = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(features_of(row) & missing) / read_layout(row[0])[0]))
        missing -= features_of(chosen[-1])
    return chosen


ALL_ROWS: Sequence[Row] = (*ROWS, *((layout, model, *flags) for layout, model, flags in half_rows.ROWS))


def is_quick(item: pytest.Item, rows: Collection[Row]) -> bool:
    """Whether a test runs: it is not slow, and if it trains a row of the table, it is one of these, in fp64 or in half precision."""
    if item.get_closest_marker("slow") or item.get_closest_marker("nightly"):
        return False
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if not {"layout", "model", "precision"} <= parameters.keys():
        return True
    precision = parameters["precision"]
    row = (parameters["layout"], parameters["model"], *(precision if isinstance(precision, dict) else ()))
    return row in rows and precision != "fp32"
