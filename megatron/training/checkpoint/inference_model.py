"""A network of any checkpoint, to be asked and not trained: whole in one process, or under a layout.

    checkpoint of any format -> its network and tokenizer -> this rank's stages in evaluation mode

Nothing of the run that saved counts but its network, its tokenizer and the format of its weights. The layout is the
asker's own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from megatron.adapters.saved import is_adapter_checkpoint
from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict, raise_config_error_if
from megatron.core.config.plan.layers import StageSpec
from megatron.core.config.plan.network import model_config_from_settings
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.rules.engine import broken_rules
from megatron.core.config.settings.architecture import ARCHITECTURES
from megatron.core.config.settings.data import DataConfig, TokenizerConfig, resumed_null_vocab_size
from megatron.core.config.settings.kernels import KernelConfig
from megatron.core.config.settings.optim import PrecisionConfig
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig, TrainConfig
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.load import load_into_sharded_state
from megatron.core.dist_checkpointing.sharded_state import Tree, add_sharded_tensor, sharded_parameter
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.families.hf import hf_model_settings
from megatron.core.families.hf_folder import is_hf_checkpoint
from megatron.core.families.image_processor import image_settings_of_folder
from megatron.core.kernels.choice.startup_check import select_kernels_with_trials
from megatron.core.kernels.choice.table import KernelRequirements
from megatron.core.models.bert import BERTModel
from megatron.core.models.decoders import build_decoder
from megatron.core.models.gpt import GPTModel
from megatron.core.models.t5 import T5Model
from megatron.core.parallel import collectives
from megatron.core.parallel.device import disable_malloc_trim, pick_device, set_current_device
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RandomStreams
from megatron.core.parallel.spec import param_spec_of
from megatron.core.tokenizers.base import Tokenizer, tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import build_tokenizer, tokenizer_folder
from megatron.core.tokenizers.generation_config import GenerationDefaults, read_generation_defaults
from megatron.core.transformer.context.layer_build_context import LayerBuildContext
from megatron.training.checkpoint.formats import open_checkpoint
from megatron.training.launch.launch_info import read_launch_info, world_size
from megatron.training.launch.rendezvous import init_default_process_group

AnyStage = TypeVar("AnyStage", GPTModel, BERTModel, T5Model)
FORMATS = ("float32", "bfloat16", "float16", "float64")
_EMBEDDING = "model.embedding.word_embeddings.weight"
_SEED = 1234  # of initial values, which the checkpoint's replace


@dataclass(frozen=True, slots=True)
class ModelKind(Generic[AnyStage]):
    """A kind of network. parts: prefixes (`model.<name>`) to fill; others stay random. scores: a reward model."""

    architecture: str
    model: Callable[[StageSpec, LayerBuildContext], AnyStage]
    parts: tuple[str, ...] = ("model.",)
    scores: bool = False


GPT = ModelKind("gpt", build_decoder)
REWARD = ModelKind("gpt", build_decoder, scores=True)


@dataclass(frozen=True, slots=True)
class InferenceModel(Generic[AnyStage]):
    """A loaded network. stages: this rank's, in order, in evaluation mode and without gradients."""

    config: RunConfig
    mesh: Mesh
    stages: tuple[AnyStage, ...]
    tokenizer: Tokenizer
    source: CheckpointSource

    @property
    def data_settings(self) -> Mapping[str, Any]:
        """Settings of the run that made the network; of a Hugging Face folder with images, what its processor does.

        Raises `CheckpointError` for a processor that does what is not done here.
        """
        vision, where = self.config.model.vision, self.source.where
        published = self.config.model.has_vision and is_hf_checkpoint(where)
        return {**self.source.settings, **(image_settings_of_folder(where, vision) if published else {})}


