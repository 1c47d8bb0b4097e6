"""What an update rule says of itself is what it holds; nothing more has to be written for a rule that is added."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import chain
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.flags.when import When
from megatron.core.config.settings.optim import OptimizerConfig
from megatron.core.distributed.ddp import DataParallel
from megatron.core.models.flops import owned_bytes_per_parameter
from megatron.core.optimizer.elementwise import ElementwiseRule
from megatron.core.optimizer.optimizer import UPDATE_RULES, Optimizer, update_rule_named
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import ParamSpec, normal_initializer, set_global_param_names
from megatron.verify import state_inventory
from tests.helpers import tiny

CHOICES = {*get_args(get_type_hints(OptimizerConfig)["optimizer"])} - {"dist_muon"}  # which is muon
NARROW = {"use_precision_aware_optimizer": True, "bf16": True}


def test_every_choice_of_an_optimizer_is_a_row_and_its_flags_are_used_with_it_alone() -> None:
    assert UPDATE_RULES.keys() == CHOICES
    for field in fields(OptimizerConfig):
        rule = next((name for name in UPDATE_RULES if field.name.startswith(f"{name}_")), "adam")
        if rule not in ("adam", "sgd"):  # which Megatron's launch scripts give whatever the optimizer is
            assert field.metadata["used_with"] in (When("update_rules", (rule,)), When("optimizer", (rule,))), (
                field.name
            )
            assert field.metadata["used_with"].advice() == f"give --optimizer {rule}"


def optimizer_of(config: OptimizerConfig, **precision: object) -> Optimizer:
    """An optimizer of a matrix and a vector."""
    shapes = {"matrix": (6, 4), "vector": (5,)}
    module = torch.nn.ParameterDict({kind: torch.nn.Parameter(torch.ones(shape)) for kind, shape in shapes.items()})
    for kind, param in module.items():
        param.spec = ParamSpec(shapes[kind], normal_initializer(1.0), kind)  # type: ignore[attr-defined]
    set_global_param_names(module)
    parallel = DataParallel(
        module,
        Mesh.single_process(),
        grad_dtype=torch.float32,
        sharded=False,
        bucket_size=None,
        overlap_reduce=False,
        overlap_gather=False,
        average=False,
    )
    return Optimizer([parallel], Mesh.single_process(), config, replace(tiny.config().precision, **precision))


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in UPDATE_RULES), ("adam", NARROW)])
def test_slots_are_what_a_rule_keeps(name: str, changes: dict[str, bool]) -> None:
    optimizer = optimizer_of(OptimizerConfig(optimizer=name), **changes)
    kinds = [update_rule_named(rule, tiny.config(**changes).precision) for rule in optimizer.config.update_rules]
    assert [type(rule) for rule in optimizer.rules] == kinds
    held = {(segment.name, slot) for slot, segment, _ in optimizer.checkpoint_state()}
    of_matrix = kinds[0].slots if kinds[0].matrix_slots is None else kinds[0].matrix_slots
    assert held == {*(("matrix", slot) for slot in of_matrix), *(("vector", slot) for slot in kinds[-1].slots)}


class _Adan(ElementwiseRule):
    slots = ("adan_mean", "adan_change", "adan_square")

    def _update(self, params: list[Tensor], factor: float | Tensor, lr: float, decay: float) -> None:
        raise NotImplementedError


def test_an_added_rule_is_planned_and_required_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UPDATE_RULES, "adan", _Adan)  # type: ignore[arg-type]
    # As at import, with the rule in the table.
    monkeypatch.setattr(state_inventory, "INVENTORY", state_inventory.with_other_slots(state_inventory.INVENTORY))
    chosen = replace(tiny.config(), optimizer=OptimizerConfig(optimizer="adan"))  # type: ignore[arg-type]
    assert owned_bytes_per_parameter(chosen) == 12
    settings = {**config_to_flat_dict(tiny.config()), "optimizer": "adan"}
    names = {*chain(*state_inventory.expected_state_names(settings, 1, ["output_layer.weight"]).values())}
    assert {f"optimizer.{slot}.output_layer.weight" for slot in _Adan.slots} <= names
