"""Energon's folders (WebDataset tars with a `.nv-meta`) and the YAML files that blend them, as prefixes of data settings.

    FOLDER/pretrain-0.tar ...        --data-path FOLDER  or  blend.yaml:  train  FOLDER:train   weight 0.7
    FOLDER/.nv-meta/.info.json       samples of each tar                         OTHER:train    weight 0.3
                    split.yaml       tars of each part                    valid  FOLDER:val
                    dataset.yaml     kind of sample, and its fields

Nothing of a tar is read here. A prefix names a part of a folder, and some of its samples where not all are meant: FOLDER:train[0:500].
Weights are shares of samples; `blend_epochized` with its repetitions is each part so many times. `join` gives samples the fields of those
with the same key in other folders, which a prefix names behind its own: FOLDER:train|error:OTHER:train|=VQASample. Code (sample loaders,
joiners of one's own) is not run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import isfinite, prod
from types import MappingProxyType
from typing import Any

import yaml

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.datasets.storage import DataError

META = ".nv-meta"
_PARTS = {"train": "train", "valid": "val", "test": "test"}  # our splits -> Energon's parts
_PREFIX = re.compile(r"(?P<folder>.+):(?P<part>[^:/\[\]]+)(?:\[(?P<start>\d+):(?P<stop>\d+)\])?")
_HARMLESS = MappingProxyType(
    {
        "subflavor": "a label for code of a task",
        "subflavors": "labels for code of a task",
        "shuffle_over_epochs_multiplier": "how Energon shuffles; here the seed orders samples",
    }
)
_USUAL_FILES = MappingProxyType({"dataset_config": "dataset.yaml", "split_config": "split.yaml"})
_NODE = ("path", "split_part", "subset")  # what a data set in a YAML file is described by
_NONMATCH = ("error", "skip", "none")  # what becomes of a sample that another folder of a join lacks
_DEEPEST = 16  # YAML files that name each other
_MOST_NAMES = 10**6  # that the patterns of split.yaml stand for
_MOST_DIGITS = 20  # of a number in such a pattern
_MOST_PARTS = 10**5  # of a blend, repetitions counted
_MOST_VALUES = 10**6  # of a YAML file, those of an alias counted wherever it stands


@dataclass(frozen=True, slots=True)
class EnergonSplitPart:
    """Samples [start, stop) of a part of a folder; stop None: to the end.

    joined: (nonmatch, prefix) of the parts that give them more fields. kind: the kind of sample that results.
    """

    folder: str
    part: str
    start: int = 0
    stop: int | None = None
    joined: tuple[tuple[str, str], ...] = ()
    kind: str = ""

    @property
    def as_data_path(self) -> str:
        """The text that names the part among a blend's prefixes: FOLDER:train[0:500]|error:OTHER:train|=VQASample."""
        own = f"{self.folder}:{self.part}" + ("" if self.stop is None else f"[{self.start}:{self.stop}]")
        return "|".join([own, *map(":".join, self.joined), *([f"={self.kind}"] if self.joined else [])])

    @staticmethod
    def parse_data_path(prefix: str) -> EnergonSplitPart | None:
        """Parse the text form of a part; None if it does not name a part of an Energon folder."""
        own, *others = prefix.split("|")
        match = _PREFIX.fullmatch(own)
        if match is None or not os.path.isdir(os.path.join(match["folder"], META)):
            return None
        stop = match["stop"]
        last = None if stop is None else int(stop)
        joined = tuple((nonmatch, other) for nonmatch, _, other in (each.partition(":") for each in others[:-1]))
        kind = others[-1].removeprefix("=") if others else ""
        return EnergonSplitPart(match["folder"], match["part"], int(match["start"] or 0), last, joined, kind)

    @property
    def shard_sample_counts(self) -> list[tuple[str, int]]:
        """Name and number of samples of each tar of the part, in order."""
        split, info = _read_energon_meta_file(self.folder, "split"), _read_energon_meta_file(self.folder, ".info")
        refuse_unread_keys(split, f"{self.folder}/{META}/split.yaml", "split_parts", "exclude")
        counts = info.get("shard_counts")
        parts = split.get("split_parts")
        if not isinstance(parts, Mapping) or self.part not in parts:
            known = ", ".join(parts) if isinstance(parts, Mapping) else "none"
            raise DataError(f"{self.folder}/{META}/split.yaml has no part {self.part!r}; it has {known}")
        if not isinstance(counts, Mapping):
            raise DataError(f"{self.folder}/{META}/.info.json has no shard_counts; run `energon prepare` again")
        excluded = set(_expand_braces(split.get("exclude") or ()))
        names = [name for name in _expand_braces(parts[self.part] or ()) if name not in excluded]
        for name in names:
            if os.path.isabs(name) or ".." in name.split("/"):
                raise DataError(f"{self.folder}/{META}/split.yaml names {name!r}, which is outside the folder")
            if not _is_count(counts.get(name)):
                raise DataError(f"{self.folder}/{META}/.info.json has no count of {name}; run `energon prepare` again")
        return [(name, counts[name]) for name in names]

    @property
    def excluded_samples(self) -> frozenset[str]:
        """Samples that are left out, as SHARD/KEY."""
        return frozenset(
            name
            for name in _expand_braces(_read_energon_meta_file(self.folder, "split").get("exclude") or ())
            if "/" in name
        )

    @property
    def dataset_yaml_content(self) -> Mapping[str, Any]:
        """The content of dataset.yaml, whose keys are looked at where they are read."""
        return _read_energon_meta_file(self.folder, "dataset")

    def select_subset(self, subset: Any, where: str) -> EnergonSplitPart:
        """Return the part limited to {range: [25%, 75%]} or [100, end]. `DataError`, with `where`, if invalid."""
        total = sum(count for _, count in self.shard_sample_counts)
        first, last = self.start, total if self.stop is None else self.stop
        ends = subset.get("range") if isinstance(subset, Mapping) else None
        if not isinstance(ends, list) or len(ends) != 2:
            raise DataError(f"{where}: a subset has a range of two numbers or percentages, not {subset!r}")
        start, stop = (_parse_subset_bound(end, last - first, where) for end in ends)
        if not 0 <= start < stop <= last - first:
            raise DataError(f"{where}: the range {ends} leaves nothing of {last - first} samples, or is beyond them")
        if any(nonmatch == "skip" for nonmatch, _ in self.joined):
            raise DataError(f"{where}: a subset of a join that skips samples has no known beginning; leave one out")
        return replace(self, start=first + start, stop=first + stop)

    def __len__(self) -> int:
        """The number of samples, as .info.json says."""
        total = sum(count for _, count in self.shard_sample_counts)
        return (total if self.stop is None else min(self.stop, total)) - self.start


