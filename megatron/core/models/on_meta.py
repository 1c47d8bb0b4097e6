"""Networks on the meta device: every parameter has its name and shape, but no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.settings.model import ModelConfig
from megatron.core.kernels.choice.table import KernelRequirements, select_kernels
from megatron.core.models.bert import BERTModel
from megatron.core.models.decoders import build_decoder
from megatron.core.models.stage_model import StageModel
from megatron.core.models.t5 import T5Model
from megatron.core.models.vision import ImageClassifierModel
from megatron.core.parallel.mesh import Axis, Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import param_spec_of
from megatron.core.transformer.context.layer_build_context import LayerBuildContext

NETWORKS: dict[str, Callable[[StageSpec, LayerBuildContext], StageModel]] = {
    "gpt": build_decoder,
    "bert": BERTModel,
    "t5": T5Model,
    "vit": ImageClassifierModel,
}


def build_stage_on_meta(model: ModelConfig, mesh: Mesh, stage: StageSpec) -> StageModel:
    """Build one pipeline stage on the meta device, as the rank with the coordinates of `mesh` would."""
    # nothing runs, so optional packages are not needed
    kernels = select_kernels(KernelRequirements(device="cpu", dtype=torch.float32), {"moe_flex_dispatcher": ""})
    build = LayerBuildContext(
        model=model,
        mesh=replace(mesh, device=torch.device("meta")),
        kernels=kernels,
        streams=RandomStreams(mesh.device, {}),
    )
    return NETWORKS[model.architecture.name](stage, build)


def rank_parameter_sizes(
    model: ModelConfig, stage: StageSpec, *, tp: int, ep: int, etp: int
) -> list[tuple[str, tuple[int, ...], int]]:
    """Return (global name, global shape, local elements) of a stage's parameters on the first rank of a layout."""
    mesh = replace(Mesh.single_process(), tp=Axis("tp", tp), ep=Axis("ep", ep), etp=Axis("etp", etp))
    return [
        (param_spec_of(param).name, param_spec_of(param).shape, param.numel())
        for param in build_stage_on_meta(model, mesh, stage).parameters()
    ]
