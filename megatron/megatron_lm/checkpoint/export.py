"""Write weights for Megatron's own programmes, in either of its formats.

    write_torch_dist_checkpoint    `torch_dist`: whole tensors, which any layout reads; Megatron's default
    write_legacy_checkpoint        `torch`: `mp_rank_XX[_YYY]/model_optim_rng.pt`, of checkpoint_version 3, for one layout

Names of norms depend on the layers that read them: `fused_norms` for Transformer Engine's (Megatron's default), which keep a norm
with the product behind it, and not for `--transformer-impl local`.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron.core.config.flags.declare import config_from_flat_dict
from megatron.core.config.mixers.table import recurrent_mixers
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.source import CheckpointSource
from megatron.core.parallel.boxes import whole_box
from megatron.megatron_lm.checkpoint.experts import with_unstacked_experts
from megatron.megatron_lm.checkpoint.export_arguments import (
    additional_megatron_flags,
    megatron_arguments_of,
    padded_vocab_rows,
    settings_unknown_to_megatron,
)
from megatron.megatron_lm.checkpoint.hybrid import mixer_piece_names
from megatron.megatron_lm.checkpoint.names import (
    MegatronRowLayout,
    has_vocabulary_rows,
    sharding_problem,
    split_into_tensor_shards,
)

_WORDS = "embedding.word_embeddings.weight"
# Norms that Transformer Engine keeps with the product behind them, where a layer has that.
_FUSED = (
    (".input_layernorm.", ".self_attention.linear_qkv."),
    (".input_layernorm.", ".mixer.in_proj."),
    (".input_layernorm.", ".self_attention.in_proj."),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1."),
    (".self_attention.q_layernorm.", ".self_attention.linear_q_up_proj."),
    (".self_attention.kv_layernorm.", ".self_attention.linear_kv_up_proj."),
)
_LAYER = re.compile(r"^((?:encoder|decoder)\.layers)\.(\d+)\.")
_STATEFUL = re.compile(
    r"\.(linear_\w+|eh_proj|in_proj|out_proj)\.weight$|^output_layer\.weight$"
)  # modules that expect `_extra_state` beside
_EXPERTS = re.compile(r"\.mlp\.experts\.(linear_fc\d\.)")
_TRACKER = "latest_checkpointed_iteration.txt"
# How a distributed checkpoint is read: layers carry their number in the name.
_CONTENT = {"singleton_local_shards": False, "non_homogeneous_layers": True, "chained_optim_avoid_prefix": True}
# What metadata.json says.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _MegatronExport:
    """What exports to both formats share: checks, parameters, common entries. Raises `CheckpointError` if Megatron has
    no such network, or cannot read it so. problems: returns what the format cannot express, a text each.
    """

    def __init__(
        self,
        source: CheckpointSource,
        folder: str | Path,
        iteration: int,
        tensor_size: int,
        fused_norms: bool,
        problems: Callable[[_MegatronExport], list[str]],
    ) -> None:
        self.source, self.tensor_size, self.fused, self.iteration = source, tensor_size, fused_norms, iteration
        self.layout = MegatronRowLayout.from_settings(source.settings, 3.0)
        self.model = config_from_flat_dict(RequestedModel, source.settings).resolve()
        self.names = [name.removeprefix("model.") for name in source.formats if name.startswith("model.")]
        self.layers = 1 + max(int(match[2]) for name in self.names for match in [_LAYER.search(name)] if match)
        self.target = Path(folder) / f"iter_{iteration:07d}"
        match = _megatron_export_problems(self.model, self.names) + problems(self)
        if not fused_norms and (self.model.is_hybrid or recurrent_mixers(self.model)):
            match.append(
                "Megatron builds layers of hybrids with Transformer Engine only; leave out --saver-transformer-impl local"
            )
        if self.target.exists():
            match.append(f"{self.target} is there already; move it away, or choose another folder")
        if match:
            raise CheckpointError(f"{source.where} cannot be written for Megatron", match)
        self.made = self.target.with_suffix(".tmp")
        shutil.rmtree(self.made, ignore_errors=True)
        self.made.mkdir(parents=True)

    def single_rank_tensor(self, name: str) -> Tensor:
        """Return a parameter as a single tensor rank of Megatron holds it, with padded vocabulary."""
        return self.tensor_rank_shards(name, 1)[0]

    def tensor_rank_shards(self, name: str, ranks: int) -> list[Tensor]:
        """Return each tensor rank's shard of a parameter, in Megatron's order of rows, newly allocated."""
        tensor = self.source.read(f"model.{name}", whole_box(self.source.formats[f"model.{name}"].shape))
        if has_vocabulary_rows(name):  # as Megatron's converters do, rows of padding are the last one again
            rows = padded_vocab_rows(tensor.shape[0], self.source.settings, self.tensor_size) - tensor.shape[0]
            tensor = torch.cat([tensor, tensor[-1:].expand(rows, *tensor.shape[1:])])
        if offset := self.layout.norm_weight_offset(name):
            tensor = tensor - offset
        return [
            shard.clone()
            for shard in split_into_tensor_shards(name, tensor, ranks, self.layout, whole_latents=self.fused)
        ]

    def mixer_piece(self, name: str, place: int) -> Tensor:
        """Return one piece [rows, ...] of a fused parameter, as torch_dist checkpoints store them."""
        return self.single_rank_tensor(name).split(self.layout.mixer_piece_rows(name))[place].clone()

    def common_entries(self, pipeline_size: int, ckpt_format: str) -> dict[str, Any]:
        """Return the entries of a checkpoint that are no tensors: arguments, version, iteration."""
        rows = self.source.formats[f"model.{_WORDS}"].shape[0]
        args = megatron_arguments_of(
            self.model,
            self.source.settings,
            {
                "padded_vocab_size": padded_vocab_rows(rows, self.source.settings, self.tensor_size),
                "iteration": self.iteration,
                "tensor_model_parallel_size": self.tensor_size,
                "pipeline_model_parallel_size": pipeline_size,
                "ckpt_format": ckpt_format,
                "transformer_impl": "transformer_engine" if self.fused else "local",
                "moe_grouped_gemm": None if ckpt_format == "torch_dist" else False,
                **(
                    {"hybrid_layer_pattern": _pattern_of_stages(self.model, pipeline_size)}
                    if self.model.is_hybrid
                    else {}
                ),
            },
        )  # whole tensors serve both
        return {"args": args, "checkpoint_version": 3.0, "iteration": self.iteration}

    @contextmanager
    def removed_if_unfinished(self) -> Iterator[None]:
        """Within: files are written, which are removed if that fails. `CheckpointError` on a full disk, told by torch in its own words."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self.made, ignore_errors=True)
            with suppress(OSError):  # there is another checkpoint in it
                self.made.parent.rmdir()
            if isinstance(error, (OSError, RuntimeError, checkpoint.CheckpointException)):
                reason = " ".join(str(error).split())[:300]
                raise CheckpointError(f"{self.target} cannot be written: {reason}") from None
            raise

    def publish_folder(self) -> Path:
        """Give the folder its final name and make it the newest in the tracker file. Returns it."""
        os.rename(self.made, self.target)
        tracker = self.target.parent / _TRACKER
        tracker.with_suffix(".tmp").write_text(str(self.iteration), encoding="ascii")
        tracker.with_suffix(".tmp").replace(tracker)
        return self.target