@dataclass(frozen=True, slots=True)
class DatasetBlendSpec:
    """Datasets by prefix, with weights that sum to 1, or without."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def is_energon_path(path: str) -> bool:
    """Whether a path of data settings is one of Energon's: a folder with `.nv-meta`, or a YAML file."""
    if os.path.isdir(os.path.join(path, META)) or EnergonSplitPart.parse_data_path(path) is not None:
        return True
    return path.endswith((".yaml", ".yml")) and os.path.isfile(path)


def read_energon_blend(path: str, split: str) -> DatasetBlendSpec | None:
    """Return the parts that an Energon folder or YAML file gives to a split, or None if it gives nothing.

    split: train, valid or test. `DataError` for files that are invalid.
    """
    named = EnergonSplitPart.parse_data_path(path)
    if named is not None:
        return DatasetBlendSpec((named.as_data_path,), None)
    return _resolve_dataset_node({"path": os.path.abspath(path)}, "", _PARTS[split], path, 0)


def refuse_unread_keys(
    content: Mapping[str, Any],
    where: str,
    *read: str,
    harmless: Mapping[str, str] = _HARMLESS,
    defaults: Mapping[str, Any] = _USUAL_FILES,
) -> None:
    """Raise `DataError` for keys of one of Energon's files that are neither read here, harmless, nor at their default."""
    keys = ForeignMapping(
        content, harmless=harmless, defaults=defaults, advice="is not read here, and may change the samples"
    )
    keys.one_of("__module__", ("megatron.energon",), "megatron.energon")
    keys.ignore_keys(*read)
    if problems := keys.all_problems():
        raise DataError(f"{where}: {'; '.join(problems)}")


