"""Which experts the tokens of a pass used, for training that uses the same (routing replay).

Routers note their choices of the tokens that they see; a rank brings together those of its layers, and the leader those of all pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.parallel import collectives
from megatron.core.transformer.router import TopKRouter, routers_of
from megatron.inference.step_input import SequenceInput, SequenceStepOutput

Routes = list[dict[int, np.ndarray]]  # for each row of a pass: layer -> experts of its new tokens, [tokens, k]


class ExpertChoiceRecorder:
    """Records the experts that this rank's routers choose. passes: microbatch -> layer -> experts."""

    def __init__(self, stages: Sequence[GPTModel]) -> None:
        self._routers: dict[int, list[TopKRouter]] = {id(stage): routers_of([stage]) for stage in stages}
        self._tp = stages[0].build.mesh.tp
        self.passes: dict[int, dict[int, Tensor]] = {}

    def start(self, stage: GPTModel) -> None:
        """Record the choices of the next pass through a stage."""
        for router in self._routers[id(stage)]:
            router.observed = []

    def store(self, stage: GPTModel, microbatch: int, length: int) -> None:
        """Store the recorded choices of a microbatch of `length` tokens, gathered over tensor ranks."""
        kept = self.passes.setdefault(microbatch, {})
        for router in self._routers[id(stage)]:
            assert router.observed is not None and len(router.observed) == 1, "a router is asked once in a pass"
            kept[router.layer] = collectives.all_gather(router.observed[0], self._tp)[:length]
            router.observed = None

    def choices_of_rows(self, shares: Sequence[tuple[Sequence[SequenceInput], Sequence[int]]]) -> Routes:
        """Return and forget each row's choices. shares: each microbatch's rows and their indices in the pass."""
        result: Routes = [{} for rows, _ in shares for _ in rows]
        for microbatch, (rows, places) in enumerate(shares):
            layers = {layer: experts.cpu().numpy() for layer, experts in self.passes.get(microbatch, {}).items()}
            start = 0
            for row, place in zip(rows, places, strict=True):
                result[place] = {layer: experts[start : start + len(row.ids)] for layer, experts in layers.items()}
                start += len(row.ids)
        self.passes = {}
        return result


def outputs_with_expert_choices(
    outputs: Sequence[SequenceStepOutput], parts: Iterable[Routes]
) -> list[SequenceStepOutput]:
    """Return a pass's outputs with the expert choices of all layers. parts: of each pipeline stage."""
    every = list(parts)
    result = []
    for number, output in enumerate(outputs):
        layers = {layer: experts for part in every for layer, experts in part[number].items()}
        table = np.concatenate([layers[layer] for layer in sorted(layers)], axis=1)
        result.append(replace(output, routes=tuple(map(tuple, table.tolist()))))
    return result
