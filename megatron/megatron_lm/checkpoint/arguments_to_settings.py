"""From the pickled arguments of a Megatron run to our settings, by field name: each is taken, harmless or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from megatron.core.config.flags.declare import field_resume_roles, flag_fields
from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.model import MLAConfig, ModelConfig, MTPConfig
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.megatron_lm.checkpoint.argument_table import AT_DEFAULT, harmless_reason
from megatron.megatron_lm.checkpoint.hybrid import hybrid_settings_of_arguments, infer_hybrid_settings

# Names since 0.16 of what our settings, and releases before, call otherwise.
_RENAMED = {"layernorm_epsilon": "norm_epsilon", "layernorm_zero_centered_gamma": "apply_layernorm_1p"}
# Of the free choices of the run that saved (dispatch, kernels, logs) those that are worth taking over.
_TAKEN_OVER = frozenset(
    (
        "group_query_attention",
        "make_vocab_size_divisible_by",
        "moe_grouped_gemm",
        "hybrid_attention_ratio",
        "hybrid_mlp_ratio",
    )
)
_SPECS = re.compile(r"local|megatron\.core\.models\.\w+\.\w+_layer_specs")  # of Megatron Core's own networks
_PATTERNS = frozenset(
    ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq")
)  # upstream's are numbers or lists
_MANY = frozenset(
    (
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "mrope_section",
        "mamba_time_step_limit",
        "ssm_multipliers",
        "mlp_multipliers",
    )
)
_YARN = frozenset(("rotary_scaling_factor", "mscale", "mscale_all_dim"))
_LEARNED = (None, "learned_absolute")
_WORDS, _PLACES = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_PUBLISHED_HEAD_SIZE = 64  # of GPT-345M and BERT-345M, the published files without arguments


def settings_of_megatron_args(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model that a run's arguments describe. given: settings that override them.

    Arguments that are not of the model (layout, schedule, paths) are left out, and so are those of features
    that the model does not have: a checkpoint holds every default of Megatron's, even sizes of experts without experts.
    """
    settings = {_RENAMED.get(name, name): value for name, value in arguments.items() if name in _RENAMED}
    settings |= {
        name: _convert_megatron_argument(name, value)
        for name, value in arguments.items()
        if name in _megatron_model_field_names()
    }
    settings = _without_none(settings)
    if arguments.get("use_rotary_position_embeddings"):
        settings["position_embedding_type"] = "rope"
    elif not arguments.get("add_position_embedding", True) and settings.get("position_embedding_type") in _LEARNED:
        settings["position_embedding_type"] = "none"
    if arguments.get("tokenizer_type") == "NullTokenizer" and arguments.get("vocab_size"):
        # What came with the argument for its end of document has no id beyond --vocab-size.
        settings["null_tokenizer_ids"] = arguments["vocab_size"] + ("null_tokenizer_eod_id" not in arguments)
    if arguments.get("encoder_num_layers") and not settings.get("num_layers"):
        settings["num_layers"] = arguments["encoder_num_layers"]
    if _was_built_by_megatron_core(arguments):  # which has the argument, and never starts a residual after the norm
        settings.pop("apply_residual_connection_post_layernorm", None)
    settings |= hybrid_settings_of_arguments(arguments)
    if _fuses_gelu(arguments):
        settings["openai_gelu"] = True
    return {**_without_disabled_features(_without_none(settings)), **given}


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def run_settings_of_megatron_args(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings beside the model that a resumed run takes over: tokenizer and sequence length."""
    names = (_flag_field_names(TokenizerConfig) if arguments.get("tokenizer_type") else frozenset()) | {"seq_length"}
    return {
        name: value for name, value in arguments.items() if name in names and isinstance(value, (bool, int, float, str))
    }


def _flag_field_names(config: type) -> frozenset[str]:
    return frozenset(field.name for field, _ in flag_fields(config)) | (
        {"true_vocab_size"} if config is ModelConfig else set()
    )


@cache
def _megatron_model_field_names() -> frozenset[str]:
    """Settings of the model that are taken from Megatron's arguments: no adapters, which its checkpoints do not have, and
    no free choices, whose defaults there are nobody's word.
    """
    free = {name for name, role in field_resume_roles(ModelConfig).items() if role == "free"}
    return _flag_field_names(ModelConfig) - _flag_field_names(AdapterConfig) - (free - _TAKEN_OVER)


def megatron_argument_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a run that make a network which is not built here, or are unknown, a line each."""
    keys = ForeignMapping(
        arguments,
        harmless=[name for name in arguments if harmless_reason(name)],
        defaults=AT_DEFAULT,
        advice="is no argument that is known here, and may change the network",
    )
    keys.ignore_keys(*field_resume_roles(ModelConfig))  # taken as settings, or of what this project writes for Megatron
    spec = arguments.get("spec")
    module = spec[0] if isinstance(spec, (list, tuple)) and spec else spec
    strange = (
        [] if module is None or _SPECS.fullmatch(str(module)) else [f"spec: {module} is no network of Megatron Core's"]
    )
    return [*keys.all_problems(), *strange]


def _convert_megatron_argument(name: str, value: Any) -> Any:
    """Convert an argument to our settings' form (patterns, windows as text, some as tuples); None for other kinds."""
    if isinstance(value, (list, tuple)):
        if not all(isinstance(item, (bool, int, float, str)) for item in value):
            return None
        return (
            tuple(value) if name in _MANY else ",".join(map(str, value)) if name == "window_size" else str(list(value))
        )
    if not isinstance(value, (bool, int, float, str)):
        return None
    return (value,) if name in _MANY else str(value) if name in _PATTERNS else value


def _fuses_gelu(arguments: Mapping[str, Any]) -> bool:
    """Whether the MLP's GELU is Megatron's fused one, the tanh formula (its default if MLPs have biases)."""
    others = ("swiglu", "squared_relu", "quick_geglu", "geglu", "num_experts")
    return bool(
        arguments.get("bias_gelu_fusion")
        and arguments.get("add_bias_linear", True)
        and not any(arguments.get(name) for name in others)
    )


def _was_built_by_megatron_core(arguments: Mapping[str, Any]) -> bool:
    """Whether the network was built of Megatron Core's layers, not of the older ones of Megatron-LM."""
    newer = "deprecated_use_mcore_models" in arguments and not arguments.get("use_legacy_models")
    return newer or bool(arguments.get("use_mcore_models"))


def _without_disabled_features(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of features that are off, which are only Megatron's defaults."""
    latent, experts = bool(settings.get("multi_latent_attention")), bool(settings.get("num_experts"))
    yarn = latent or settings.get("position_embedding_type") == "yarn" or settings.get("rope_type") == "yarn"
    groups = {
        frozenset(("padded_vocab_size",)): False,  # padding belongs to that run's layout
        frozenset(("num_query_groups",)): bool(settings.get("group_query_attention")) and not latent,
        frozenset(("add_qkv_bias",)): not settings.get("add_bias_linear", True),  # implied by biases everywhere
        _flag_field_names(MoEConfig): experts,
        _flag_field_names(MLAConfig): latent,
        _flag_field_names(MTPConfig): bool(settings.get("mtp_num_layers")),
        _YARN: yarn,
    }
    unused = frozenset[str]().union(*(names for names, used in groups.items() if not used))
    return {name: value for name, value in settings.items() if name not in unused}


def complete_settings_by_shapes(
    settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, where: str
) -> dict[str, Any]:
    """Return the settings completed by the tensors; without arguments, with the head size of the published files.

    shapes: of the parameters (our names); of sharded ones, of one rank. Raises `CheckpointError` if settings contradict
    the tensors, or the number of heads cannot be known.
    """
    derived, hidden_size = _settings_of_shapes(shapes), shapes[_WORDS][1]
    wrong = [
        f"{name}: {settings[name]} in the settings, {value} in the tensors"
        for name, value in derived.items()
        if name != "bert_binary_head" and settings.get(name, value) != value
    ]
    layers, contradictions = infer_hybrid_settings(shapes, settings)
    if wrong + contradictions:
        raise CheckpointError(f"{where} contradicts itself", wrong + contradictions)
    derived |= layers
    halves = () if derived["architecture"] == "t5" else ("encoder_num_layers", "decoder_num_layers")
    whole = {**{name: value for name, value in settings.items() if name not in halves}, **derived}
    if "num_attention_heads" not in whole:
        if hidden_size != 16 * _PUBLISHED_HEAD_SIZE:
            raise CheckpointError(
                f"{where} does not say how many attention heads the model has, and its tensors cannot show "
                "it; give --num-attention-heads"
            )
        whole["num_attention_heads"] = hidden_size // _PUBLISHED_HEAD_SIZE
    return whole


def _settings_of_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the settings that the shapes of parameters imply: architecture, layers, hidden size, positions."""
    depths = {
        stack: len({match[1] for name in shapes for match in [re.match(rf"{stack}\.layers\.(\d+)\.", name)] if match})
        for stack in ("encoder", "decoder")
    }
    kind = "t5" if all(depths.values()) else "bert" if depths["encoder"] else "gpt"
    match: dict[str, Any] = {
        "architecture": kind,
        "num_layers": depths["encoder"] or depths["decoder"],
        "hidden_size": shapes[_WORDS][1],
    }
    if kind == "t5":
        match |= {"encoder_num_layers": depths["encoder"], "decoder_num_layers": depths["decoder"]}
    if kind == "bert":
        match["bert_binary_head"] = any(name.startswith(("pooler.", "binary_head.")) for name in shapes)
    if _PLACES in shapes:
        match["max_position_embeddings"] = shapes[_PLACES][0]
    return match