def _resolve_dataset_node(
    node: Mapping[str, Any], base: str, part: str, where: str, depth: int, *also: str
) -> DatasetBlendSpec | None:
    """Return the parts that a YAML node stands for: a join, a YAML file or a folder. None if it has nothing for `part`.

    base: folder of relative paths. where: named in errors. depth: how many YAML files deep; 0: the path that the user
    gave. also: keys that the caller reads.
    """
    refuse_unread_keys(node, where, *(("join", "joiner", *_NODE[1:]) if node.get("join") else _NODE), *also)
    if node.get("join"):
        return _resolve_join_node(node, base, part, where)
    if not isinstance(node.get("path"), str):
        raise DataError(f"{where}: a data set without a path")
    path, part = os.path.join(base, node["path"]), str(node.get("split_part") or part)
    if os.path.isfile(path):
        if depth == _DEEPEST:
            raise DataError(f"{where}: YAML files name each other {_DEEPEST} deep")
        return _apply_subset(_read_metadataset(path, part, depth + 1), node.get("subset"), where)
    if not os.path.isdir(os.path.join(path, META)):
        raise DataError(f"{where}: {path} is no folder with {META} and no YAML file; prepare it with `energon prepare`")
    parts = _read_energon_meta_file(path, "split").get("split_parts")
    if not depth and isinstance(parts, Mapping) and not parts.get(part):
        return None  # a folder that is given by itself need not have every part
    return _apply_subset(
        DatasetBlendSpec((EnergonSplitPart(path, part).as_data_path,), None), node.get("subset"), where
    )


def _read_metadataset(path: str, part: str, depth: int) -> DatasetBlendSpec | None:
    """Return what a Metadataset (or V2) YAML file gives to `part`. None if it lacks that split and is not nested."""
    content = _load_yaml_or_json(path)
    splits = content.get("splits")
    if not isinstance(splits, Mapping):
        raise DataError(f"{path} has no splits; it is no blend of Energon's")
    if part not in splits:
        if depth > 1:
            raise DataError(f"{path} has no split {part!r}; it has {', '.join(map(str, splits))}")
        return None
    refuse_unread_keys(content, path, "splits", "__class__")
    if content.get("__class__") not in (None, "Metadataset", "MetadatasetV2"):
        raise DataError(f"{path} is a {short_value(content['__class__'])}; a Metadataset and a MetadatasetV2 are read")
    node, base, where = splits[part], os.path.dirname(os.path.abspath(path)), f"{path}: {part}"
    if not isinstance(node, Mapping):
        raise DataError(f"{where} is no mapping")
    for key in ("blend", "datasets", "blend_epochized"):
        if key in node:
            refuse_unread_keys(node, where, key, "subset")
            repeated = key == "blend_epochized"
            return _apply_subset(
                _resolve_blend_node(node[key], base, part, where, depth, repeated), node.get("subset"), where
            )
    return _resolve_dataset_node(node, base, part, where, depth)


def _resolve_join_node(node: Mapping[str, Any], base: str, part: str, where: str) -> DatasetBlendSpec | None:
    """Return the part that a `join` node describes: the first folder's samples with the fields of equal keys in the
    others.

    `DataError` if the joiner is user code or a folder cannot be joined.
    """
    joiner, nodes = node.get("joiner"), node["join"]
    own = isinstance(joiner, Mapping) and joiner.get("__module__") == "megatron.energon"
    if not own or not isinstance(nodes, list):
        raise DataError(
            f"{where}: a join whose joiner is code of its own is not run; what is read is a list of folders with a kind of sample of "
            "megatron.energon as joiner"
        )
    parts: list[tuple[str, EnergonSplitPart]] = []
    for each in _require_dataset_list(nodes, where):
        chosen = each.get("split_part") or node.get("split_part") or part
        inner = _resolve_dataset_node({**each, "split_part": chosen}, base, part, where, 1, "nonmatch")
        first = (
            None if inner is None or len(inner.prefixes) != 1 else EnergonSplitPart.parse_data_path(inner.prefixes[0])
        )
        nonmatch = str(each.get("nonmatch", "error"))
        if first is None or nonmatch not in _NONMATCH or each.get("subset"):
            raise DataError(
                f"{where}: folders are joined whole, with a nonmatch of {', '.join(_NONMATCH)}, not {each!r}"
            )
        parts.append((nonmatch, first))
    (nonmatch, primary), *others = parts
    if nonmatch != "error":
        raise DataError(f"{where}: the first folder of a join has the nonmatch error, not {nonmatch}")
    assert isinstance(joiner, Mapping), "checked above"
    joined = tuple((how, other.as_data_path) for how, other in others)
    whole = replace(primary, joined=joined, kind=str(joiner.get("__class__", "")))
    return _apply_subset(DatasetBlendSpec((whole.as_data_path,), None), node.get("subset"), where)


