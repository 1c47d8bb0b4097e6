from __future__ import annotations

import argparse

import pytest

from megatron.core.config.flags import ConfigError
from tasks import main


@pytest.mark.parametrize("given", [{"context_parallel_size": 2}, {"hybrid_context_parallel": True}])
def test_a_task_refuses_sequences_that_are_cut(monkeypatch: pytest.MonkeyPatch, given: dict[str, object]) -> None:
    settings = {"context_parallel_size": 1, "hybrid_context_parallel": False, "task": "MNLI", **given}
    monkeypatch.setattr(main, "ARGS", argparse.Namespace(**settings), raising=False)
    monkeypatch.setattr(main, "from_namespace", lambda kind, namespace: namespace)
    with pytest.raises(ConfigError, match="leave out --context-parallel-size"):
        main.main.__wrapped__()
