"""Text generation on a GPU: recorded steps against steps that are launched one by one, and against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.config.stages import stages_of
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.engine import Engine
from tests.helpers import tiny
from tests.unit.inference.serving import BASE, KINDS, greedy, prompts

pytestmark = pytest.mark.gpu


def said(device: str, captured_graphs: int | None, **changes: Any) -> list[tuple[int, ...]]:
    """Greedy continuations of random prompts, from values drawn on the CPU."""
    settings = tiny.config(1, **{**BASE, **changes, "fp64": False, "use_cpu_initialization": True})
    run = tiny.run_of(settings, torch.device(device))
    stages = [tiny.gpt(run, spec).materialize(7, draw_on=torch.device("cpu")).eval() for spec in stages_of(run.config)]
    config = InferenceConfig(inference_max_requests=5, inference_dynamic_batching_num_cuda_graphs=captured_graphs)
    engine = Engine(stages, NullTokenizer(tiny.VOCABULARY), config)
    if captured_graphs is None:
        assert engine.runner.networks[0].captured_graphs is not None, "recorded wherever it can be"
    return [reply.ids for reply in engine.run([greedy(text, 20) for text in prompts(7)])]


@pytest.mark.parametrize("kind", ["rope", "window", "sinks and windows", "latent", "caps and gates", "yarn"])
def test_recorded_steps_say_what_launched_ones_and_the_cpu_say(kind: str) -> None:
    assert said("cuda", None, **KINDS[kind]) == said("cuda", 0, **KINDS[kind]) == said("cpu", 0, **KINDS[kind])