def _resolve_blend_node(nodes: Any, base: str, part: str, where: str, depth: int, repeated: bool) -> DatasetBlendSpec:
    """Return the parts of a list of datasets: with weights that sum to 1, or, if `repeated`, each `repetitions` times."""
    prefixes: list[str] = []
    weights: list[float] = []
    share = "repetitions" if repeated else "weight"
    for node in _require_dataset_list(nodes, where):
        inner = _resolve_dataset_node(node, base, part, where, depth, share)
        assert inner is not None, "what is named inside a file has the part or is refused"
        number = _read_blend_weight(node, share, where)
        if repeated and inner.weights is None:
            _refuse_many_parts(number * len(inner.prefixes), where)
            prefixes += [prefix for each in inner.prefixes for prefix in _repeat_data_path(each, number)]
        elif not repeated and (inner.weights is not None or len(inner.prefixes) == 1):
            prefixes += inner.prefixes
            weights += [number * weight for weight in inner.weights or (1.0,)]
        else:
            raise DataError(f"{where}: blend and blend_epochized do not mix")
        _refuse_many_parts(len(prefixes), where)
    return DatasetBlendSpec(tuple(prefixes), None if repeated else tuple(weight / sum(weights) for weight in weights))


def _refuse_many_parts(count: float, where: str) -> None:
    if count > _MOST_PARTS:
        raise DataError(f"{where}: the blend has more than {_MOST_PARTS} parts, repetitions counted")


def _require_dataset_list(nodes: Any, where: str) -> list[Mapping[str, Any]]:
    """Return `nodes`. `DataError` if it is not a non-empty list of mappings."""
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, Mapping) for node in nodes):
        raise DataError(f"{where} is no list of data sets")
    return nodes


def _read_blend_weight(node: Mapping[str, Any], key: str, where: str) -> float:
    """The weight of a data set, or its repetitions."""
    number = node.get(key, 1)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not (number > 0 and isfinite(number)):
        raise DataError(f"{where}: {node.get('path', 'a join')} has the {key} {number!r}; it is above 0")
    return float(number)


def _repeat_data_path(prefix: str, repetitions: float) -> list[str]:
    """Return the prefix as often as `repetitions` says; a fractional rest is a prefix with fewer samples."""
    part = EnergonSplitPart.parse_data_path(prefix)
    assert part is not None, "the parts of a blend are parts"
    whole, rest = int(repetitions), round((repetitions % 1) * len(part))
    last = replace(part, stop=part.start + rest)
    return [prefix] * whole + ([last.as_data_path] if rest else [])


def _apply_subset(blend: DatasetBlendSpec | None, subset: Any, where: str) -> DatasetBlendSpec | None:
    """Return the blend with each part limited to `subset`; as it is if either is None."""
    if blend is None or subset is None:
        return blend
    parts = [EnergonSplitPart.parse_data_path(prefix) for prefix in blend.prefixes]
    return DatasetBlendSpec(
        tuple(part.select_subset(subset, where).as_data_path for part in parts if part is not None), blend.weights
    )


