"""Default kernels are tried when a run starts: what computes another op than its own, or does not compile, is named and not taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.cli.commands import doctor
from megatron.core.kernels.choice import kernel_check
from megatron.core.kernels.choice.startup_check import KernelChoice, select_kernels_with_trials
from megatron.core.kernels.choice.table import CANDIDATES, KernelCandidate, KernelRequirements, select_kernels
from megatron.core.kernels.low_precision import fp8
from megatron.core.kernels.low_precision.fp8 import QuantizeTransposeKernels
from megatron.core.kernels.ops import reference
from megatron.core.parallel.mesh import Mesh
from megatron.training import initialize
from tests.helpers import tiny

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
OPS = ("gated_activation", "rotary")


class _TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def wrong_forward(*given: Any) -> Tensor:
    return 1.1 * reference.rotary(*given)


def wrong_backward(x: Tensor, *given: Any) -> Tensor:
    return reference.rotary(_TwiceTheGradient.apply(x), *given)


def not_compiled(*given: Any) -> Tensor:
    raise ValueError("expected a register\nand more")


def offers(**kernels: Callable[..., Any]) -> tuple[KernelCandidate, ...]:
    """The table of a machine where every default of Triton fits; it computes the formulas, or what is given."""
    sound = {op: getattr(reference, op) for op in OPS}
    return tuple(
        replace(
            one, kernel={**sound, **kernels}.get(one.op), unsupported_reason=lambda need: "", unasked=lambda need: ""
        )
        if one.checked and one.op in {**sound, **kernels}
        else one
        for one in CANDIDATES
    )


def chosen(*, changes: dict[str, Any] | None = None, **kernels: Callable[..., Any]) -> KernelChoice:
    return select_kernels_with_trials(
        tiny.config(**LLAMA, **(changes or {})), KernelRequirements(), CPU, candidates=offers(**kernels)
    )


def test_defaults_are_taken_once_they_have_computed_their_ops() -> None:
    found = chosen()
    taken = {op: name for op, name, _ in found.kernels.report}
    assert not found.failures and all(taken[op] == "triton" for op in OPS)
    assert {op for op, _, problem in found.need.checks if not problem} == set(OPS)
    untried = dict(
        (op, (name, why)) for op, name, why in select_kernels(KernelRequirements(), candidates=offers()).report
    )
    assert untried["rotary"] == ("torch", ""), "what another machine would take is not told in every run"


@pytest.mark.parametrize(
    "kernel, problem",
    [
        (wrong_forward, "it was off by 0.1 of the largest value"),
        (wrong_backward, "it was off by 1 of the largest value"),
        (not_compiled, "its trial failed, ValueError: expected a register"),
    ],
)
def test_a_default_that_fails_its_trial_is_named_in_one_line_and_the_formula_taken(
    kernel: Callable[..., Tensor], problem: str
) -> None:
    found = chosen(rotary=kernel)
    assert found.kernels.rotary is reference.rotary
    (line,) = found.failures
    assert "\n" not in line and line.startswith(
        "WARNING: --kernel rotary=triton is no default here, rotary is by torch: "
    )
    assert problem in line
    (why,) = (why for op, _, why in found.kernels.report if op == "rotary")
    assert why.startswith(f"triton: {problem}"), "the line of kernels says so, too"
    assert {op: name for op, name, _ in found.kernels.report}["gated_activation"] == "triton"


def test_what_is_asked_for_by_name_is_not_tried_and_not_replaced() -> None:
    config = tiny.config(**LLAMA)
    wishes = {**config.model.all_requested_kernels, "rotary": "triton"}
    found = select_kernels_with_trials(
        config, KernelRequirements(), CPU, wishes=wishes, candidates=offers(rotary=not_compiled)
    )
    assert found.kernels.rotary is not_compiled and not found.failures


def test_a_kernel_that_fails_on_one_rank_is_taken_on_none() -> None:
    config = tiny.config(**LLAMA)
    found = select_kernels_with_trials(
        config,
        KernelRequirements(),
        CPU,
        candidates=offers(),
        gather=lambda rows: [rows, [("rotary", "triton", "it broke")], rows],
    )
    assert found.kernels.rotary is reference.rotary and "it broke" in found.failures[0]


def test_a_run_and_the_doctor_tell_of_the_same_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = chosen(rotary=wrong_forward)
    monkeypatch.setattr(initialize, "select_kernels_with_trials", lambda *given, **how: broken)
    monkeypatch.setattr(doctor, "select_kernels_with_trials", lambda *given, **how: broken)
    config = tiny.config(**LLAMA)
    found, rows = doctor.choose_kernels_with_findings(config, KernelRequirements(), Mesh.single_process(CPU))
    assert found is broken and [(row.check, row.status, row.finding) for row in rows] == [
        ("kernels", "WARN", broken.failures[0])
    ]


def test_formulas_are_taken_where_the_compiler_makes_kernels_of_them() -> None:
    need = KernelRequirements(device="cuda", dtype=torch.bfloat16, compiled=True)
    for one in CANDIDATES:
        if one.checked and one.op in OPS:
            assert one.unasked(need) == "torch's compiler makes one kernel of the formula"


def rounding(change: float = 1.0, *, turns: bool = True) -> QuantizeTransposeKernels:
    """The definition in the place of the kernels of quantise, or something else."""

    def by_tensor(x: Tensor, number: fp8.NumberFormat, largest: Tensor, *, margin: int = 0, **_: Any) -> Any:
        one = fp8.quantize_per_tensor(x * change, number, fp8.quantization_scale(largest.amax(), number, margin))
        return one, (one.t() if turns else one)

    def by_blocks(x: Tensor, number: fp8.NumberFormat, block: tuple[int, int], **_: Any) -> Any:
        turned = fp8.quantize_per_block(x.t(), number, block)
        return fp8.quantize_per_block(x * change, number, block), turned

    return QuantizeTransposeKernels(fp8.tensor_amax, by_tensor, by_blocks)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_the_kernels_that_round_to_8_bits_are_tried_too(recipe: str) -> None:
    config = tiny.config(**LLAMA, fp8_format="hybrid", fp8_recipe=recipe)
    need = KernelRequirements(low=config.precision.low)

    def found(kernel: QuantizeTransposeKernels) -> KernelChoice:
        return select_kernels_with_trials(config, need, CPU, candidates=offers(quantise=kernel))  # type: ignore[arg-type]

    sound = rounding()
    assert found(sound).kernels.quantise is sound and not found(sound).failures
    for wrong in (rounding(1.5), *([rounding(turns=False)] if recipe in ("tensorwise", "delayed") else [])):
        broken = found(wrong)
        assert broken.kernels.quantise is None and "quantise is by torch" in broken.failures[0]


def test_every_op_with_a_default_that_is_to_be_tried_has_a_trial() -> None:
    ops = {one.op for one in CANDIDATES if one.checked}
    config = tiny.config(**LLAMA, no_rope_freq="2", fp8_format="hybrid", fp8_recipe="tensorwise", kernel=())
    tried = {
        trial.op for trial in kernel_check.trials_for_ops_of_run(config, KernelRequirements(low=config.precision.low))
    }
    assert ops <= tried and "low_linear" in tried and "paged_attention" in tried


def test_every_op_of_the_table_has_a_trial_but_for_the_exchange_between_ranks() -> None:
    networks: tuple[dict[str, Any], ...] = (
        {**LLAMA, "fp8_format": "hybrid", "fp8_recipe": "tensorwise", "num_experts": 4},
        {
            "normalization": "LayerNorm",
            "hybrid_layer_pattern": "M*G-",
            "num_layers": None,
            "position_embedding_type": "none",
        },
    )
    tried: set[str] = set()
    for changes in networks:
        config = tiny.config(**changes)
        tried |= {
            trial.op
            for trial in kernel_check.trials_for_ops_of_run(config, KernelRequirements(low=config.precision.low))
        }
    assert {one.op for one in CANDIDATES} - tried == {"moe_flex_dispatcher"}
