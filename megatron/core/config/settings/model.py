"""What the network is. Field names are Megatron's flags; sizes left out are filled in by `resolve`."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.core.config.flags.declare import ConfigError, flag, plain_field
from megatron.core.config.flags.when import When
from megatron.core.config.settings.adapter import AdapterConfig
from megatron.core.config.settings.architecture import ARCHITECTURES, GPT, Architecture
from megatron.core.config.settings.hybrid import HybridConfig, hybrid_pattern_from_ratios
from megatron.core.config.settings.kernels import KernelConfig
from megatron.core.config.settings.moe import MoEConfig
from megatron.core.config.settings.multipliers import MultiplierConfig
from megatron.core.config.settings.vision import VisionConfig

ROTATES = When("uses_rotary", idle="noted")
RELATIVE = When("position_embedding_type", ("relative",), idle="noted")
STRETCHED_PLAINLY = (
    When(
        "multi_latent_attention", (False,), instead="stretch its rotations by --rope-type yarn --rotary-scaling-factor"
    ),
    When("uses_yarn", (False,)),
    ROTATES,
)
LLAMA_SCALED = When("use_rope_scaling", idle="noted")
YARN = When("uses_yarn")
NOT_LATENT = When("multi_latent_attention", (False,))
ATTENDS = When("attends", idle="noted")
NOT_T5 = When("architecture", ("gpt", "bert", "vit"))
GATED = When("has_gated_mlp")


@dataclass(frozen=True, slots=True)
class PositionConfig:
    """Positions. How a token's place reaches the network: a learned table, rotations of queries and keys, or
    nothing.
    """

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = flag(
        "learned_absolute",
        "how positions are told to the network; yarn: rotations stretched for longer texts; mrope: rotations by "
        "time, height and width; relative: T5's bias of the scores by distance",
        role="network",
    )
    relative_attention_num_buckets: int = flag(
        32, "relative: kinds of distance that are told apart", role="network", used_with=RELATIVE
    )
    relative_attention_max_distance: int = flag(
        128, "relative: distances from here on are alike", role="network", used_with=RELATIVE
    )
    rotary_base: float = flag(10000.0, "base (theta) of the rotary frequencies", role="adaptable", used_with=ROTATES)
    rotary_base_local: float | None = flag(
        None,
        "base for layers with a window, whose rotations are not stretched (Gemma 3); left out: as for all",
        role="adaptable",
        used_with=(ROTATES, When("window_size")),
    )
    rotary_percent: float = flag(1.0, "share of each head that is rotated", role="adaptable", used_with=ROTATES)
    rotary_interleaved: bool = flag(
        False,
        "rotate neighbouring channels together instead of the two halves of a head; latent attention always does",
        role="network",
        used_with=(NOT_LATENT, ROTATES),
    )
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, "divide positions by this factor (linear interpolation)", role="adaptable", used_with=STRETCHED_PLAINLY
    )
    use_rope_scaling: bool = flag(
        False, "rescale low frequencies as Llama 3.1 does", role="adaptable", used_with=STRETCHED_PLAINLY
    )
    rope_scaling_factor: float = flag(
        8.0, "factor of --use-rope-scaling", role="adaptable", used_with=(ROTATES, LLAMA_SCALED)
    )
    rope_scaling_low_freq_factor: float = flag(
        1.0,
        "turns over the original length below which --use-rope-scaling is full",
        role="adaptable",
        used_with=(ROTATES, LLAMA_SCALED),
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0,
        "turns over the original length above which --use-rope-scaling is none",
        role="adaptable",
        used_with=(ROTATES, LLAMA_SCALED),
    )
    rope_scaling_original_length: int = flag(
        8192,
        "positions that the network was trained on before --use-rope-scaling",
        role="adaptable",
        used_with=(ROTATES, LLAMA_SCALED),
    )
    rope_type: Literal["rope", "yarn"] | None = flag(
        None, "kind of rotation; left out: as --position-embedding-type says", role="adaptable", used_with=ROTATES
    )
    rotary_scaling_factor: float = flag(
        1.0, "yarn: how many times longer texts become", role="adaptable", used_with=YARN
    )
    yarn_original_max_position_embeddings: int = flag(
        4096, "yarn: positions that the network was trained on before", role="adaptable", used_with=YARN
    )
    yarn_beta_fast: float = flag(
        32.0, "yarn: pairs that turn more often over the original length stay", role="adaptable", used_with=YARN
    )
    yarn_beta_slow: float = flag(
        1.0,
        "yarn: pairs that turn less often than this are slowed by the whole factor",
        role="adaptable",
        used_with=YARN,
    )
    yarn_correction_range_round_to_int: bool = flag(
        True,
        "yarn: do not round where the pairs between the two begin and end to whole numbers",
        role="adaptable",
        used_with=YARN,
    )
    mscale: float = flag(
        1.0, "yarn: how much the rotated sizes grow with the logarithm of the factor", role="adaptable", used_with=YARN
    )
    mscale_all_dim: float = flag(
        0.0, "yarn: how much the scores grow with the logarithm of the factor", role="adaptable", used_with=YARN
    )
    mrope_section: tuple[int, ...] | None = flag(
        None,
        "mrope: pairs that turn by time, by height and by width",
        role="network",
        used_with=When("position_embedding_type", ("mrope",)),
    )
    no_rope_freq: str | None = flag(
        None,
        "layers without rotations: every n-th, or a list such as [0]*3+[1] with 1 for none",
        role="adaptable",
        used_with=When("uses_rotary"),
    )

    @property
    def is_yarn(self) -> bool:
        """Whether rotary frequencies, if there are any, are scaled by YaRN."""
        return (self.rope_type or self.position_embedding_type) == "yarn"


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention. Keys and values are made of one small vector a token, and queries too if asked
    (DeepSeek-V2, 2024).
    """

    USED_WITH: ClassVar[When] = When("multi_latent_attention")

    multi_latent_attention: bool = flag(
        False,
        "keys and values come from a latent vector; one rotated key serves all heads",
        role="network",
        used_with=When("architecture", ("gpt",)),
    )
    q_lora_rank: int | None = flag(
        None, "size of the queries' latent vector; left out: queries have none", role="network"
    )
    kv_lora_rank: int = flag(32, "size of the latent vector of keys and values", role="network")
    qk_head_dim: int = flag(128, "sizes of a query and key head that are not rotated", role="network")
    qk_pos_emb_head_dim: int = flag(64, "sizes of a query and key head that are rotated", role="network")
    v_head_dim: int = flag(128, "size of a value head", role="network")


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """Multi-token prediction. More layers behind the last, each of which predicts one token further (DeepSeek-V3,
    2024).
    """

    USED_WITH: ClassVar[When] = When("mtp_num_layers")

    mtp_num_layers: int | None = flag(
        None, "tokens predicted beyond the next one", role="network", used_with=When("architecture", ("gpt",))
    )
    mtp_loss_scaling_factor: float = flag(0.1, "weight of the mean of their losses", role="training")
    mtp_use_repeated_layer: bool = flag(
        False,
        "one layer serves all depths",
        role="network",
        used_with=(When("mtp_num_layers"), When("predicts_far", idle="noted")),
    )
    mtp_detach_heads: bool = flag(False, "their losses do not train the layers before them", role="training")


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """Model. The shape of the network. Sizes that are left out follow from the others."""

    num_layers: int | None = flag(
        None,
        "number of transformer layers",
        role="network",
        used_with=When("hybrid_layer_pattern", (None,), idle="accepted"),
    )
    encoder_num_layers: int | None = flag(
        None,
        "T5: layers of the encoder; the same as --num-layers",
        role="network",
        used_with=When("architecture", ("t5",), idle="accepted"),
    )
    decoder_num_layers: int | None = flag(
        None,
        "T5: layers of the decoder; left out: as many as the encoder has",
        role="network",
        used_with=When("architecture", ("t5",)),
    )
    hidden_size: int | None = flag(None, "width of the residual stream", role="network")
    ffn_hidden_size: int | None = flag(
        None,
        "width of the MLP; left out: 4h, or with --swiglu 8h/3 rounded down to 64",
        role="network",
        used_with=When("mlps", ("dense",), idle="accepted"),
    )
    num_attention_heads: int | None = flag(
        None, "number of query heads", role="network", used_with=When("attends", idle="accepted")
    )
    kv_channels: int | None = flag(
        None,
        "size of one head; left out: hidden size / heads",
        role="network",
        used_with=(When("multi_latent_attention", (False,), idle="noted"), ATTENDS),
    )
    group_query_attention: bool = flag(
        False, "several query heads share a key/value head", role="free", used_with=NOT_LATENT
    )
    num_query_groups: int = flag(
        1,
        "number of key/value heads, with --group-query-attention",
        role="network",
        used_with=(When("multi_latent_attention", (False,), idle="noted"), ATTENDS),
    )
    max_position_embeddings: int | None = flag(
        None,
        "longest sequence that positions allow; left out: --seq-length",
        role="network",
        used_with=When("position_embedding_type", ("learned_absolute",), idle="accepted"),
    )
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times the tensor size", role="free"
    )
    padded_vocab_size: int | None = flag(None, "exact padded vocabulary, instead of computing it", role="free")
    true_vocab_size: int | None = plain_field(
        None, role="network"
    )  # the tokenizer's size, filled in once the tokenizer is there
    untie_embeddings_and_output_weights: bool = flag(
        False,
        "give the output layer a matrix of its own",
        role="network",
        used_with=When("reward_head", (False,), idle="accepted"),
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "kind of norm", role="network")
    norm_epsilon: float = flag(1e-5, "epsilon of the norms", role="adaptable")
    apply_layernorm_1p: bool = flag(
        False,
        "store each norm's weight minus one, where half precision has finer steps, and add the one in fp32",
        role="network",
    )
    add_bias_linear: bool = flag(True, "linear layers without biases", off="--disable-bias-linear", role="network")
    add_qkv_bias: bool = flag(
        False, "bias on queries, keys and values even with --disable-bias-linear", role="network", used_with=NOT_LATENT
    )
    swiglu: bool = flag(False, "gated MLP with SiLU instead of GELU", role="network")
    quick_geglu: bool = flag(False, "gated MLP with x * sigmoid(1.702 x)", role="network")
    squared_relu: bool = flag(False, "MLP with the square of ReLU", role="network")
    relu: bool = flag(False, "MLP with ReLU (T5 v1.0)", role="network")
    geglu: bool = flag(False, "gated MLP with GELU; with --openai-gelu by its tanh formula (T5 v1.1)", role="network")
    openai_gelu: bool = flag(False, "GELU by its tanh formula (GPT-2) instead of the error function", role="network")
    activation_func_clamp_value: float | None = flag(
        None,
        "gated MLP: gate and linear half are kept below this, and the linear half above its negative (gpt-oss)",
        role="network",
        used_with=GATED,
    )
    glu_linear_offset: float = flag(
        0.0, "gated MLP: added to the linear half (gpt-oss: 1)", role="network", used_with=GATED
    )
    qk_layernorm: bool = flag(
        False,
        "norm of every query and key head; of latent attention: of the latents",
        role="network",
        used_with=ATTENDS,
    )
    qk_layernorm_across_heads: bool = flag(
        False,
        "--qk-layernorm: one norm over the queries of all heads and one over the keys of all, instead of one a head (OLMo 2)",
        role="network",
        used_with=(When("qk_layernorm"), NOT_LATENT, When("normalization", ("RMSNorm",))),
    )
    qk_l2_norm: bool = flag(
        False,
        "queries and keys are divided by their root mean square after rotation, without weights",
        role="network",
        used_with=(NOT_T5, NOT_LATENT),
    )
    qk_clip: bool = flag(
        False,
        "after each step, weights of queries and keys shrink where a head's largest score was too large",
        role="training",
        used_with=NOT_T5,
    )
    qk_clip_threshold: float = flag(
        100.0, "--qk-clip: largest score that is left alone", role="training", used_with=When("qk_clip")
    )
    qk_clip_alpha: float = flag(
        0.5, "--qk-clip: share of the shrinking that queries take", role="training", used_with=When("qk_clip")
    )
    window_size: str | None = flag(
        None,
        "positions before and after its own that a query sees, as LEFT,RIGHT; -1: all",
        role="adaptable",
        used_with=NOT_T5,
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "layers without the window: every n-th, or a list such as [1]*3+[0] with 1 for a window",
        role="adaptable",
        used_with=When("window_size"),
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = flag(
        "vanilla",
        "attention sinks: one more score of zero, or a learned one a head, that takes weight and gives nothing",
        role="network",
        used_with=(NOT_T5, NOT_LATENT),
    )
    attention_logit_softcap: float | None = flag(
        None, "scores become cap * tanh(score / cap)", role="adaptable", used_with=NOT_T5
    )
    final_logit_softcap: float | None = flag(
        None,
        "logits become cap * tanh(logit / cap)",
        role="adaptable",
        used_with=(NOT_T5, When("reward_head", (False,), idle="accepted")),
    )
    attention_output_gate: bool = flag(
        False,
        "each head's output is multiplied by a sigmoid of the layer's input",
        role="network",
        used_with=(NOT_T5, NOT_LATENT),
    )
    init_method_std: float = flag(
        0.02, "deviation of the initial weights; output projections use it over sqrt(2 layers)", role="training"
    )
    embedding_init_method_std: float | None = flag(
        None, "deviation of the initial embeddings, if another", role="training"
    )
    init_method_xavier_uniform: bool = flag(False, "draw the initial weights by Xavier's uniform rule", role="training")
    hidden_dropout: float = flag(0.1, "dropout after the embedding and both sublayers", role="training")
    attention_dropout: float = flag(0.1, "dropout of attention probabilities", role="training")
    apply_residual_connection_post_layernorm: bool = flag(
        False,
        "the residual starts after the norm (original BERT); Megatron Core accepts this flag and passes over it",
        role="network",
    )
    norm_after_residual: bool = flag(
        False,
        "norms stand after each residual sum and none ends the network (published BERT)",
        role="network",
        used_with=When("architecture", ("bert",)),
    )
    sandwich_norm: bool = flag(
        False,
        "norms stand behind each sublayer too, before its residual sum (Gemma 2)",
        role="network",
        used_with=NOT_T5,
    )
    norm_after_sublayer: bool = flag(
        False,
        "norms stand behind each sublayer instead of before it, before its residual sum (OLMo 2)",
        role="network",
        used_with=NOT_T5,
    )
    embedding_layernorm: bool = flag(
        False, "norm of the embeddings (published BERT)", role="network", used_with=When("architecture", ("bert",))
    )
    scale_embeddings: bool = flag(False, "embeddings are multiplied by sqrt(hidden size) (Gemma)", role="network")
    fp32_residual_connection: bool = flag(False, "keep the residual stream in fp32", role="training")
    softmax_scale: float | None = flag(
        None, "factor of the attention scores; left out: 1/sqrt(head size) (T5: 1)", role="network", used_with=ATTENDS
    )
    scale_tied_logits: bool = flag(
        False,
        "logits of a tied output layer are divided by sqrt(hidden size) (T5 v1.0)",
        role="network",
        used_with=(
            When("untie_embeddings_and_output_weights", (False,), idle="noted"),
            When("reward_head", (False,), idle="noted"),
        ),
    )
    bert_binary_head: bool = flag(
        True,
        "BERT: learn hidden words alone, and nothing about pairs of texts",
        off="--bert-no-binary-head",
        role="network",
        used_with=When("architecture", ("bert",), idle="noted"),
    )
    attention_backend: Literal[
        "auto",
        "fused",
        "flash",
        "cudnn",
        "varlen",
        "flash_attn_2",
        "flash_attn_3",
        "transformer_engine",
        "flex",
        "unfused",
        "local",
    ] = flag(
        "auto",
        "attention kernel; fused: torch's best for the machine; flash, cudnn: one of those; varlen: torch's for packed documents and windows; flash_attn_2, flash_attn_3, "
        "transformer_engine: by these packages; flex: torch's FlexAttention; unfused and local: the plain formula",
        role="free",
    )
    rope: PositionConfig = PositionConfig()
    mla: MLAConfig = MLAConfig()
    mtp: MTPConfig = MTPConfig()
    moe: MoEConfig = MoEConfig()
    hybrid: HybridConfig = HybridConfig()
    multipliers: MultiplierConfig = MultiplierConfig()
    kernels: KernelConfig = KernelConfig()
    adapter: AdapterConfig = AdapterConfig()
    vision: VisionConfig = VisionConfig()
    # What only encoders of images have; `vision_encoder_config` sets it.
    quick_gelu: bool = plain_field(False, role="network")
    layer_scale: float | None = plain_field(
        None, role="network"
    )  # initial factor of what a sublayer adds, learned by channel
    qkv_without_bias: bool = plain_field(False, role="network")
    # Said by the entry script, as is the next.
    architecture: Architecture = plain_field(GPT, role="network", named=ARCHITECTURES)
    # A head that gives a text one number at its last token, in the place of the output layer (reward models).
    reward_head: bool = plain_field(False, role="adaptable")

    def resolve(self) -> ModelConfig:
        """Return the config with sizes that follow from others filled in; given ones stay.

        Required sizes that are missing stay None: the rule `required` reports them before they are used.
        """
        if self.architecture.classifies_images:
            return self._with_vision_encoder_defaults()._resolve_sizes()
        return self._resolve_sizes()

    def _with_vision_encoder_defaults(self) -> RequestedModel:
        """Return a vision transformer's config with its type's layer settings, and published sizes where not given."""
        vision = self.vision.resolve(None, alone=True)
        values = {name: size for name, size in vision.encoder_traits.sizes.items() if getattr(self, name) is None}
        if self.hidden_size and self.ffn_hidden_size is None:
            values["ffn_hidden_size"] = 4 * self.hidden_size
        rope = dataclasses.replace(self.rope, position_embedding_type="none")
        fields = {**vision.encoder_layer_fields, **values, "vision": vision, "rope": rope}
        return dataclasses.replace(self, **fields, max_position_embeddings=vision.num_encoder_tokens)

    def _resolve_sizes(self) -> ModelConfig:
        """Return the config with all sizes that follow from others filled in."""
        values: dict[str, Any] = {}
        if self.hidden_size and self.ffn_hidden_size is None:
            values["ffn_hidden_size"] = self.hidden_size * 8 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden_size
        if self.hidden_size and self.num_attention_heads and self.kv_channels is None:
            values["kv_channels"] = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads and not self.group_query_attention:
            values["num_query_groups"] = self.num_attention_heads
        values |= self._resolved_expert_width(values.get("ffn_hidden_size", self.ffn_hidden_size))
        stretched = self.rope.position_embedding_type == "yarn" or self.mla.multi_latent_attention
        values["rope"] = dataclasses.replace(
            self.rope, rope_type=self.rope.rope_type or ("yarn" if stretched else "rope")
        )
        values |= self._resolved_t5_depths()
        values |= self._resolved_hybrid_fields()
        values["vision"] = self.vision.resolve(self.hidden_size, alone=self.architecture.classifies_images)
        if self.vision.frozen_patterns:
            patterns = dict.fromkeys((*self.adapter.freeze, *self.vision.frozen_patterns))
            values["adapter"] = dataclasses.replace(self.adapter, freeze=tuple(patterns))
        return ModelConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | values)

    def _resolved_expert_width(self, width: int | None) -> dict[str, Any]:
        """Return {"moe": config with the MLP's width for experts} if no width of experts is given, else {}."""
        if not self.moe.num_experts or self.moe.moe_ffn_hidden_size is not None:
            return {}
        return {"moe": dataclasses.replace(self.moe, moe_ffn_hidden_size=width)}

    def _resolved_hybrid_fields(self) -> dict[str, Any]:
        """Return fields to set in a hybrid: the pattern that ratios stand for, numbers of layers and MTP depths that
        the pattern gives, and the number of Mamba-2 heads.
        """
        hybrid, values = self.hybrid, dict[str, Any]()
        if (
            hybrid.hybrid_layer_pattern is None
            and self.num_layers
            and 0 < sum(hybrid.attention_and_mlp_ratios) <= 1
            and min(hybrid.attention_and_mlp_ratios) >= 0
        ):
            pattern = hybrid_pattern_from_ratios(self.num_layers, *hybrid.attention_and_mlp_ratios)
            hybrid = dataclasses.replace(hybrid, hybrid_layer_pattern=pattern)
        if hybrid.layer_symbols and self.num_layers is None:
            values["num_layers"] = len(hybrid.layer_symbols)
        if hybrid.mtp_patterns and self.mtp.mtp_num_layers is None:
            values["mtp"] = dataclasses.replace(self.mtp, mtp_num_layers=len(hybrid.mtp_patterns))
        if self.hidden_size and hybrid.mamba_num_heads is None and hybrid.mamba_head_dim > 0:
            heads = 2 * self.hidden_size // hybrid.mamba_head_dim
            hybrid = dataclasses.replace(hybrid, mamba_num_heads=heads)
        return values | {"hybrid": hybrid}

    def _resolved_t5_depths(self) -> dict[str, int | None]:
        """Return fields to set: depths of a T5's encoder and decoder; num_layers if only the encoder's was given."""
        values: dict[str, int | None] = {}
        if self.num_layers is None:
            values["num_layers"] = self.encoder_num_layers
        if self.architecture.is_encoder_decoder:
            values["encoder_num_layers"] = encoder = self.encoder_num_layers or self.num_layers
            values["decoder_num_layers"] = self.decoder_num_layers or encoder
        return values