def _parse_subset_bound(end: Any, total: int, where: str) -> int:
    """Return a bound of a subset as a number of samples: a number, "25%" of `total`, or "end"."""
    if end == "end":
        return total
    if isinstance(end, int):
        return end
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", str(end))
    if match is None:
        raise DataError(f"{where}: {end!r} is no number of samples and no percentage")
    return int(total * float(match[1]) / 100)


def _expand_braces(patterns: Any) -> list[str]:
    """Return the names that patterns such as a-{0..3}.tar or {a,b}.tar stand for, as braceexpand has them. `DataError` unless they
    are a list of texts, or where braces stand within braces.
    """
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(one, str) for one in patterns):
        raise DataError(f"{short_value(patterns)} in a split.yaml is no list of names")
    result: list[str] = []
    for pattern in patterns:
        pieces = re.split(r"\{([^{}]*)\}", pattern)
        if any("{" in piece or "}" in piece for piece in pieces[::2]):
            raise DataError(
                f"the pattern {short_value(pattern)} of a split.yaml has braces within braces; list the names"
            )
        options = [_brace_alternatives(piece) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if len(result) + prod(map(len, options)) > _MOST_NAMES:
            raise DataError(
                f"the pattern {short_value(pattern)} of a split.yaml stands for more than {_MOST_NAMES} names"
            )
        result += ["".join(words) for words in product(*options)]
    return result


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _brace_alternatives(inside: str) -> Sequence[str]:
    """Return what stands for each other in braces: words with commas between, or the numbers of a range, up or down."""
    match = re.fullmatch(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?", inside, re.ASCII)
    if match is None:
        if ".." in inside:
            raise DataError(f"the range {short_value(inside)} of a split.yaml is none of numbers; list the names")
        return inside.split(",") if "," in inside else [f"{{{inside}}}"]
    ends, long = match.group(1, 2), max(map(len, match.groups(""))) > _MOST_DIGITS
    first, last, step = (0, 0, 1) if long else (int(ends[0]), int(ends[1]), int(match[3] or 1) or 1)
    if long or abs(last - first) // step >= _MOST_NAMES:
        raise DataError(f"the range {short_value(inside)} of a split.yaml stands for more than {_MOST_NAMES} names")
    padded = any(end.lstrip("-").startswith("0") and end not in ("0", "-0") for end in ends)  # 08..10, and not 0..10
    numbers = range(first, last + 1, step) if first < last else range(first, last - 1, -step)
    return [str(number).zfill(max(map(len, ends)) * padded) for number in numbers]


def _read_energon_meta_file(folder: str, name: str) -> Mapping[str, Any]:
    """Read a file of a folder's `.nv-meta`, YAML or JSON. `DataError` if there is none."""
    for ending in (".json", ".yaml") if name == ".info" else (".yaml", ".json"):
        path = os.path.join(folder, META, name + ending)
        if os.path.isfile(path):
            return _load_yaml_or_json(path)
    raise DataError(f"{folder}/{META} has no {name}.yaml or {name}.json; prepare the folder with `energon prepare`")


def _load_yaml_or_json(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file) if path.endswith(".json") else yaml.safe_load(file)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if _has_more_values_than(content, _MOST_VALUES):
        raise DataError(f"{path} holds more than {_MOST_VALUES} values, those of aliases counted where they stand")
    if not isinstance(content, Mapping):
        raise DataError(f"{path} holds no mapping")
    return content


def _has_more_values_than(content: Any, most: int) -> bool:
    """Whether a value holds more than `most` others, which an alias (or a list that holds itself) makes of a few bytes."""
    left = [iter((content,))]
    while left:
        for value in left[-1]:
            most -= 1
            if most < 0 or len(left) > 1000:
                return True
            if isinstance(value, (Mapping, list)):
                left.append(iter(value.values() if isinstance(value, Mapping) else value))
                break
        else:
            left.pop()
    return False


def ranges_within_shards(counts: Sequence[int], start: int, stop: int | None) -> list[range]:
    """Return, for shards of `counts` samples end to end, which positions in each shard lie in [start, stop)."""
    ends = list(accumulate(counts))
    stop = ends[-1] if stop is None and ends else stop or 0
    return [range(max(0, start - end + n), max(0, min(n, stop - end + n))) for n, end in zip(counts, ends, strict=True)]