def write_torch_dist_checkpoint(
    source: CheckpointSource, folder: str | Path, *, iteration: int = 0, tensor_size: int = 1, fused_norms: bool = True
) -> Path:
    """Write the weights of a GPT in the torch_dist format, for any layout. Returns the folder of the iteration.

    tensor_size: ranks that shall divide the padded vocabulary. Memory holds one tensor. Raises `CheckpointError` if
    Megatron has no such network, or the folder has that iteration already.
    """
    export = _MegatronExport(
        source,
        folder,
        iteration,
        tensor_size,
        fused_norms,
        lambda export: (
            []
            if export.model.architecture.is_decoder_only
            else ["a BERT is written in the format torch, and not in torch_dist"]
        ),
    )
    names = {_torch_dist_name(name, export): name for name in export.names}
    states = [
        key
        for theirs, name in names.items()
        if _STATEFUL.search(name) and name != "output_layer.weight"
        for key in _extra_state_keys_to_write(theirs, export)
    ]
    values: dict[str, Callable[[], Tensor]] = {}
    formats: dict[str, Tensor] = {}
    for theirs, name in names.items():
        whole, pieces = _meta_tensor_for_export(name, export), mixer_piece_names(name)
        values |= {f"{theirs}.{piece}": partial(export.mixer_piece, name, place) for place, piece in enumerate(pieces)}
        formats |= {
            f"{theirs}.{piece}": part
            for piece, part in zip(pieces, whole.split(export.layout.mixer_piece_rows(name)) if pieces else ())
        }
        if not pieces:
            values[theirs], formats[theirs] = partial(export.single_rank_tensor, name), whole
    with export.removed_if_unfinished():
        _write_torch_dist_tensors(
            export.made,
            values,
            formats,
            states,
            {**export.common_entries(1, "torch_dist"), "content_metadata": _CONTENT},
        )
    return export.publish_folder()


