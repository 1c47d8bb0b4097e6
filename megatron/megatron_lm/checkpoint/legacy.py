"""Megatron's old format, one file a rank, as one set of whole tensors.

    FOLDER/mp_rank_TT/model_optim_rng.pt            tensor rank TT; without a pipeline
    FOLDER/mp_rank_TT_PPP/model_optim_rng.pt        pipeline rank PPP

Each file holds the parameters of its ranks under `model` (`model0`, `model1`, ... with an interleaved pipeline), with layers
numbered from zero on every stage. The files are mapped, so that only what is asked for is read; what tensor ranks share
is joined when it is asked for, one parameter at a time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import attributes_of_inert, read_torch_file
from megatron.core.models.parameter_names import WORD_EMBEDDING
from megatron.megatron_lm.checkpoint.buffers import UnreadableStateError
from megatron.megatron_lm.checkpoint.experts import LazyStackedExperts, with_stacked_experts
from megatron.megatron_lm.checkpoint.folders import RANK_FOLDER
from megatron.megatron_lm.checkpoint.hybrid import merge_layer_pairs
from megatron.megatron_lm.checkpoint.names import flatten_nested_state, map_names_to_ours
from megatron.megatron_lm.checkpoint.rank_state import read_rank_optimizer_state
from megatron.megatron_lm.checkpoint.source import MegatronSource, Shards, make_megatron_source, saved_training_counters

_FILES = ("model_optim_rng.pt", "model_rng.pt")
_EXPERT_RANKS = "expert ranks are not read; save the model as torch_dist, and read that"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
Held: TypeAlias = Tensor | LazyStackedExperts


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: its place, its content, and the state dicts of its pipeline chunks."""

    path: Path
    tensor: int
    pipeline: int
    content: Mapping[str, Any]

    @property
    def chunk_state_dicts(self) -> list[dict[str, Tensor]]:
        """The parameters (any shape) of each model chunk of the file, by name."""
        names = sorted(
            (name for name in self.content if re.fullmatch(r"model\d*", name)), key=lambda name: int(name[5:] or 0)
        )
        return [flatten_nested_state(self.content[name]) for name in names]


def open_legacy_checkpoint(folder: str | Path, given: Mapping[str, Any] | None = None) -> MegatronSource:
    """Open the checkpoint in a folder of `mp_rank_...` folders.

    given: settings that override those in the files, and `true_vocab_size`, without which rows of vocabulary padding
    count as ids. Raises `CheckpointError` for ranks that are missing, or do not fit together.
    """
    folder = Path(folder)
    files = _read_mp_rank_files(folder)
    first = files[0, 0].content
    parts, problems = _collect_tensor_rank_shards(
        files, {place: file.chunk_state_dicts for place, file in files.items()}
    )
    if problems:
        raise CheckpointError(f"{folder}: its ranks do not fit together", problems)
    if len({tensor.shape[0] for tensor in parts.get(WORD_EMBEDDING, ())}) > 1:
        raise CheckpointError(f"{folder}: the tensor ranks hold different numbers of rows of the word embedding")
    values = saved_training_counters(first)
    states, skipped = _read_optimizer_state(files, parts) if values else ({}, "")
    return make_megatron_source(
        folder,
        {**{f"model.{name}": [*shards] for name, shards in parts.items()}, **states},
        attributes_of_inert(first.get("args")),
        given=given or {},
        values=values,
        skipped=skipped,
        version=float(first.get("checkpoint_version") or 0),
    )


def _read_optimizer_state(
    files: Mapping[tuple[int, int], RankFile], parts: Mapping[str, list[Held]]
) -> tuple[Shards, str]:
    """Return the optimizer state as shards by name, and ""; or {} and why it is left out."""
    try:
        states = {
            place: read_rank_optimizer_state(
                file.path, file.content, file.chunk_state_dicts, attributes_of_inert(file.content.get("args"))
            )
            for place, file in files.items()
        }
    except UnreadableStateError as error:
        return {}, f"the optimizer's state is left out: {error}"
    optimizer_shards: Shards = {}
    for slot in dict.fromkeys(slot for state in states.values() for slot in state):
        tensors, problems = _collect_tensor_rank_shards(
            files, {place: state.get(slot, []) for place, state in states.items()}
        )
        if not parts.keys() >= tensors.keys() - {"output_layer.weight"}:
            problems = problems or ["it is of other parameters than the model"]
        if problems:
            return {}, f"the optimizer's state is left out: {problems[0]}"
        optimizer_shards |= {f"optimizer.{slot}.{name}": [*shards] for name, shards in tensors.items() if name in parts}
    return optimizer_shards, ""


def legacy_run_arguments(folder: str | Path) -> dict[str, Any]:
    """Return the arguments of the run that saved a folder, from one rank's file; {} if it has none."""
    file = next(
        (path / name for path in sorted(Path(folder).glob("mp_rank_*")) for name in _FILES if (path / name).is_file()),
        None,
    )
    content = {} if file is None else read_torch_file(file)
    return attributes_of_inert(content.get("args")) if isinstance(content, dict) else {}