def load_network(
    path: str,
    kind: ModelKind[AnyStage],
    *,
    step: int | None = None,
    parallel: ParallelConfig = ParallelConfig(),
    dtype: str = "auto",
    tokenizer: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
    alone: bool = False,
) -> InferenceModel[AnyStage]:
    """Load the network of any checkpoint for inference. Collective; with `alone` this process holds all of it.
    step: iteration, in a folder of several. dtype: one of `FORMATS`; auto: as saved. tokenizer: `TokenizerConfig`
    settings that override the checkpoint's; with a `tokenizer_type`, they are all. Raises `ConfigError` and
    `CheckpointError`, before any rank waits for another, for what does not fit together.
    """
    source = open_model_checkpoint(path, kind, step)
    settings = checkpoint_tokenizer_config(source, tokenizer or {})
    made = build_tokenizer(settings)
    made.end_ids = _generation_defaults(source, settings).end_ids
    _require_same_tokenizer_hash(source, made)
    if not (source.settings.get("tokenizer_type") or is_hf_checkpoint(source.where)):
        # Megatron's own files count the rows that pad the vocabulary, unless they are told.
        source = open_checkpoint(path, step, {"true_vocab_size": made.vocab_size})
    config = _inference_run_config(source, settings, parallel, dtype, 1 if alone else world_size())
    rows = config.model.true_vocab_size
    # Special tokens that the network has never seen are common, and no text holds one.
    if made.vocab_size - sum(number >= rows for number in made.special.values()) > rows:
        raise ConfigError(
            f"the tokenizer has {made.vocab_size} ids, and the embedding of {source.where} {rows} rows; give the tokenizer "
            "that belongs to this network"
        )
    device = device or pick_device()
    mesh = Mesh.single_process(device) if alone else _join_mesh(config, device)
    return InferenceModel(config, mesh, _build_and_load_stages(source, kind, config, mesh), made, source)


def open_model_checkpoint(path: str, kind: ModelKind[AnyStage], step: int | None = None) -> CheckpointSource:
    """Open a checkpoint; `CheckpointError` if it is adapters only, or of another architecture or head than `kind`."""
    source = open_checkpoint(path, step)
    if is_adapter_checkpoint(source):
        raise CheckpointError(
            f"{source.where} holds adapters without their network; merge them into it with megatron checkpoint adapter merge, or serve "
            "the network with --lora-modules"
        )
    architecture = infer_checkpoint_architecture(source)
    if architecture != kind.architecture:
        raise CheckpointError(
            f"{source.where} holds {ARCHITECTURES[architecture].title}; what is asked for is {ARCHITECTURES[kind.architecture].title}"
        )
    if model_config_from_settings(source.settings).reward_head != kind.scores:
        holds, way = (
            ("a language model, which gives no scores", "train one with finetune.py --finetune-task reward")
            if kind.scores
            else ("a reward model, which scores texts and writes none", "megatron score-with-reward-model asks it")
        )
        raise CheckpointError(f"{source.where} holds {holds}; {way}")
    return source


def infer_checkpoint_architecture(source: CheckpointSource) -> str:
    """Return gpt, bert, t5 or vit, by the names of a checkpoint's parameters."""
    encoder, decoder, vision = (
        any(name.startswith(f"model.{part}.") for name in source.formats)
        for part in ("encoder", "decoder", "vision_model")
    )
    if vision and not decoder:
        return "vit"
    return "t5" if encoder and decoder else "bert" if encoder else "gpt"


def checkpoint_tokenizer_config(source: CheckpointSource, given: Mapping[str, Any]) -> TokenizerConfig:
    """Return the tokenizer config of a checkpoint (a Hugging Face folder's own), overridden by the settings given."""
    available = hf_model_settings(source.where) if is_hf_checkpoint(source.where) else source.settings
    names = [] if "tokenizer_type" in given else [field.name for field in dataclasses.fields(TokenizerConfig)]
    saved = {name: available[name] for name in names if name in available}
    settings = config_from_flat_dict(TokenizerConfig, {**saved, **given})
    if settings.tokenizer_type != "NullTokenizer":
        return settings
    size = resumed_null_vocab_size(settings.vocab_size, source.settings)
    return dataclasses.replace(settings, vocab_size=size)


def read_request_defaults(
    path: str, choice: str, *, step: int | None = None, tokenizer: Mapping[str, Any] | None = None
) -> GenerationDefaults:
    """Return how texts are generated unless a request says otherwise, by --generation-config `choice`. tokenizer: as for
    `load_network`. `ConfigError` if the file asks for something that has no counterpart here.
    """
    source = open_checkpoint(path, step)
    defaults = _generation_defaults(source, checkpoint_tokenizer_config(source, tokenizer or {}))
    return defaults.for_requests(choice, source.where)


def _generation_defaults(source: CheckpointSource, tokenizer: TokenizerConfig) -> GenerationDefaults:
    """Return what a checkpoint's folder says of generated texts; of a run, the folder of its tokenizer."""
    folder = source.where if is_hf_checkpoint(source.where) else tokenizer_folder(tokenizer)
    return GenerationDefaults() if folder is None else read_generation_defaults(folder)


