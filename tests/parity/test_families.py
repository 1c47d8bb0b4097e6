"""Published networks and ours compute the same: logits of transformers' models, under several layouts, and files both ways.

Every case is a tiny random model of transformers', saved by transformers, opened as a `Source`, and built here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.config.flags.declare import config_to_flat_dict
from megatron.core.config.plan.layers import network_layer_plans
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.context_parallel.zigzag import Zigzag
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families import hf, hf_export
from megatron.core.families.registry import family_of_config
from megatron.core.families.tensor_file import read_safetensors_header
from megatron.core.models.bert import BERTModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.t5 import T5Model
from megatron.core.parallel import collectives
from megatron.core.parallel.boxes import whole_box
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.spec import local_shard_boxes, param_spec_of
from tests.helpers import tiny
from tests.helpers.tiny import VOCABULARY
from tests.helpers.world import Worlds
from tests.parity import gemma_cases, hybrid_cases

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NETWORKS = {"gpt": GPTModel, "bert": BERTModel, "t5": T5Model}
Said = dict[str, Tensor]  # logits of words [b, s, v], and a BERT's of pairs [b, 2]
LENGTH, SHORT = 16, 10
TOLERANCE = 1e-5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT2_SIZES = {
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
}
BERT_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
T5_SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 4,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 2.0,
}
SPARSE = {**SIZES, "moe_intermediate_size": 24, "norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    **hybrid_cases.experts(SPARSE),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4}),
    "mixtral window": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5}),
    "qwen2 moe": ("Qwen2Moe", {**SPARSE, "norm_topk_prob": False, "shared_expert_intermediate_size": 20}),
    "qwen2 moe some": (
        "Qwen2Moe",
        {
            **SPARSE,
            "shared_expert_intermediate_size": 20,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 moe": ("Qwen3Moe", {**SPARSE, "head_dim": 16}),
    "qwen3 moe some": (
        "Qwen3Moe",
        {
            **SPARSE,
            "norm_topk_prob": False,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "deepseek v2 lite": ("DeepseekV2", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 12,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 12,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek v3 plain": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.6,
            "rope_parameters": {**YARN, "truncate": False},
            "attn_implementation": "eager",
        },
    ),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt2 erf untied wide": (
        "GPT2",
        {
            **GPT2_SIZES,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
            "n_inner": 96,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "llama2": ("Llama", {**SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama linear": (
        "Llama",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}},
    ),
    "llama biased": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "smollm2": ("Llama", {**SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**SIZES, "head_dim": 12, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2.5 tied": (
        "Qwen2",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "mistral window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "llama yarn": ("Llama", {**SIZES, "rope_parameters": YARN}),
    "qwen2 window": ("Qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 layers": (
        "Qwen3",
        {
            **SIZES,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    **gemma_cases.cases(SIZES),
    **hybrid_cases.dense(SIZES),
    "olmo2": ("Olmo2", {**SIZES, "pad_token_id": None}),
    "bert": ("BertForPreTraining", BERT_SIZES),
    "bert words tanh": ("BertForMaskedLM", {**BERT_SIZES, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "megatron bert": ("MegatronBertForPreTraining", {**BERT_SIZES, "layer_norm_eps": 1e-5}),
    "t5": ("T5ForConditionalGeneration", T5_SIZES),
    "t5 v1.1": (
        "T5ForConditionalGeneration",
        {**T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5 tied unscaled": ("T5ForConditionalGeneration", {**T5_SIZES, "scale_decoder_outputs": False}),
    **EXPERTS,
}
UNTIED_WHEN_LOADED = ("t5 v1.1",)  # the class ties whatever its config says, and leaves it to loading to untie
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_model_parallel_size": 2},
    "tp 2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp 2": {"pipeline_model_parallel_size": 2},
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep 2": (2, {"expert_model_parallel_size": 2, "global_batch_size": 4}),
    "tp 2 ep 2": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "tp 2 etp 2 ep 2": (
        4,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "global_batch_size": 4,
        },
    ),
    "pp 2 ep 2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "global_batch_size": 4}),
    "cp 2": (2, {"context_parallel_size": 2}),
    "pp 2 ep 2 cp 2": (
        4,
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "context_parallel_size": 2},
    ),
}


def published(case: str) -> nn.Module:
    """The random model of a case; norms and biases are random too, so that none can be forgotten."""
    kind, sizes = CASES[case]
    torch.manual_seed(11)
    head = kind if "For" in kind else "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    config = f"{kind.partition('For')[0]}{'Text' * kind.startswith(('Qwen3_5', 'Gemma3'))}Config"
    model = getattr(transformers, head)(getattr(transformers, config)(**sizes)).eval()
    if case in UNTIED_WHEN_LOADED:
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))
    for name, param in [*model.named_parameters(), *model.named_buffers()]:
        if param.dim() == 1 and not name.endswith("inv_freq"):
            param.data.add_(torch.randn_like(param), alpha=0.3)
    return model


def said(model: nn.Module) -> Said:
    """What a network of transformers' says of the text."""
    with torch.no_grad():
        if isinstance(model, transformers.T5ForConditionalGeneration):
            return {"words": model(ids(), attention_mask=padding().long(), decoder_input_ids=ids()[:, :SHORT]).logits}
        if "Bert" not in type(model).__name__:
            return {"words": model(ids()).logits}
        out = model(ids(), attention_mask=padding().long(), token_type_ids=ids() % 2)
    return (
        {"words": out.logits}
        if "logits" in out
        else {"words": out.prediction_logits, "pairs": out.seq_relationship_logits}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, as transformers saves it, and the logits of a text beside it."""
    base = tmp_path_factory.mktemp("published")
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def made(case: str) -> Path:
        path = base / case.replace(" ", "_")
        if not path.exists():
            model = published(case)
            model.save_pretrained(path)
            torch.save(said(model), path / "logits.pt")
        return path

    return made


def ids() -> Tensor:
    """Some ids, [2, 16]."""
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def padding() -> Tensor:
    """Where there are tokens, for networks that see a whole text, [2, 16]."""
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])


def fill(model: nn.Module, source: CheckpointSource, mesh: Mesh) -> None:
    """Load this rank's boxes, and nothing else."""
    for param in model.parameters():
        param.data.fill_(float("nan") if param_spec_of(param).kind != "embedding" else 0.0)  # padding stays
        for piece in local_shard_boxes(param_spec_of(param), mesh):
            param.data[piece.local.slices()] = source.read(f"model.{param_spec_of(param).name}", piece.box)


def ask(model: GPTModel | BERTModel | T5Model, message: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One stage on the text. Returns its message, or what its heads say."""
    if isinstance(model, T5Model):
        out = model(encoder_ids=ids(), encoder_padding=padding(), decoder_ids=ids()[:, :SHORT], message=message or None)
    elif isinstance(model, BERTModel):
        out = model(ids=ids(), padding=padding(), types=ids() % 2, hidden=next(iter(message), None))
    else:
        cp = model.build.mesh.cp
        out = model(ids=Zigzag(LENGTH, cp.size).shard(ids(), cp.rank, dim=1), hidden=next(iter(message), None))
    return out if isinstance(out, tuple) else (out,)


def logits_here(path: Path, layout: dict[str, Any]) -> Said | None:
    """On every rank: our network with the folder's weights. Returns what the last stage says, and None on other stages."""
    source = hf.open_hf_folder(path)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = tiny.config(
        world_size,
        **{
            **source.settings,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **layout,
        },
        **({"decoder_seq_length": SHORT} if "decoder_num_layers" in source.settings else {}),
    )
    run = tiny.run_of(config)
    (stage,) = [stage for stage in stage_specs_of_run(config) if stage.rank == run.mesh.pp.rank]
    model = NETWORKS[config.model.architecture.name](stage, run.layer_build_context).materialize(1).eval()
    fill(model, source, run.mesh)
    with torch.no_grad():
        message = (
            ()
            if stage.has_embedding
            else tuple(torch.empty(shape, dtype=dtype) for shape, dtype in model.received_tensor_specs(config.train))
        )
        for part in message:
            dist.recv(part, src=run.mesh.pp.ranks[stage.rank - 1])
        out = ask(model, message)
        if not stage.has_output:
            for part in out:
                dist.send(part.contiguous(), dst=run.mesh.pp.ranks[stage.rank + 1])
            return None
        words = [torch.empty_like(out[0]) for _ in range(run.mesh.tp.size)]
        if run.mesh.tp.size > 1:
            dist.all_gather(words, out[0].contiguous(), group=run.mesh.tp.group)
        else:
            words = [out[0]]
    whole_text = Zigzag(LENGTH, run.mesh.cp.size).sorting_permutation(range(run.mesh.cp.size), run.mesh.device)
    pieces_of_text = collectives.all_gather(torch.cat(words, dim=-1)[..., :VOCABULARY].contiguous(), run.mesh.cp)
    found = {"words": (pieces_of_text if len(pieces_of_text) != LENGTH else pieces_of_text[whole_text]).transpose(0, 1)}
    return found if len(out) == 1 or out[1] is None else {**found, "pairs": out[1]}


def check_logits(found: Said, path: Path) -> None:
    """Within the tolerance of transformers', relative to the largest."""
    check_same(found, torch.load(path / "logits.pt", weights_only=True))


def check_same(found: Said, expected: Said) -> None:
    """Within the tolerance, relative to the largest."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        gap, size = float((found[name] - values).abs().max()), float(values.abs().max())
        assert gap <= TOLERANCE * size, f"logits of {name} differ by {gap:.3g} of {size:.3g}"


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, folder: Callable[[str], Path]) -> None:
    check_logits(logits_here(folder(case), {}), folder(case))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_under_a_layout(
    case: str, layout: str, folder: Callable[[str], Path], world: Worlds
) -> None:
    results = world(2).run(logits_here, folder(case), LAYOUTS[layout])
    check_logits(next(result for result in reversed(results) if result is not None), folder(case))


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("case", EXPERTS)
def test_logits_of_experts_are_those_of_transformers_under_a_layout(
    case: str, layout: str, folder: Callable[[str], Path], world: Worlds
) -> None:
    ranks, settings = EXPERT_LAYOUTS[layout]
    found = [result for result in world(ranks).run(logits_here, folder(case), settings) if result is not None]
    assert found
    for logits in found:
        check_logits(logits, folder(case))


@pytest.mark.parametrize(
    "case", [*EXPERTS, "mistral window", "llama yarn", "qwen2 window", "gemma", "gemma2", "gemma3", "olmo2"]
)
def test_gradients_are_those_of_transformers(case: str, folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Theirs are saved in the place of the weights, so that they come under our names by the same rows."""
    model = published(case)
    loss_of(model(ids()).logits).backward()
    for param in model.parameters():
        param.data = torch.zeros_like(param) if param.grad is None else param.grad
    model.save_pretrained(tmp_path)
    theirs, stage = hf.open_hf_folder(tmp_path), serial(folder(case))
    named = {name: param for name, param in stage.named_parameters() if param.requires_grad}
    found = torch.autograd.grad(loss_of(stage(ids=ids())[..., :VOCABULARY].transpose(0, 1)), list(named.values()))
    for (name, param), gradient in zip(named.items(), found, strict=True):
        expected = theirs.read(f"model.{name}", whole_box(param_spec_of(param).shape))
        gap, size = float((gradient[: len(expected)] - expected).abs().max()), float(expected.abs().max())
        assert 0 < size and gap <= 1e-4 * size, f"the gradient of {name} differs by {gap:.3g} of {size:.3g}"


@pytest.mark.parametrize(
    "kind, first", [("Qwen2", 1), ("Qwen2", 3), ("Qwen3", 2), ("Qwen2Moe", 3), ("Qwen2Moe", 9), ("GptOss", None)]
)
def test_layers_with_a_window_are_those_of_transformers_where_a_config_does_not_name_them(
    kind: str, first: int | None
) -> None:
    sizes = {
        **SIZES,
        "num_hidden_layers": 5,
        **({"max_window_layers": first, "use_sliding_window": True} if first else {}),
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "sliding_window": 4}).to_dict()
    kinds = config.pop("layer_types")
    settings, problems = family_of_config({"model_type": config["model_type"]}, kind).settings_from_config(config)
    windows = [plan.window for plan in network_layer_plans(model_config_from_settings(settings))]
    assert problems == [] and windows == [(3, 0) if one == "sliding_attention" else None for one in kinds]
    assert set(kinds) == {"sliding_attention", "full_attention"}


def loss_of(logits: Tensor) -> Tensor:
    """Some loss of logits [b, s, v]."""
    return F.cross_entropy(logits.flatten(0, 1), ids().roll(-1, dims=1).flatten())


def serial(path: Path) -> GPTModel:
    """Our decoder with the folder's weights, in one process."""
    source = hf.open_hf_folder(path)
    config = tiny.config(**{**source.settings, "seq_length": LENGTH, "attention_dropout": 0.0, "hidden_dropout": 0.0})
    run = tiny.run_of(config)
    model = GPTModel(stage_specs_of_run(config)[0], run.layer_build_context).materialize(1).eval()
    fill(model, source, run.mesh)
    return model


@pytest.mark.parametrize("case", [name for name in EXPERTS if name != "gpt-oss"])
def test_experts_that_are_saved_as_one_tensor_are_read_as_the_same_network(
    case: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    published(case).save_pretrained(tmp_path, save_original_format=False)
    source, expected = hf.open_hf_folder(tmp_path), hf.open_hf_folder(folder(case))
    assert any(
        name.endswith(("experts.gate_up_proj", "experts.up_proj"))
        for name in read_safetensors_header(tmp_path / "model.safetensors")
    )
    assert source.formats == expected.formats
    for name, one in source.formats.items():
        assert torch.equal(source.read(name, whole_box(one.shape)), expected.read(name, whole_box(one.shape))), name


def saved_files(path: Path) -> dict[str, bytes]:
    """The content of a folder."""
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "logits.pt"}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_gives_the_files_of_transformers_byte_by_byte(
    case: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    hf_export.export_hf_folder(hf.open_hf_folder(folder(case)), tmp_path / "back", like=folder(case))
    assert saved_files(tmp_path / "back") == saved_files(folder(case))


@pytest.mark.parametrize("case", ["gpt2", "llama2", "qwen3"])
def test_files_are_cut_as_transformers_cuts_them(case: str, tmp_path: Path) -> None:
    published(case).save_pretrained(tmp_path / "many", max_shard_size="15KB")
    source = hf.open_hf_folder(tmp_path / "many")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    hf_export.export_hf_folder(source, tmp_path / "back", like=tmp_path / "many", shard_bytes=15_000)
    assert saved_files(tmp_path / "back") == saved_files(tmp_path / "many")


class Held:
    """A `Source` over the weights of a network in memory."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.where, self.values, self.settings = "memory", {}, settings
        self._tensors = {
            f"model.{param_spec_of(param).name}": param.detach()[: param_spec_of(param).shape[0]]
            for param in model.parameters()
        }
        self.formats = {
            name: hf.ShapeAndDtype(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()
        }

    def read(self, name: str, box: Any) -> Tensor:
        """A box of a weight."""
        return self._tensors[name][box.slices()]


T5_OURS = {
    "architecture": "t5",
    "decoder_num_layers": 2,
    "decoder_seq_length": SHORT,
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "softmax_scale": 1.0,
    "kv_channels": 6,
}
KIN = {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "position_embedding_type": "rope"}
SOME = {"num_experts": 4, "moe_ffn_hidden_size": 24}
BY_LATENTS = {
    **KIN,
    **SOME,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_shared_expert_intermediate_size": 24,
    "norm_epsilon": 1e-6,
    "untie_embeddings_and_output_weights": True,
    "moe_router_topk_scaling_factor": 2.5,
}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"openai_gelu": True}),
    "llama": (
        "llama",
        {
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
            "group_query_attention": True,
            "num_query_groups": 2,
            "use_rope_scaling": True,
            "rope_scaling_original_length": 8,
        },
    ),
    "qwen2": (
        "qwen2",
        {
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "position_embedding_type": "rope",
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "swiglu": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "qk_layernorm": True,
            "position_embedding_type": "rope",
            "kv_channels": 6,
        },
    ),
    "mistral": ("mistral", {**KIN, "window_size": "4,0"}),
    "qwen3 every third": (
        "qwen3",
        {**KIN, "qk_layernorm": True, "window_size": "(4,-1)", "window_attn_skip_freq": "3"},
    ),
    "mixtral": ("mixtral", {**KIN, **SOME, "moe_aux_loss_coeff": [0.01], "moe_token_dispatcher_type": "alltoall"}),
    "qwen2 moe": (
        "qwen2_moe",
        {
            **KIN,
            **SOME,
            "add_qkv_bias": True,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_gate": True,
            "moe_shared_expert_intermediate_size": 20,
            "moe_layer_freq": "[0]*1+[1]*3",
        },
    ),
    "qwen3 moe": ("qwen3_moe", {**KIN, **SOME, "qk_layernorm": True, "moe_layer_freq": "2"}),
    "deepseek v2": ("deepseek_v2", {**BY_LATENTS, "moe_router_pre_softmax": True, "rope_type": "rope"}),
    "deepseek v3": (
        "deepseek_v3",
        {
            **BY_LATENTS,
            "q_lora_rank": 12,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk": 4,
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "num_experts": 8,
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "mscale_all_dim": 0.5,
            "yarn_original_max_position_embeddings": 6,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **KIN,
            **SOME,
            "swiglu": False,
            "quick_geglu": True,
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
            "window_size": "4,0",
            "position_embedding_type": "yarn",
            "window_attn_skip_freq": "2",
            "rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 6,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    **hybrid_cases.ours({**KIN, "norm_epsilon": 1e-3}, SOME),
    "bert": (
        "bert",
        {"architecture": "bert", "norm_after_residual": True, "embedding_layernorm": True, "norm_epsilon": 1e-12},
    ),
    "bert without pairs": (
        "bert",
        {"architecture": "bert", "norm_after_residual": True, "embedding_layernorm": True, "bert_binary_head": False},
    ),
    "bert of megatron's": ("megatron_bert", {"architecture": "bert", "openai_gelu": True}),
    "t5": ("t5", {**T5_OURS, "relu": True, "scale_tied_logits": True}),
    "t5 v1.1": ("t5", {**T5_OURS, "geglu": True, "openai_gelu": True, "untie_embeddings_and_output_weights": True}),
}


@pytest.mark.parametrize("ours", OURS)
def test_a_network_of_ours_is_loaded_by_transformers_and_computes_the_same_there(ours: str, tmp_path: Path) -> None:
    family, settings = OURS[ours]
    config = tiny.config(**settings)
    (stage,) = stage_specs_of_run(config)
    model = (
        NETWORKS[config.model.architecture.name](stage, tiny.run_of(config).layer_build_context).materialize(5).eval()
    )
    source = Held(model, config_to_flat_dict(config.model))
    assert hf_export.export_hf_folder(source, tmp_path / "out").name == family
    (named,) = json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    theirs = getattr(transformers, named).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        words, *pairs = ask(model, ())
    expected = {
        "words": words[..., :VOCABULARY].transpose(0, 1),
        **({"pairs": pairs[0]} if pairs and pairs[0] is not None else {}),
    }
    check_same(said(theirs), expected)