def _read_mp_rank_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """Return every rank's file by (tensor rank, pipeline rank). `CheckpointError` if any is missing or damaged."""
    files: dict[tuple[int, int], RankFile] = {}
    problems = []
    for path in sorted(folder.glob("mp_rank_*")):
        place = RANK_FOLDER.fullmatch(path.name)
        if not place:
            continue
        file = _read_mp_rank_file(path, place)
        if isinstance(file, str):
            problems.append(file)
        else:
            files[file.tensor, file.pipeline] = file
    if files and not problems:
        tensor, pipeline = (1 + max(place[axis] for place in files) for axis in (0, 1))
        problems += [
            f"the file of tensor rank {t}, pipeline rank {p} is missing"
            for p in range(pipeline)
            for t in range(tensor)
            if (t, p) not in files
        ]
        problems += _rank_count_problems(files[min(files)], tensor, pipeline)
    if problems or not files:
        raise CheckpointError(f"{folder} is no complete checkpoint of Megatron's", problems)
    return files


def _read_mp_rank_file(path: Path, place: re.Match[str]) -> RankFile | str:
    """Return the file in one rank's folder, or what is wrong with it. place: the match of the folder's name."""
    if place[3]:
        return f"{path.name}: {_EXPERT_RANKS}"
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        return f"{path.name} holds neither {' nor '.join(_FILES)}"
    content = read_torch_file(file)
    if not isinstance(content, dict) or not any(re.fullmatch(r"model\d*", str(name)) for name in content):
        return f"{file} holds no model"
    if attributes_of_inert(content.get("args")).get("expert_model_parallel_size", 1) not in (None, 1):
        return f"{file}: {_EXPERT_RANKS}"
    return RankFile(file, int(place[1]), int(place[2] or 0), content)


def _rank_count_problems(file: RankFile, tensor: int, pipeline: int) -> Iterator[str]:
    """Yield sizes of the run (from its arguments) that differ from the numbers of tensor and pipeline ranks found."""
    arguments = attributes_of_inert(file.content.get("args"))
    sizes = {
        "tensor": (tensor, arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")),
        "pipeline": (pipeline, arguments.get("pipeline_model_parallel_size")),
    }
    for axis, (stored, expected) in sizes.items():
        if expected and int(expected) != stored:
            yield f"{file.path} is of a run with {axis} size {expected}, and there are files of {stored} {axis} ranks"


def _collect_tensor_rank_shards(
    files: Mapping[tuple[int, int], RankFile], chunks: Mapping[tuple[int, int], list[dict[str, Tensor]]]
) -> tuple[dict[str, list[Held]], list[str]]:
    """Return our name -> what each tensor rank holds, with layers numbered through the stages; and what does not fit.

    chunks: tensors of each rank's model chunks by their names: weights, or one slot of the optimizer state.
    """
    arguments = attributes_of_inert(files[min(files)].content.get("args"))
    stacked = _with_stacked_experts(chunks, arguments.get("num_experts") or 1)
    tensor, pipeline = (1 + max(place[axis] for place in files) for axis in (0, 1))
    joined: dict[str, list[Held]] = {}
    problems: list[str] = []
    renamed = map_names_to_ours([*chain.from_iterable(chain.from_iterable(stacked.values()))])
    before: Counter[str] = Counter()  # stack -> layers of the stages so far
    for chunk in range(max(len(parts) for parts in stacked.values())):
        for p in range(pipeline):
            here = [stacked[t, p][chunk] if chunk < len(stacked[t, p]) else {} for t in range(tensor)]
            for t, other in enumerate(here[1:], 1):
                where = f"not on every tensor rank of pipeline rank {p} (look at {files[t, p].path})"
                problems += [f"{name}: {where}" for name in sorted(here[0].keys() ^ other.keys())]
            names = () if problems else here[0].keys() & renamed.keys()
            for name in names:
                ours = _shift_layer_number(renamed[name], before[_stack_name_prefix(renamed[name])])
                joined.setdefault(ours, [part[name] for part in here])
            before += _count_layers_by_stack(map(renamed.__getitem__, names))
    return merge_layer_pairs(joined, arguments), problems


def _with_stacked_experts(
    chunks: Mapping[tuple[int, int], list[dict[str, Tensor]]], experts: int
) -> dict[tuple[int, int], list[dict[str, Held]]]:
    return {place: [with_stacked_experts(chunk, experts) for chunk in parts] for place, parts in chunks.items()}


def _stack_name_prefix(name: str) -> str:
    return name.partition(".")[0]


def _shift_layer_number(name: str, layers: int) -> str:
    """Return the name with its layer number increased by `layers`."""
    return _LAYER.sub(lambda match: f".layers.{int(match[1]) + layers}.", name)


def _count_layers_by_stack(names: Iterable[str]) -> Counter[str]:
    """Count the layers of encoder and decoder that these parameters belong to."""
    layers = {(_stack_name_prefix(name), match[1]) for name in names if (match := _LAYER.search(name))}
    return Counter(stack for stack, _ in layers if stack in ("encoder", "decoder"))
