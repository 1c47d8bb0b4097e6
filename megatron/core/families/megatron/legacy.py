"""Megatron's old format, one file a rank, as one set of whole tensors.

    FOLDER/mp_rank_TT/model_optim_rng.pt            tensor rank TT; without a pipeline
    FOLDER/mp_rank_TT_PPP/model_optim_rng.pt        pipeline rank PPP

Each file holds the parameters of its ranks under `model` (`model0`, `model1`, ... with an interleaved pipeline), with layers
numbered from zero on every stage. The files are mapped, so that only what is asked for is read; what tensor ranks share
is joined when it is asked for, one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.source import Format
from megatron.core.dist_checkpointing.store import CheckpointError
from megatron.core.families.megatron.buffers import Unreadable
from megatron.core.families.megatron.experts import StackedExperts, with_stacked_experts
from megatron.core.families.megatron.hybrid import in_pairs
from megatron.core.families.megatron.names import Layout, flattened, is_over_vocabulary, merged, our_names
from megatron.core.families.megatron.pickles import attributes, read_torch_file
from megatron.core.families.megatron.progress import parameter_of, values_of
from megatron.core.families.megatron.rank_state import rank_state
from megatron.core.families.megatron.settings import completed, run_settings_of, settings_of
from megatron.core.parallel.boxes import Box

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
Held = Tensor | StackedExperts


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: its place, its content, and the state dicts of its pipeline chunks."""

    path: Path
    tensor: int
    pipeline: int
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[dict[str, Tensor]]:
        """The parameters of each chunk by their names."""
        names = sorted(
            (name for name in self.content if re.fullmatch(r"model\d*", name)), key=lambda name: int(name[5:] or 0)
        )
        return [flattened(self.content[name]) for name in names]


