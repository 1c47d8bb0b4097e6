from __future__ import annotations

import argparse

import pytest

from megatron.core.config.flags import ConfigError
from megatron.tasks.run import task_config_of


@pytest.mark.parametrize("given", [{"context_parallel_size": 2}, {"hybrid_context_parallel": True}])
def test_a_task_refuses_sequences_that_are_cut(given: dict[str, object]) -> None:
    settings = {"context_parallel_size": 1, "hybrid_context_parallel": False, "task": "MNLI", **given}
    with pytest.raises(ConfigError, match="leave out --context-parallel-size"):
        task_config_of(argparse.Namespace(**settings))