class _LazySavePlanner(DefaultSavePlanner):
    """Save planner that plans with meta tensors, and computes each tensor when it is written."""

    def __init__(self, values: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See `SavePlanner`."""
        if write_item.type != WriteItemType.BYTE_IO:
            return self._values[write_item.index.fqn]()
        empty = io.BytesIO()
        torch.save([None], empty)
        return empty


def _write_torch_dist_tensors(
    folder: Path,
    values: Mapping[str, Callable[[], Tensor]],
    formats: Mapping[str, Tensor],
    states: Sequence[str],
    common: Mapping[str, Any],
) -> None:
    """Write tensors of any shape into an existing folder, under the names of the torch_dist format.

    values: functions that make each tensor; formats: the same tensors on the meta device; states: keys of objects that
    are all None (stored as a list with one element); common: values that are no tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        checkpoint.save(
            {**formats, **dict.fromkeys(states)},
            planner=_LazySavePlanner(values),
            no_dist=True,
            storage_writer=checkpoint.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1),
        )
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_FORMAT), encoding="ascii")


def _meta_tensor_for_export(name: str, export: _MegatronExport) -> Tensor:
    """Return an empty meta tensor of the shape and dtype in which a parameter is written."""
    one = export.source.formats[f"model.{name}"]
    rows = (
        padded_vocab_rows(one.shape[0], export.source.settings, export.tensor_size)
        if has_vocabulary_rows(name)
        else one.shape[0]
    )
    return torch.empty((rows, *one.shape[1:]), dtype=one.dtype, device="meta")


def _torch_dist_name(name: str, export: _MegatronExport) -> str:
    """Return the name of a parameter in a torch_dist checkpoint."""
    if export.fused:
        name = _transformer_engine_name(name, export.names)
    elif (
        not export.model.mla.multi_latent_attention
    ):  # local layers are stored under Transformer Engine's names, even before experts
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
            ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
        )
    name = _hybrid_norm_name(name, export)
    name = _EXPERTS.sub(r".mlp.experts.experts.\1", name)
    return name if export.model.is_hybrid else name.replace(".mtp_model_layer.", ".transformer_layer.")


def _hybrid_norm_name(name: str, export: _MegatronExport) -> str:
    """Return the name of a parameter; in a hybrid decoder.final_layernorm becomes decoder.final_norm."""
    return name.replace("decoder.final_layernorm.", "decoder.final_norm.") if export.model.is_hybrid else name


def _extra_state_keys_to_write(theirs: str, export: _MegatronExport) -> list[str]:
    """Return the keys of the (empty) _extra_state of a module. theirs: name of one of its parameters."""
    module, experts = theirs.rpartition(".")[0], export.model.moe.num_experts or 0
    shards = [f"{rank}_{experts}" for rank in range(experts)] if ".experts.experts." in theirs else ["0_1"]
    return [f"{module}._extra_state/shard_{shard}" for shard in shards]


def write_legacy_checkpoint(
    source: CheckpointSource,
    folder: str | Path,
    *,
    iteration: int = 0,
    tensor_size: int = 1,
    pipeline_size: int = 1,
    fused_norms: bool = True,
) -> Path:
    """Write the weights of a GPT or BERT in the format torch, for so many tensor and pipeline ranks. Returns the folder
    of the iteration.

    Experts are written one by one, as without `--moe-grouped-gemm`. Raises `CheckpointError` if Megatron has no such
    network, the ranks cannot divide it, or the folder has that iteration already.
    """
    export = _MegatronExport(
        source, folder, iteration, tensor_size, fused_norms, partial(_division_problems, ranks=pipeline_size)
    )
    ends = list(accumulate(_stage_sizes(export.model, export.layers, pipeline_size)))
    with export.removed_if_unfinished():
        for p, end in enumerate(ends):
            first = ends[p - 1] if p else 0
            held = {
                name: export.tensor_rank_shards(name, tensor_size)
                for name in export.names
                if _is_on_stage(name, first, end, export.layers, ahead=bool(export.model.mtp.mtp_num_layers))
            }
            if p and end == export.layers and export.model.ties_embeddings:
                held["output_layer.weight"] = export.tensor_rank_shards(_WORDS, tensor_size)
            for t in range(tensor_size):
                place = export.made / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline_size > 1 else ""))
                place.mkdir()
                model = _rank_model_state(
                    export, {name: shards[t] for name, shards in with_unstacked_experts(held).items()}, first
                )
                if end == export.layers and export.model.architecture.is_decoder_only:
                    model["output_layer._extra_state"] = None  # of a tied one too
                torch.save(
                    {**export.common_entries(pipeline_size, "torch"), "model": model}, place / "model_optim_rng.pt"
                )
    return export.publish_folder()


