"""Which matrices of a network in transformers are which parts of ours, for adapters in PEFT's files.

model.layers.0.self_attn.q_proj              rows of linear_qkv: its part q; with gated attention its parts q and gate
model.layers.0.mlp.experts.gate_up_proj      linear_fc1 of all experts, one parameter in transformers 5
model.layers.0.mlp.experts.3.up_proj         part up of linear_fc1 of one expert, a module of transformers 4
model.layers.0.mlp.gate, lm_head             matrices that no run here adapts, whose adapters can be merged into them
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.adapters.files import MERGED_ONLY
from megatron.core.config.mixers.mixer import LinearShape
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.linear_layers import layer_module_path, linear_shapes_of_layer
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.model import ModelConfig
from megatron.core.families.parameter_mapping import Family, ParameterMapping
from megatron.core.families.registry import fitting_family
from megatron.core.models.describe import global_parameter_shapes

# Where modules of transformers' class are called otherwise than in published files: (pattern, replacement) by family.
_NAMES_IN_CLASSES = {
    "mixtral": (r"\.block_sparse_moe\.gate(?=$|\.)", ".mlp.gate"),
    "nemotron_h": (r"^backbone\.", "model."),
}


@dataclass(frozen=True, slots=True)
class ExpertParameter:
    """A matrix of all experts, one parameter in transformers. linear: our name of it. module: theirs that holds it.

    transposed: stored as [e, in, out], and not as [e, out, in].
    """

    linear: str
    module: str
    transposed: bool
    row: ParameterMapping


class PeftMatrixMapping:
    """How a network's matrices in transformers correspond to ours.

    shapes: of our linear layers that may have adapters. whole: shapes of all our parameters. linear_of: row of each of their linear
    modules. experts: by the name of the parameter. single_experts: (row, index in it) of modules of one expert.
    """

    def __init__(self, model: ModelConfig, family: Family | None = None) -> None:
        """family: by whose names; None: that which the network is exported as."""
        model = replace(model, adapter=AdapterConfig())
        self.family = family or fitting_family(model)
        rows = [
            replace(row, theirs=tuple(map(self.class_name, row.theirs))) for row in self.family.network_mappings(model)
        ]
        self.shapes = {
            f"{layer_module_path(model, plan)}.{path}": shape
            for plan in network_layer_plans(model)
            for path, shape in linear_shapes_of_layer(model, plan).items()
        }
        self.whole = global_parameter_shapes(model)
        self.row_of = {row.ours: row for row in rows}
        self.row_of_name = {name: row for row in rows for name in row.theirs}
        self.linear_of: dict[str, ParameterMapping] = {}
        self.experts: dict[str, ExpertParameter] = {}
        self.single_experts: dict[str, tuple[ParameterMapping, int]] = {}
        for row in rows:
            linear = row.ours.removesuffix(".weight")
            if linear in self.shapes and len(self.whole[row.ours]) == 3:
                self._add_experts(row, linear)
            elif linear in self.shapes or linear.endswith(MERGED_ONLY):
                self.linear_of |= {name.removesuffix(".weight"): row for name in row.theirs}

    def _add_experts(self, row: ParameterMapping, linear: str) -> None:
        if not row.op.each:
            module, _, _ = row.theirs[0].rpartition(".")
            self.experts[row.theirs[0]] = ExpertParameter(linear, module, True, row)
            return
        module = row.theirs[0].partition(".experts.")[0].replace(".block_sparse_moe", ".mlp") + ".experts"
        up = "gate_up_proj" if len(self.shapes[linear].parts) > 1 else "up_proj"
        name = f"{module}.{up if linear.endswith('fc1') else 'down_proj'}"
        self.experts[name] = ExpertParameter(linear, module, False, row)
        self.single_experts |= {one.removesuffix(".weight"): (row, place) for place, one in enumerate(row.theirs)}

    def class_name(self, name: str) -> str:
        """Return the name that transformers' class gives a parameter or module of a published file."""
        pattern, replacement = _NAMES_IN_CLASSES.get(self.family.name, ("(?!)", ""))
        return re.sub(pattern, replacement, name)

    def expert_parameters_of(self, module: str) -> list[str]:
        """Return the names of the parameters of a module of experts, in the order in which PEFT wraps them."""
        return [name for name, one in self.experts.items() if one.module == module]

    def shape_of(self, row: ParameterMapping) -> LinearShape:
        """Return inputs and parts of our matrix that a row is about."""
        outputs, inputs = self.whole[row.ours][-2:]
        return self.shapes.get(row.ours.removesuffix(".weight")) or LinearShape(inputs, (("", outputs),))

    def their_shape(self, row: ParameterMapping, place: int) -> tuple[int, int]:
        """Return (outputs, inputs) of their matrix number `place` of a row."""
        rows, columns = row.op.theirs(torch.empty(self.whole[row.ours], device="meta"))[place].shape
        return (columns, rows) if self.is_transposed(row) else (rows, columns)

    def is_transposed(self, row: ParameterMapping) -> bool:
        """Whether transformers' matrix is the transpose of ours (GPT-2)."""
        return (
            tuple(row.op.theirs(torch.empty(2, 3, device="meta"))[0].shape) == (3, 2) if len(row.theirs) == 1 else False
        )

    def lora_b_to_ours(self, row: ParameterMapping, place: int, second: Tensor) -> Tensor:
        """Return B of their matrix number `place`, [out, r], as B of our matrix: zeros in the rows of the others."""
        if self.is_transposed(row):
            return row.op.ours([second.t()])
        blank = torch.empty(self.whole[row.ours], device="meta")
        sizes = [part.shape[0] for part in row.op.theirs(blank)]
        parts = [
            second if index == place else second.new_zeros(size, second.shape[1]) for index, size in enumerate(sizes)
        ]
        return row.op.ours(parts)

    def lora_b_to_theirs(self, row: ParameterMapping, second: Tensor) -> list[Tensor]:
        """Return B of our matrix, [all rows, r], as B of each of theirs."""
        parts = row.op.theirs(second)
        return [part.t() for part in parts] if self.is_transposed(row) else list(parts)

    def parts_of(self, row: ParameterMapping, place: int) -> list[tuple[str, tuple[int, int]]]:
        """Return the parts of our matrix, each with (first row, number of rows), that their matrix number `place` makes up.

        A matrix that makes up all of ours is the part ""; [] if it makes up a piece of a part.
        """
        outputs, _ = self.their_shape(row, place)
        mine = self.lora_b_to_ours(row, place, torch.ones(outputs, 1))[:, 0].bool()
        shape = self.shape_of(row)
        if bool(mine.all()):
            return [("", (0, shape.outputs))]
        spans = [(name, shape.row_offset_and_count_of_part(name)) for name, _ in shape.parts]
        counts = [int(mine[first : first + size].sum()) for _, (first, size) in spans]
        if any(count not in (0, size) for count, (_, (_, size)) in zip(counts, spans, strict=True)):
            return []
        return [span for span, count in zip(spans, counts, strict=True) if count]