class ModelConfig(RequestedModel):
    """The resolved shape of a network: every size is there."""

    __slots__ = ()
    num_layers: int
    encoder_num_layers: int
    decoder_num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int
    max_position_embeddings: int
    padded_vocab_size: int  # this and the next: once the tokenizer is read, by `with_vocabulary`
    true_vocab_size: int

    def with_vocabulary(self, true_vocab_size: int, tensor_size: int) -> ModelConfig:
        """Return the config with the vocabulary of the tokenizer, padded so that `tensor_size` ranks can divide it."""
        multiple = self.make_vocab_size_divisible_by * tensor_size
        padded = self.padded_vocab_size or math.ceil(true_vocab_size / multiple) * multiple
        return dataclasses.replace(self, true_vocab_size=true_vocab_size, padded_vocab_size=padded)

    @property
    def parsed_window_size(self) -> tuple[int, int] | None:
        """--window-size as (positions before, after), -1 for all, or None; `ConfigError` if it cannot be parsed."""
        if self.window_size is None:
            return None
        match = re.fullmatch(r"\(?\s*(-1|\d+)\s*,\s*(-1|\d+)\s*\)?", self.window_size.strip())
        if match is None:
            raise ConfigError(
                f"--window-size {self.window_size} cannot be read; write two numbers from -1 on, such as 127,0"
            )
        return int(match[1]), int(match[2])

    @property
    def uses_rotary(self) -> bool:
        """Whether queries and keys are rotated by position; latent attention always rotates a part of each head."""
        return self.mla.multi_latent_attention or self.rope.position_embedding_type in ("rope", "yarn", "mrope")

    @property
    def has_plain_pre_norm(self) -> bool:
        """Whether a layer's second norm gets just x plus attention's output, in one dtype (for residual_norm)."""
        elsewhere = (
            self.apply_residual_connection_post_layernorm
            or self.norm_after_residual
            or self.sandwich_norm
            or self.norm_after_sublayer
        )
        scaled = self.layer_scale is not None
        apart = elsewhere or scaled or self.architecture.is_encoder_decoder
        return not apart and not self.fp32_residual_connection

    def block_of_layer(self, *, norms_before: bool = False) -> str:
        """In which order norms, sublayers and sums stand in a layer: a row of `transformer.blocks.BLOCKS`. norms_before: the
        mixer of the layer wants norms before its sublayers.
        """
        orders = {
            "post_norm": self.norm_after_residual,
            "sandwich": self.sandwich_norm,
            "after_sublayer": self.norm_after_sublayer and not norms_before,
            "normed_residual": self.apply_residual_connection_post_layernorm,
        }
        return next((name for name, holds in orders.items() if holds), "pre_norm")

    @property
    def has_gated_mlp(self) -> bool:
        """Whether the MLP is gated (SwiGLU, GEGLU or quick GEGLU)."""
        return self.swiglu or self.quick_geglu or self.geglu

    @property
    def activation_name(self) -> str:
        """Name of the MLP's activation: gelu, gelu_tanh, silu, quick_gelu, relu or squared_relu."""
        chosen = {
            "silu": self.swiglu,
            "quick_gelu": self.quick_geglu or self.quick_gelu,
            "squared_relu": self.squared_relu,
            "relu": self.relu,
            "gelu_tanh": self.openai_gelu,
        }
        return next((name for name, on in chosen.items() if on), "gelu")

    @property
    def all_requested_kernels(self) -> dict[str, str]:
        """Operation -> name of the kernel requested, by any flag."""
        return {
            "attention": self.attention_backend,
            "grouped_linear": "auto" if self.moe.moe_grouped_gemm else "loop",
            "moe_flex_dispatcher": self.moe.requested_dispatch_library,
            **self.kernels.requested_kernels,
        }

    @property
    def can_fuse_mlp_bias(self) -> bool:
        """Whether the bias of the first MLP matrix can be added by the activation kernel: nothing stands between."""
        return self.add_bias_linear and self.multipliers.mlp_factors[0] == 1.0

    @property
    def rotates_fused_qkv(self) -> bool:
        """Whether queries and keys are rotated directly in the fused qkv output, without norms between."""
        return self.uses_rotary and not (
            self.mla.multi_latent_attention or self.qk_layernorm or self.qk_layernorm_across_heads
        )

    @property
    def splits_qkv_unrotated(self) -> bool:
        """Whether some layers split the fused qkv output without rotating it: no rotary positions, or norms before."""
        everywhere = self.rotates_fused_qkv and self.rope.no_rope_freq is None
        return bool(self.num_attention_heads) and not self.mla.multi_latent_attention and not everywhere

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the fused projection of queries, keys and values has a bias."""
        return (self.add_bias_linear or self.add_qkv_bias) and not self.qkv_without_bias

    @property
    def is_hybrid(self) -> bool:
        """Whether the layers are given by a hybrid pattern, one symbol for each."""
        return bool(self.hybrid.layer_symbols)

    @property
    def ties_embeddings(self) -> bool:
        """Whether the output layer uses the word embedding's matrix."""
        return not self.untie_embeddings_and_output_weights

    @property
    def head_size_before_rotary_percent(self) -> int:
        """Size of a head of which --rotary-percent is rotated; for latent attention, of its rotated part."""
        return self.mla.qk_pos_emb_head_dim if self.mla.multi_latent_attention else self.kv_channels

    @property
    def has_interleaved_rotary(self) -> bool:
        """Whether rotation pairs neighbouring channels (always in latent attention), not the two halves of a head."""
        return self.mla.multi_latent_attention or self.rope.rotary_interleaved

    @property
    def key_and_value_head_sizes(self) -> tuple[int, int]:
        """Size of a key head, and of a value head."""
        mla = self.mla
        return (
            (mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim)
            if mla.multi_latent_attention
            else (self.kv_channels,) * 2
        )

    @property
    def has_uneven_head_sizes(self) -> bool:
        """Whether a value head has another size than a key head."""
        return self.key_and_value_head_sizes[0] != self.key_and_value_head_sizes[1]

    @property
    def has_vision(self) -> bool:
        """Whether it is a language model that reads images."""
        return self.architecture.is_decoder_only and self.vision.vision_model_type is not None

    def encoder_or_decoder_depth(self, decoder: bool = False) -> int:
        """Return the number of layers: of a T5 those of the encoder, or with `decoder` of the decoder; else all."""
        if self.architecture.is_encoder_decoder:
            return self.decoder_num_layers if decoder else self.encoder_num_layers
        return self.num_layers

    @property
    def query_projection_width(self) -> int:
        """Width of all query heads together, before they are divided over ranks."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_projection_width(self) -> int:
        """Width of all key heads together (and of all value heads), before they are divided over ranks."""
        return self.num_query_groups * self.kv_channels
