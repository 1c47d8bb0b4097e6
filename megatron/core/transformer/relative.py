"""T5's relative positions: every head adds a learned number to a score, by how far key and query are apart.

Near distances have a bucket each, far ones share buckets that grow like a logarithm, and from the largest distance on there
is one (Raffel et al., 2019). All layers of an encoder, and all of a decoder, share a table.

    decoder, 8 buckets     distance back   0 1 2 3 4..  ..      ahead: bucket 0, which is never looked at
    encoder, 8 buckets     4 buckets for keys before and at the query, 4 for keys after it
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.settings.model import PositionConfig
from megatron.core.parallel.spec import FusedWeightSegment, ParamSpec, ShardedDim, meta_parameter
from megatron.core.transformer.context.layer_build_context import LayerBuildContext


class RelativeBiasTable(nn.Module):
    """T5's relative position bias: a number for each bucket and head; heads are cut over the tensor ranks."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        model = build.model
        cut = ShardedDim(1, "tp", (FusedWeightSegment(model.num_attention_heads),))
        spec = ParamSpec(
            (model.rope.relative_attention_num_buckets, model.num_attention_heads), build.init_method(), "table", (cut,)
        )
        self.weight = meta_parameter(spec, build.mesh, build.dtype)


class RelativePositionEmbedding(nn.Module):
    """Module that gives the bias table of an encoder or a decoder its name in Megatron checkpoints."""

    def __init__(self, build: LayerBuildContext) -> None:
        super().__init__()
        self.relative_attention_bias = RelativeBiasTable(build)


def relative_score_bias(table: Tensor, length: int, config: PositionConfig, *, causal: bool) -> Tensor:
    """Return the relative position bias of a sequence's scores, [1, n/tp, length, length]. table: [buckets, n/tp]."""
    places = torch.arange(length, device=table.device)
    index = relative_position_buckets(places[None, :] - places[:, None], config, causal=causal)
    return F.embedding(index, table).permute(2, 0, 1)[None]


def relative_position_buckets(offset: Tensor, config: PositionConfig, *, causal: bool) -> Tensor:
    """Return the bucket of each offset (key minus query position). offset, result: int64 of any shape."""
    count, first = config.relative_attention_num_buckets, torch.zeros_like(offset)
    distance = (-offset).clamp(min=0) if causal else offset.abs()
    if not causal:
        count //= 2
        first = (offset > 0) * count
    near = count // 2
    steps = torch.log(distance.clamp(min=1).float() / near) / math.log(config.relative_attention_max_distance / near)
    far = (near + (steps * (count - near)).long()).clamp(max=count - 1)
    return first + torch.where(distance < near, distance, far)