def _require_same_tokenizer_hash(source: CheckpointSource, tokenizer: Tokenizer) -> None:
    """Raise `CheckpointError` if the checkpoint records another tokenizer's hash."""
    saved, mine = source.values.get("run.tokenizer"), tokenizer_fingerprint_fields(tokenizer)
    if isinstance(saved, Mapping) and saved.get("hash") != mine["hash"]:
        raise CheckpointError(
            f"{source.where} was trained with another tokenizer, whose ids mean other words: {saved.get('kind')} of "
            f"{saved.get('vocab_size')} ids there, {mine['kind']} of {mine['vocab_size']} ids here; give that of the run"
        )


def _inference_run_config(
    source: CheckpointSource, tokenizer: TokenizerConfig, parallel: ParallelConfig, dtype: str, size: int
) -> RunConfig:
    """Return the run config of a checkpoint's network under this layout; `ConfigError` with every rule that it breaks."""
    if dtype == "auto":
        dtype = str(source.formats[_EMBEDDING].dtype).removeprefix("torch.")
    if dtype not in FORMATS:
        raise ConfigError(f"dtype {dtype} is none of auto, {', '.join(FORMATS)}")
    # How vocabulary and attention were laid out for another machine is not part of the network.
    saved = model_config_from_settings(source.settings)
    model = dataclasses.replace(saved, padded_vocab_size=None, attention_backend="auto", kernels=KernelConfig())
    precision = PrecisionConfig(fp16=dtype == "float16", bf16=dtype == "bfloat16", fp64=dtype == "float64")
    train = TrainConfig(seq_length=model.max_position_embeddings, micro_batch_size=1, train_iters=1, skip_train=True)
    data = DataConfig(mock_data=True)
    requested = RunConfig(model, parallel=parallel, precision=precision, train=train, data=data, tokenizer=tokenizer)
    config = requested.resolve(size)
    raise_config_error_if(message for _, message in broken_rules(config, size))
    model = config.model.with_vocabulary(source.settings["true_vocab_size"], parallel.tp)
    return dataclasses.replace(config, model=model)


def _join_mesh(config: RunConfig, device: torch.device) -> Mesh:
    """Join the launcher's ranks and return their mesh; without a launcher, a mesh of this process alone."""
    set_current_device(device)
    disable_malloc_trim(device)
    if world_size() == 1:
        return Mesh.single_process(device)
    if not dist.is_initialized():
        init_default_process_group(config.parallel, read_launch_info(), device)
    return Mesh.build(config.parallel, device)


def _build_and_load_stages(
    source: CheckpointSource, kind: ModelKind[AnyStage], config: RunConfig, mesh: Mesh
) -> tuple[AnyStage, ...]:
    """Build this rank's stages and fill them from the checkpoint."""
    dtype = getattr(torch, config.precision.param_dtype_name)
    need = KernelRequirements(device=mesh.device.type, dtype=dtype, padding=config.model.architecture.pads)
    chosen = select_kernels_with_trials(
        config,
        need,
        mesh.device,
        wishes={"adamw": ""},
        gather=lambda rows: collectives.gather_objects(rows, mesh.world),
    )
    if mesh.world.is_first:
        for line in chosen.failures:
            logging.getLogger("megatron").warning(line)
    build = LayerBuildContext(
        model=config.model, mesh=mesh, kernels=chosen.kernels, dtype=dtype, streams=RandomStreams.build(mesh, _SEED)
    )
    specs = (spec for spec in stage_specs_of_run(config) if spec.rank == mesh.pp.rank)
    stages = tuple(kind.model(spec, build).materialize(_SEED).eval() for spec in specs)
    state: Tree = {}
    for stage in stages:
        for param in stage.parameters():
            name = f"model.{param_spec_of(param).name}"
            if name.startswith(kind.parts):
                add_sharded_tensor(state, name, sharded_parameter(param, mesh))
    load_into_sharded_state(state, source, mesh.world, complete=kind.parts)
    for stage in stages:
        stage.requires_grad_(False)
    if mesh.device.type == "cpu" and dtype in (torch.float32, torch.float64):
        _make_weights_column_major([param for stage in stages for param in stage.parameters() if param.dim() == 2])
    return stages


def _make_weights_column_major(matrices: Iterable[nn.Parameter]) -> None:
    """Store matrices column-major, in place: products with a few rows, as in decoding, are up to twice as fast on CPUs."""
    for matrix in matrices:
        matrix.data = matrix.data.t().contiguous().t()