def _rank_model_state(export: _MegatronExport, held: Mapping[str, Tensor], first: int) -> dict[str, Tensor | None]:
    """What a rank holds by the names there, and the (empty) states of its modules' kernels. first: number of the first layer of its stage."""
    model: dict[str, Tensor | None] = {
        _stage_local_name(
            _hybrid_norm_name(_transformer_engine_name(name, export.names) if export.fused else name, export), first
        ): shard
        for name, shard in held.items()
    }
    return model | {f"{name.rpartition('.')[0]}._extra_state": None for name in model if _STATEFUL.search(name)}


def _division_problems(export: _MegatronExport, *, ranks: int) -> list[str]:
    """Why so many pipeline ranks and the tensor ranks cannot share a network, a line each."""
    problems = [
        f"{name}: {reason} cannot be divided over {export.tensor_size} tensor ranks"
        for name in export.names
        if (reason := sharding_problem(name, export.tensor_size, export.layout))
    ]
    if export.model.mtp.mtp_num_layers and not export.model.is_hybrid:
        problems.append(
            "layers of multi-token prediction have other names in each release's files of ranks; write torch_dist"
        )
    if sum(_stage_sizes(export.model, export.layers, ranks)) != export.layers:
        more = "; give the pattern as many stages by |" if export.model.is_hybrid else ""
        problems.append(f"{export.layers} layers cannot be divided over {ranks} pipeline ranks{more}")
    return problems


def extra_flags_for_megatron(source: CheckpointSource, pipeline_size: int = 1) -> str:
    """Return the flags that Megatron needs beside `--use-checkpoint-args`, as one text; empty if none."""
    model = config_from_flat_dict(RequestedModel, source.settings).resolve()
    if model.is_hybrid:
        hybrid = replace(model.hybrid, hybrid_layer_pattern=_pattern_of_stages(model, pipeline_size))
        model = replace(model, hybrid=hybrid)
    return additional_megatron_flags(model)


def _megatron_export_problems(model: ModelConfig, names: list[str]) -> list[str]:
    """Return why Megatron could not build the network, a line each."""
    if len({name.partition(".")[0] for name in names} & {"encoder", "decoder"}) > 1:
        return ["a T5 is read from Megatron's files, and not written"]
    return settings_unknown_to_megatron(model)


def _stage_sizes(model: ModelConfig, layers: int, ranks: int) -> tuple[int, ...]:
    """Layers of each pipeline rank: those between the | of a hybrid's pattern, if they make so many stages, else as many on each."""
    stages = model.hybrid.stage_symbols
    return tuple(map(len, stages)) if model.is_hybrid and len(stages) == ranks else (layers // ranks,) * ranks


def _pattern_of_stages(model: ModelConfig, ranks: int) -> str:
    """The pattern of a hybrid with the | of so many pipeline ranks: Megatron divides one without them evenly, and refuses other numbers of stages."""
    stages = model.hybrid.stage_symbols
    return "/".join(
        ("|".join(stages) if len(stages) == ranks else model.hybrid.layer_symbols, *model.hybrid.mtp_patterns)
    )


def _is_on_stage(name: str, first: int, end: int, layers: int, *, ahead: bool) -> bool:
    """Whether the stage of the layers `first` to `end` holds a parameter. ahead: the last one predicts further tokens, and embeds them itself."""
    if match := _LAYER.search(name):
        return first <= int(match[2]) < end
    is_last = end == layers
    return (not first or ahead and is_last) if name.startswith("embedding.") else is_last


def _transformer_engine_name(name: str, names: Collection[str]) -> str:
    """Return a parameter's name with Transformer Engine's layers: some norms belong to the linear layer behind them."""
    for norm, product in _FUSED:
        if norm in name and name.replace(norm, product).rpartition(".")[0] + ".weight" in names:
            return name.replace(norm, f"{product}layer_norm_")
    return name


def _stage_local_name(name: str, first: int) -> str:
    """Return the name with layers counted from the first of the pipeline stage."""
    return _LAYER.sub(lambda match: f"{match[1]}.{int(match[2]) - first}.", name)
