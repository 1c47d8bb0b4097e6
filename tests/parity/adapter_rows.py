"""Rows of the table of layouts for adapters: of fused matrices, where q, k and v share a factor, and of each projection by itself."""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}
_MOE: dict[str, Any] = {
    **_LLAMA,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
}
_MLA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "multi_latent_attention": True,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "qk_layernorm": True,
}
_FUSED: dict[str, Any] = {
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "lora_targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
}
_PARTS: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
_NF4, _INT8 = ({"lora_base_quantization": name} for name in ("nf4", "int8"))
# 96 inputs are a block and a half, and shards of them begin inside a block.
_WIDE: dict[str, Any] = {"hidden_size": 96, "ffn_hidden_size": 200, "num_layers": 2}
_MORE: dict[str, Any] = {"lora_plus_ratio": 4.0, "lora_rslora": True}

MODELS: dict[str, dict[str, Any]] = {
    "lora-fused": {**_LLAMA, **_FUSED},
    "lora": {**_LLAMA, **_PARTS, **_MORE},
    "lora-some": {**_PARTS, "lora_targets": ("q_proj", "v_proj=2:6", "*.layers.1.mlp.*")},
    # Of two stages the first has nothing that is trained.
    "lora-last": {**_LLAMA, **_PARTS, "lora_targets": ("*.layers.2.*", "*.layers.3.*")},
    "lora-last-fused": {
        **_LLAMA,
        **_FUSED,
        "lora_targets": tuple(f"*.layers.{layer}.*.{name}" for layer in (2, 3) for name in _FUSED["lora_targets"]),
    },
    "dora-fused": {**_LLAMA, **_FUSED, "dora": True},
    "dora": {**_LLAMA, **_PARTS, **_MORE, "dora": True, "add_qkv_bias": True},
    "lora-moe-fused": {**_MOE, **_FUSED},
    "lora-moe": {**_MOE, **_PARTS, "lora_targets": ("all-linear", "*.experts.linear_fc1.up=2", "gate_proj")},
    "lora-mla": {**_MLA, **_PARTS, "dora": True},
    "lora-saved": {
        **_PARTS,
        "lora_modules_to_save": ("embedding.*", "*.final_layernorm.*"),
        "freeze": ("*.layers.0.*",),
    },
    "frozen": {"freeze": ("embedding.*", "*.layers.0.*", "*.layers.1.*", "*.bias")},
    "qlora": {**_LLAMA, **_PARTS, **_WIDE, **_NF4},
    "qlora-fused": {**_LLAMA, **_FUSED, **_INT8},
    "qdora-mla": {**_MLA, **_PARTS, "dora": True, **_NF4},
    "qlora-moe": {**_MOE, **_PARTS, **_NF4},
    "lora-t5": {"architecture": "t5", "decoder_num_layers": 2, "decoder_seq_length": 8, **_PARTS},
    "lora-bert": {"architecture": "bert", **_PARTS},
}
ROWS: tuple[tuple[str, str], ...] = (
    ("tp2", "lora-fused"),
    ("tp2", "lora"),
    ("tp2 sp", "lora-fused"),
    ("tp2 sp", "lora"),
    ("tp4", "lora"),
    ("tp4 sp", "lora-fused"),
    ("pp2", "lora-fused"),
    ("pp2", "frozen"),
    ("pp2", "lora-last"),
    ("pp2", "lora-last-fused"),
    ("pp2 sp tp2 recompute-uniform", "lora"),
    ("cp2", "lora"),
    ("cp2", "lora-fused"),
    ("ep2 dp2", "lora-moe-fused"),
    ("ep2 dp2", "lora-moe"),
    ("tp2 sp ep2 etp2 dp2", "lora-moe"),
    ("ep2 etp2 dp4", "lora-moe-fused"),
    ("tp2 ep2 etp1 dp2 alltoall", "lora-moe"),
    ("dp2 zero mb2", "lora"),
    ("dp2 zero", "lora-fused"),
    ("dp2 fsdp", "lora"),
    ("dp2 fsdp", "lora-fused"),
    ("dp2 fsdp", "lora-some"),
    ("dp2 fsdp", "dora"),
    ("tp2 sp dp2 fsdp", "lora-mla"),
    ("dp2 fsdp recompute-uniform", "qdora-mla"),
    ("tp2 sp pp2", "dora"),
    ("tp2", "dora-fused"),
    ("tp2 sp", "lora-mla"),
    ("pp2 zb", "lora"),
    ("pp2 zb", "frozen"),
    ("tp2 rings", "lora"),
    ("tp2 sp dp2 overlap-reduce overlap-gather bucket200 recompute-all-parts", "lora-some"),
    ("dp2 overlap-gather bucket200", "dora"),
    ("ep2 dp4 zero overlap-gather bucket200", "lora-moe"),
    ("pp2 dp2 zero", "lora-saved"),
    ("tp2 sp pp2", "lora-t5"),
    ("tp2 sp", "lora-bert"),
    ("tp4 sp dp2 zero", "qlora"),
    ("tp2 pp2 rings", "qlora-fused"),
    ("dp2 fsdp", "qlora-fused"),
    ("tp2 sp", "qdora-mla"),
    ("tp2 sp ep2 etp2 dp2", "qlora-moe"),
)
