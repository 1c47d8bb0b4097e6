"""Rows in bf16 and fp16, which stay near the serial fp32 run."""

from __future__ import annotations

from typing import Any

LOW_PRECISION_STATE: dict[str, Any] = {"bf16": True, "use_precision_aware_optimizer": True}
# Layout, network, format.
ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("", "gpt", {"bf16": True}),
    ("tp2 sp pp2 mb2", "gpt", {"bf16": True}),
    ("tp2 sp dp2 zero overlap-reduce overlap-gather mb2", "llama", {"bf16": True}),
    ("pp2 vpp2 dp2 average mb2", "llama", {"bf16": True, "grad_reduce_in_bf16": True}),
    ("tp2 pp2 mb2", "wide-residual", {"bf16": True}),
    ("tp2 sp pp2 mb2", "wide-residual-after-norm", {"bf16": True}),
    ("tp2 recompute-all-parts mb2", "qk-norm", {"bf16": True}),
    ("tp2 sp dp2 zero overlap-gather bucket600 mb2", "gpt-oss-dense", {"bf16": True}),
    ("tp2 dp2 zero mb2", "qk-clip-gqa", {"bf16": True}),
    ("tp2 pp2 mb2", "llama", {"fp16": True, "loss_scale": 256.0}),
    ("dp2 zero mb2", "gpt", {"fp16": True, "loss_scale": 256.0}),
    ("tp2 sp dp2 fsdp mb2", "llama", {"bf16": True}),
    ("pp2 dp2 fsdp mb2", "gpt", {"fp16": True, "loss_scale": 256.0}),
    ("tp2 sp pp2 mb2", "mla-mtp2", {"bf16": True}),
    ("tp2 pp4 layout=Ett|t|tmm|L mb2", "mla-mtp2", {"bf16": True, "fp32_residual_connection": True}),
    ("tp2 sp ep2 dp2 alltoall grouped mb2", "moe-shared", {"bf16": True}),
    ("etp2 ep2 dp4 zero mb2", "moe-bias", {"bf16": True, "grad_reduce_in_bf16": True}),
    ("tp2 ep2 dp2 zero recompute-moe mb2", "moe", {"fp16": True, "loss_scale": 256.0}),
    ("tp2 sp pp2 mb2", "bert", {"bf16": True}),
    ("pp2 vpp3 mb2", "t5-v1.1", {"bf16": True}),
    ("pp2 vpp3 mb2", "t5-v1.0", {"bf16": True, "fp32_residual_connection": True}),
    ("tp2 sp dp2 zero mb2", "gpt", {"fp16": True, "loss_scale": 256.0, "accumulate_allreduce_grads_in_fp32": True}),
    (
        "tp2 sp dp2 zero overlap-gather mb2",
        "llama",
        {**LOW_PRECISION_STATE, "main_grads_dtype": "bf16", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    ),
    ("tp2 dp2 fsdp mb2", "llama", {**LOW_PRECISION_STATE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}),
    (
        "pp2 dp2 zero mb2",
        "qk-clip",
        {**LOW_PRECISION_STATE, "bf16": False, "fp16": True, "loss_scale": 256.0, "main_params_dtype": "fp16"},
    ),
    ("tp2 sp mb2", "hybrid", {"bf16": True}),
    ("dp2 fsdp mb2", "hybrid", {"bf16": True}),
    ("tp2 sp dp2 zero overlap-reduce overlap-gather bucket600 mb2", "hybrid-odd-tensor", {"bf16": True}),
    ("tp2 dp2 fsdp mb2", "hybrid-odd-tensor", {"bf16": True}),
    ("dp2 fsdp mb2", "delta", {"fp16": True, "loss_scale": 256.0}),
    ("pp2 dp2 fsdp mb2", "hybrid", {"fp16": True, "loss_scale": 256.0}),
    ("cp2 mb2", "delta", {"fp16": True, "loss_scale": 256.0}),
    ("tp2 muon-distributed dp2 zero mb2", "muon", {"bf16": True, "muon_fp32_matmul_prec": "medium"}),
)