class LegacySource:
    """A folder of rank files. skipped: what of it is not read, in a sentence; empty when all is.

    run_settings: what the arguments say beside the network, for a run that goes on with it.
    """

    def __init__(
        self,
        where: str,
        shards: Mapping[str, list[Held]],
        layout: Layout,
        settings: Mapping[str, Any],
        values: Mapping[str, Any],
        skipped: str,
        run_settings: Mapping[str, Any],
    ) -> None:
        """shards: what each tensor rank holds, by names of a saved state (`model.<parameter>`, `optimizer.<slot>.<parameter>`)."""
        self.where, self.settings, self.values, self.skipped, self.run_settings = (
            where,
            settings,
            values,
            skipped,
            run_settings,
        )
        self._shards, self._layout = shards, layout
        self._last: tuple[str, Tensor] | None = None
        self.formats = {}
        for name, tensors in shards.items():
            whole = merged(parameter_of(name), [tensor.to("meta") for tensor in tensors], layout)
            self.formats[name] = Format((self._rows(name, whole), *whole.shape[1:]), whole.dtype)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a parameter. Not to be written to: it may be a view of the file."""
        if self._last is None or self._last[0] != name:
            whole = merged(parameter_of(name), [shard.to("cpu") for shard in self._shards[name]], self._layout)
            self._last = (name, whole[: self._rows(name, whole)])
        return self._last[1][box.slices()]

    def _rows(self, name: str, whole: Tensor) -> int:
        """Rows without the padding of the vocabulary."""
        size = self.settings.get("true_vocab_size")
        return size if size and is_over_vocabulary(parameter_of(name)) else whole.shape[0]


def open_legacy(folder: str | Path, given: Mapping[str, Any] | None = None) -> LegacySource:
    """The checkpoint in a folder of `mp_rank_...` folders.

    given: settings that win over those in the files, and `true_vocab_size`, without which the rows that pad the vocabulary
    count as ids. Raises `CheckpointError` for ranks that are missing, or do not fit together.
    """
    folder = Path(folder)
    files = _read_files(folder)
    first = files[0, 0].content
    version = float(first.get("checkpoint_version") or 0)
    parts, problems = _joined(files, {place: file.chunks for place, file in files.items()})
    if problems:
        raise CheckpointError(f"{folder}: its ranks do not fit together", problems)
    arguments = attributes(first.get("args"))
    settings = settings_of(arguments, given or {})
    word = next((tensors[0] for name, tensors in parts.items() if name == "embedding.word_embeddings.weight"), None)
    if word is None:
        raise CheckpointError(f"{folder} holds no word embedding; it has {', '.join(sorted(parts)[:5])}, ...")
    settings = completed(settings, {name: tensors[0].shape for name, tensors in parts.items()}, where=str(folder))
    if "output_layer.weight" in parts and not settings.setdefault("untie_embeddings_and_output_weights", True):
        del parts["output_layer.weight"]  # the last stage's copy of a tied matrix
    rows = sum(tensor.shape[0] for tensor in parts["embedding.word_embeddings.weight"])
    if (settings.get("true_vocab_size") or 0) > rows:
        raise CheckpointError(
            f"{folder} has {rows} rows of word embeddings, fewer than the tokenizer's "
            f"{settings['true_vocab_size']} ids; it is another tokenizer's"
        )
    if any(tensor.shape[0] != word.shape[0] for tensor in parts["embedding.word_embeddings.weight"]):
        raise CheckpointError(f"{folder}: the tensor ranks hold different numbers of rows of the word embedding")
    shards = {f"model.{name}": tensors for name, tensors in parts.items()}
    values = values_of(first)
    states, skipped = _optimizer(files, parts) if values else ({}, "")
    if states and "run.optimizer_steps" not in values:
        states, skipped = (
            {},
            "the optimizer's moments are left out: the checkpoint does not say how many steps they have seen",
        )
    return LegacySource(
        str(folder),
        shards | states,
        Layout.of(settings, version),
        settings,
        values,
        skipped,
        run_settings_of(arguments),
    )


def _optimizer(
    files: Mapping[tuple[int, int], RankFile], parts: Mapping[str, list[Held]]
) -> tuple[dict[str, list[Held]], str]:
    """Name in a saved state -> what each tensor rank holds of it, for all that the optimizer keeps; or why that is left out."""
    try:
        states = {
            place: rank_state(file.path, file.content, file.chunks, attributes(file.content.get("args")))
            for place, file in files.items()
        }
    except Unreadable as error:
        return {}, f"the optimizer's state is left out: {error}"
    found: dict[str, list[Held]] = {}
    for slot in dict.fromkeys(slot for state in states.values() for slot in state):
        tensors, problems = _joined(files, {place: state.get(slot, []) for place, state in states.items()})
        if problems or not parts.keys() >= tensors.keys() - {"output_layer.weight"}:
            return (
                {},
                f"the optimizer's state is left out: {(problems or ['it is of other parameters than the model'])[0]}",
            )
        found |= {f"optimizer.{slot}.{name}": shards for name, shards in tensors.items() if name in parts}
    return found, ""


def is_legacy(folder: str | Path) -> bool:
    """Whether a folder holds a checkpoint in this format."""
    return any(_FOLDER.fullmatch(path.name) for path in Path(folder).glob("mp_rank_*"))


def legacy_arguments(folder: str | Path) -> dict[str, Any]:
    """The arguments of the run that saved a folder, by one rank's file; empty when it has none."""
    file = next(
        (path / name for path in sorted(Path(folder).glob("mp_rank_*")) for name in _FILES if (path / name).is_file()),
        None,
    )
    content = {} if file is None else read_torch_file(file)
    return attributes(content.get("args")) if isinstance(content, dict) else {}


