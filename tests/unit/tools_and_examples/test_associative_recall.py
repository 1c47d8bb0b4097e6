"""examples/hybrid/associative_recall.py: its texts, and a run of a few steps from one end to the other."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hybrid" / "associative_recall.py"


def test_every_value_that_counts_stands_behind_its_key_in_the_first_half() -> None:
    batch = next(runpy.run_path(str(EXAMPLE))["microbatches"](5, 3, 0))
    assert batch.tokens.shape == (3, 20) and batch.loss_mask.sum() == 3 * 5
    for tokens, labels, mask in zip(
        batch.tokens.tolist(), batch.labels.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        pairs = dict(zip(tokens[:10:2], tokens[1:10:2], strict=True))
        recalled = {key: value for key, value, counts in zip(tokens, labels, mask, strict=True) if counts}
        assert recalled == pairs


def test_it_trains_both_networks_and_draws_what_they_recall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path / "recall"), "--steps", "2", "--pairs", "2"])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    curves = json.loads((tmp_path / "recall" / "accuracy.json").read_text())
    assert {name: [step for step, _ in curve] for name, curve in curves.items()} == {
        "hybrid": [2],
        "Mamba-2 alone": [2],
    }
    assert "<svg" in (tmp_path / "recall" / "accuracy.svg").read_text()
    assert "hybrid (MM*M, 111,580 parameters)" in capsys.readouterr().out