def _read_files(folder: Path) -> dict[tuple[int, int], RankFile]:
    """Every rank's file by (tensor rank, pipeline rank); all of them are there."""
    files: dict[tuple[int, int], RankFile] = {}
    problems = []
    for path in sorted(folder.glob("mp_rank_*")):
        place = _FOLDER.fullmatch(path.name)
        if not place:
            continue
        if place[3]:
            problems.append(f"{path.name}: expert ranks are not read; save the model as torch_dist, and read that")
            continue
        tensor, pipeline = int(place[1]), int(place[2] or 0)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            problems.append(f"{path.name} holds neither {' nor '.join(_FILES)}")
            continue
        content = read_torch_file(file)
        if not isinstance(content, dict) or not any(re.fullmatch(r"model\d*", str(name)) for name in content):
            problems.append(f"{file} holds no model")
        elif attributes(content.get("args")).get("expert_model_parallel_size", 1) not in (None, 1):
            problems.append(f"{file}: expert ranks are not read; save the model as torch_dist, and read that")
        else:
            files[tensor, pipeline] = RankFile(file, tensor, pipeline, content)
    if files and not problems:
        tensor, pipeline = (1 + max(place[axis] for place in files) for axis in (0, 1))
        problems += [
            f"the file of tensor rank {t}, pipeline rank {p} is missing"
            for p in range(pipeline)
            for t in range(tensor)
            if (t, p) not in files
        ]
        problems += _against_arguments(files[min(files)], tensor, pipeline)
    if problems or not files:
        raise CheckpointError(f"{folder} is no complete checkpoint of Megatron's", problems)
    return files


def _against_arguments(file: RankFile, tensor: int, pipeline: int) -> Iterator[str]:
    """Ranks at the end of an axis that are missing leave no hole; the arguments tell."""
    arguments = attributes(file.content.get("args"))
    sizes = {
        "tensor": (tensor, arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")),
        "pipeline": (pipeline, arguments.get("pipeline_model_parallel_size")),
    }
    for axis, (found, expected) in sizes.items():
        if expected and int(expected) != found:
            yield f"{file.path} is of a run with {axis} size {expected}, and there are files of {found} {axis} ranks"


def _joined(
    files: Mapping[tuple[int, int], RankFile], chunks: Mapping[tuple[int, int], list[dict[str, Tensor]]]
) -> tuple[dict[str, list[Held]], list[str]]:
    """Our name -> what each tensor rank holds, with layers numbered through; and what does not fit.

    chunks: tensors of each rank's pipeline chunks by their names: weights, or something of the optimizer for each.
    """
    arguments = attributes(files[min(files)].content.get("args"))
    experts = arguments.get("num_experts") or 1
    chunks = {place: [with_stacked_experts(chunk, experts) for chunk in parts] for place, parts in chunks.items()}
    tensor, pipeline = (1 + max(place[axis] for place in files) for axis in (0, 1))
    found: dict[str, list[Held]] = {}
    problems = []
    everything = [name for parts in chunks.values() for chunk in parts for name in chunk]
    renamed = our_names(everything)
    before: dict[str, int] = {}  # stack -> layers of the stages so far
    for chunk in range(max(len(parts) for parts in chunks.values())):
        for p in range(pipeline):
            here = [chunks[t, p][chunk] if chunk < len(chunks[t, p]) else {} for t in range(tensor)]
            for t, other in enumerate(here[1:], 1):
                problems += [
                    f"{name}: not on every tensor rank of pipeline rank {p} (look at {files[t, p].path})"
                    for name in sorted(here[0].keys() ^ other.keys())
                ]
            if problems:
                continue
            for name in here[0].keys() & renamed.keys():
                ours = _LAYER.sub(
                    lambda match: f".layers.{int(match[1]) + before.get(_stack(renamed[name]), 0)}.", renamed[name]
                )
                found.setdefault(ours, [part[name] for part in here])
            for stack in ("encoder", "decoder"):
                layers = {
                    int(match[1])
                    for name in here[0].keys() & renamed.keys()
                    if _stack(renamed[name]) == stack
                    for match in [_LAYER.search(renamed[name])]
                    if match
                }
                before[stack] = before.get(stack, 0) + len(layers)
    return in_pairs(found, arguments), problems


def _stack(name: str) -> str:
    return name.partition(".")[0]
