"""Samples of WebDataset tars as conversations about images, with each image found in its tar without reading on the way.

    000001.jpg  000001.json | 000002.jpg  000002.json        members with one stem that follow each other are a sample
    shard-0.tar@512+20480/000001.jpg                         an image: its tar, where its bytes are, and its name

The fields of dataset.yaml become what LLaVA's JSON would say: a caption, a question and its answer, a choice, a transcript, or turns.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megatron.core.config.foreign.mapping import short_value
from megatron.core.datasets.energon import META, EnergonSplitPart, ranges_within_shards, refuse_unread_keys
from megatron.core.datasets.special_tokens import IMAGE
from megatron.core.datasets.storage import DataError

_STEM = re.compile(r"((?:.*/|)[^.]+)\.([^/]*)")
_META = re.compile(r"__[^/]*__($|/)")
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm", "img")
_TEXTS = ("txt", "text", "transcript", "cls", "caption", "question", "answer")
_MOST_TEXT = 2**24  # bytes of a member that is text or JSON
_MOST_HEADER = 2**20  # bytes of a header that extends another
_EXTENDS = (*b"xgXLK",)  # types of such headers: pax, Solaris, long names of GNU
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in a tar. name: as `read_image_bytes` finds it, from the folder of the tar on."""

    name: str
    offset: int
    size: int

    @property
    def suffix(self) -> str:
        """The file ending in lower case, without the dot."""
        return self.name.rpartition(".")[2].lower()


class _BoundedTarInfo(tarfile.TarInfo):
    """A header of a tar from strangers: each lies behind the one before, and none is read at length. `DataError` for others."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:  # what tarfile calls for each header
        where = f"{_tar_name(archive)} is damaged at byte {self.offset}"
        if self.size < 0:
            raise DataError(f"{where}: {self.name} has {self.size} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise DataError(f"{_tar_name(archive)} holds the sparse file {self.name}; write it without --sparse")
        file = archive.fileobj
        assert file is not None, "an open tar has a file"
        if self.type[0] in _EXTENDS:
            if self.size > _MOST_HEADER:
                raise DataError(f"{where}: a header of {self.size} bytes")
            place = file.tell()
            if b"GNU.sparse" in file.read(self.size):
                raise DataError(f"{_tar_name(archive)} holds a sparse file; write it without --sparse")
            file.seek(place)
        member: tarfile.TarInfo = super()._proc_member(archive)  # type: ignore[misc] # typeshed lacks it
        if member.size < 0 or archive.offset <= self.offset:
            raise DataError(f"{where}: {member.name} has {member.size} bytes")
        return member


@dataclass(frozen=True, slots=True)
class TarSample:
    """One sample of a tar: its key, and its members by what follows the key."""

    shard: str
    key: str
    members: Mapping[str, TarMember]


def read_tar_samples(folder: str, shard: str) -> Iterator[TarSample]:
    """The samples of a tar, in order; only headers are read. `DataError` for what is no tar, or is cut off."""
    path = os.path.join(folder, shard)
    key, members = "", dict[str, TarMember]()
    try:
        size = os.path.getsize(path)
        with tarfile.open(path, "r:", tarinfo=_BoundedTarInfo) as tar:
            for entry in tar:
                tar.members = []  # type: ignore[attr-defined] # a tar keeps all headers it has read
                match = _STEM.fullmatch(entry.name)
                if not entry.isreg() or match is None or _META.match(entry.name):
                    continue
                if entry.offset_data + entry.size > size:
                    raise DataError(f"{path} ends within {entry.name}; it is cut off: copy or write it again")
                if match[1] != key:
                    if members:
                        yield TarSample(shard, key, members)
                    key, members = match[1], {}
                name = f"{shard}@{entry.offset_data}+{entry.size}/{entry.name}"
                members[match[2].lower()] = TarMember(name, entry.offset_data, entry.size)
            _refuse_early_end(tar)
    except (OSError, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a tar: {error}") from None
    if members:
        yield TarSample(shard, key, members)


def _tar_name(archive: tarfile.TarFile) -> str:
    return os.fsdecode(archive.name or "")


def _refuse_early_end(archive: tarfile.TarFile) -> None:
    """Raise `DataError` if an open tar ended at a header that cannot be read, as tarfile ends it without a word."""
    file, place = archive.fileobj, archive.offset
    assert file is not None, "an open tar has a file"
    file.seek(place)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise DataError(f"{_tar_name(archive)} is damaged at byte {place}: what stands there is no header")


def read_energon_rows(part: EnergonSplitPart) -> Iterator[dict[str, Any] | str]:
    """Yield each sample of a part as a row of LLaVA's JSON, or as a text saying why it is left out."""
    convert = _row_converter(part)
    others = [(nonmatch, _open_joined_field_source(prefix)) for nonmatch, prefix in part.joined]
    shards, excluded = part.shard_sample_counts, part.excluded_samples
    for (shard, count), requested in zip(
        shards, ranges_within_shards([count for _, count in shards], part.start, part.stop), strict=True
    ):
        if not requested:
            continue
        path, number = os.path.join(part.folder, shard), 0
        for sample in read_tar_samples(part.folder, shard):
            if number in requested and f"{shard}/{sample.key}" not in excluded:
                joined = [_sample_with_same_key(sample, nonmatch, other) for nonmatch, other in others]
                if all(partner is not None for partner in joined):
                    yield _convert_sample(path, sample, convert, [partner for partner in joined if partner])
            number += 1
        if number != count:
            raise DataError(
                f"{path} holds {number} samples, and {META}/.info.json says {count}; run `energon prepare` again"
            )


def energon_fingerprint_fields(part: EnergonSplitPart) -> dict[str, Any]:
    """Return what the rows depend on: the part's text form, dataset.yaml, excluded samples, size and time of tars."""
    states = {shard: os.stat(os.path.join(part.folder, shard)) for shard, _ in part.shard_sample_counts}
    return {
        "part": part.as_data_path,
        "dataset": json.dumps(part.dataset_yaml_content, sort_keys=True, default=str),
        "excluded": sorted(part.excluded_samples),
        "joined": [
            energon_fingerprint_fields(other)
            for _, prefix in part.joined
            if (other := EnergonSplitPart.parse_data_path(prefix)) is not None
        ],
        "shards": {shard: [state.st_size, state.st_mtime_ns] for shard, state in states.items()},
    }


@dataclass(frozen=True, slots=True)
class _JoinedFieldSource:
    """A folder that gives fields to the samples of another with the same keys. samples: by key, with their tars."""

    part: EnergonSplitPart
    fields: Mapping[str, str]
    samples: Mapping[str, TarSample]

    def fields_for_sample(self, sample: TarSample) -> dict[str, Any]:
        """The fields of a sample, images with the whole names of their tars."""
        folder = os.path.abspath(self.part.folder)
        access = _SampleFieldReader(os.path.join(folder, sample.shard), sample)
        given = {field: access(where) for field, where in self.fields.items()}
        return {
            field: replace(value, name=os.path.join(folder, value.name)) if isinstance(value, TarMember) else value
            for field, value in given.items()
        }


def _open_joined_field_source(prefix: str) -> _JoinedFieldSource:
    part = EnergonSplitPart.parse_data_path(prefix)
    if part is None:
        raise DataError(f"{prefix} is no part of a folder with {META}")
    samples: dict[str, TarSample] = {}
    for shard, _ in part.shard_sample_counts:
        for sample in read_tar_samples(part.folder, shard):
            if f"{shard}/{sample.key}" in part.excluded_samples:
                continue
            if sample.key in samples:
                raise DataError(f"{part.folder} holds the key {sample.key} twice, and cannot be joined")
            samples[sample.key] = sample
    return _JoinedFieldSource(part, _read_yaml_field_map(part), samples)


def _sample_with_same_key(
    sample: TarSample, nonmatch: str, other: _JoinedFieldSource
) -> tuple[()] | tuple[_JoinedFieldSource, TarSample] | None:
    """Return (folder, sample) of the same key in another folder. Without one: `DataError`, () or None (skip the
    sample), as `nonmatch` is error, none or skip.
    """
    partner = other.samples.get(sample.key)
    if partner is not None:
        return other, partner
    if nonmatch == "error":
        raise DataError(f"{other.part.folder} has no sample {sample.key}, and nonmatch is error; choose skip or none")
    return () if nonmatch == "none" else None


def _convert_sample(
    path: str,
    sample: TarSample,
    convert: Callable[[_SampleFieldReader, Fields], dict[str, Any]],
    partners: Sequence[tuple[_JoinedFieldSource, TarSample]],
) -> dict[str, Any] | str:
    """Convert a sample, with its partners' fields, to a row of LLaVA's JSON, or a text saying what is wrong with it."""
    try:
        more: dict[str, Any] = {}
        for other, partner in partners:
            more |= other.fields_for_sample(partner)
        return convert(_SampleFieldReader(path, sample), more)
    except (DataError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        message = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        return f"{sample.shard}/{sample.key}: {message}"


class _SampleFieldReader:
    """Values of a sample by the paths of a field map: `jpg`, `json[0][value]`, `jpg,png` (the first that is there)."""

    def __init__(self, path: str, sample: TarSample) -> None:
        self.path, self.sample = path, sample
        self._read: dict[str, Any] = {}

    def __call__(self, path: str) -> Any:
        options = path.split(",")
        for option in options:
            name, *keys = re.findall(r"[^\[\]]+", option.strip())
            try:
                value = self.read_member(name)
                for key in keys:
                    value = value[int(key)] if isinstance(value, list) else value[key]
                return value
            except (KeyError, IndexError, ValueError, TypeError):
                continue
        raise DataError(f"it has no {path}; it has {', '.join(self.sample.members)}")

    def read_member(self, name: str) -> Any:
        """Return a member of the sample by what follows the key in its name (such as jpg or json): an image as its `TarMember`, whose bytes
        are not read; JSON parsed; text as str. Raises `KeyError` if there is none, `DataError` for any other kind.
        """
        member = self.sample.members[name.lower()]
        if name not in self._read:
            kind = member.suffix
            if kind in _IMAGES:
                self._read[name] = member
            elif kind in ("json", "jsn"):
                self._read[name] = json.loads(self._read_text_bytes(member))
            elif kind in _TEXTS:
                self._read[name] = self._read_text_bytes(member).decode("utf-8")
            else:
                raise DataError(f"{name} is neither an image nor text nor JSON, and is not read")
        return self._read[name]

    def _read_text_bytes(self, member: TarMember) -> bytes:
        """Return the bytes of a text or JSON member. `DataError` above _MOST_TEXT bytes."""
        if member.size > _MOST_TEXT:
            raise DataError(f"it has {member.size} bytes of text, more than {_MOST_TEXT}")
        with open(self.path, "rb") as file:
            file.seek(member.offset)
            return file.read(member.size)

    def interleaved_items(self, path: str) -> list[Any]:
        """Return images (as `TarMember`) and texts in turn, from a JSON list at `path`: texts and names of members, or
        objects with type (text, image) and value. `DataError` if it is no such list.
        """
        items = self(path)
        if not isinstance(items, list):
            raise DataError("a sequence is a list of texts and of names of images")
        images = {name: member for name, member in self.sample.members.items() if member.suffix in _IMAGES}
        result: list[Any] = []
        for item in items:
            kind, value = (item.get("type"), item.get("value")) if isinstance(item, Mapping) else (None, item)
            member = images.get(str(value).lower())
            if kind == "image" and member is None:
                raise DataError(f"it has no image {value}; it has {', '.join(images)}")
            result.append(_require_text(value) if member is None or kind == "text" else member)
        return result

    def image_names(self) -> list[str]:
        """All images, in order."""
        return [member.name for member in self.sample.members.values() if member.suffix in _IMAGES]


def _require_image_name(value: Any) -> str:
    """Return the name of an image field. `DataError` if it is no image."""
    if not isinstance(value, TarMember):
        raise DataError("the field of the image is no image")
    return value.name


def _require_text(value: Any) -> str:
    """Return a text stripped of white space. `DataError` if it is no text."""
    if not isinstance(value, str):
        raise DataError(f"a {type(value).__name__} stands where a text is expected")
    return value.strip()


def _question_answer_row(fields: Fields, question: str, answer: str) -> dict[str, Any]:
    """Return a LLaVA row of one question and its answer; the image comes first unless the question says where."""
    question_text = question if IMAGE in question else f"{IMAGE}\n{question}"
    turns = [{"from": "human", "value": question_text}, {"from": "gpt", "value": answer}]
    return {"image": _require_image_name(fields["image"]), "conversations": turns}


def _vqa_row(fields: Fields) -> dict[str, Any]:
    """Return a LLaVA row of a question and its answer; of several answers, that of the largest weight."""
    answers, weights = fields["answers"], fields.get("answer_weights")
    if isinstance(answers, list):  # the heaviest, the first of equals
        known = [float(weight) for weight in weights] if isinstance(weights, list) else [1.0] * len(answers)
        answers = answers[max(range(len(answers)), key=lambda place: known[place])]
    return _question_answer_row(fields, _require_text(fields["context"]), _require_text(answers))


def _multiple_choice_row(fields: Fields) -> dict[str, Any]:
    """Return a LLaVA row of a question with lettered options, answered with a letter."""
    options = list(zip(_LETTERS, fields["choices"]))
    listed = "\n".join(f"{letter}. {_require_text(choice)}" for letter, choice in options)
    question = f"{_require_text(fields['context'])}\n{listed}\nAnswer with the option's letter from the given choices directly."
    return _question_answer_row(fields, question, options[int(fields["correct_choice_idx"])][0])


def _conversation_row(fields: Fields) -> dict[str, Any]:
    """Return a LLaVA row of images and the turns of their conversation."""
    images = fields["images"] if isinstance(fields["images"], list) else [fields["images"]]
    return {"image": [_require_image_name(image) for image in images], "conversations": fields["texts"]}


def _interleaved_llava_row(fields: Fields) -> dict[str, Any]:
    """Return a LLaVA row of images and texts in turn: each text is an answer after the images since the last one."""
    turns: list[dict[str, str]] = []
    images: list[str] = []
    marks = ""  # of images since the last text
    for item in fields["sequence"]:
        if isinstance(item, TarMember):
            images.append(item.name)
            marks += IMAGE
        else:
            turns += [{"from": "human", "value": marks}, {"from": "gpt", "value": _require_text(item)}]
            marks = ""
    return {"image": images[: len(images) - marks.count(IMAGE)], "conversations": turns}


# What each kind of sample must have, may have, and says. Kinds whose images are tensors of a script's own making are not here.
_KINDS: Mapping[str, tuple[tuple[str, ...], Callable[[Fields], dict[str, Any]]]] = {
    "Captioning": (
        ("image", "caption"),
        lambda fields: _question_answer_row(fields, "", _require_text(fields["caption"])),
    ),
    "VQA": (("image", "context", "answers"), _vqa_row),
    "OCR": (
        ("image", "text"),
        lambda fields: _question_answer_row(fields, "Transcribe the text in the image.", _require_text(fields["text"])),
    ),
    "MultiChoiceVQA": (("image", "context", "choices", "correct_choice_idx"), _multiple_choice_row),
    "SimilarityInterleaved": (("images", "texts"), _conversation_row),
    "Interleaved": (("sequence",), _interleaved_llava_row),
}


def _llava_row_without_field_map(access: _SampleFieldReader, more: Fields) -> dict[str, Any]:
    """Return a LLaVA row of the turns in a sample's JSON, or its text as the caption. `DataError` if it has neither."""
    images = access.image_names()
    for name in access.sample.members:
        value = access.read_member(name) if name.rpartition(".")[2] in (*_TEXTS, "json") else None
        if isinstance(value, dict) and ("conversations" in value or "messages" in value):
            return {"image": images, "conversations": value.get("conversations", value.get("messages"))}
        if isinstance(value, str) and images:
            turns = [{"from": "human", "value": IMAGE * len(images)}, {"from": "gpt", "value": value.strip()}]
            return {"image": images, "conversations": turns}
    raise DataError("it has no conversations and no text")


# What dataset.yaml may say besides, and why it changes nothing here.
_HARMLESS = MappingProxyType(
    {
        **dict.fromkeys(("subflavor", "subflavors"), "labels for code of a task"),
        **dict.fromkeys(
            ("auto_decode", "decoder", "image_decode", "ignore_decoder_errors", "guess_content"),
            "how Energon unpacks images; here they are unpacked as all others",
        ),
        **dict.fromkeys(
            ("parallel_shard_iters", "max_samples_per_sequence", "shuffle_over_epochs"),
            "how Energon shuffles; here the seed orders samples",
        ),
    }
)
# Fields that kinds of sample may have, of which no text is made.
_UNREAD_FIELDS = frozenset(
    "block_boxes block_classes block_text lines_boxes lines_text words_boxes words_text chars_boxes chars_text "
    "similarity_matrix matched_text_indices".split()
)


def _read_yaml_field_map(part: EnergonSplitPart) -> dict[str, str]:
    """Return field -> path from dataset.yaml's field_map. `DataError` if it says something else that is not read."""
    content, where = part.dataset_yaml_content, f"{part.folder}/{META}/dataset.yaml"
    if content.get("sample_loader"):
        raise DataError(
            f"{where} names a sample_loader, code that is not run; give a field_map, whose paths such as "
            "json[0][value] reach into JSON, or write samples with conversations as CrudeWebdataset"
        )
    refuse_unread_keys(content, where, "field_map", "sample_type", "__class__", harmless=_HARMLESS, defaults={})
    fields = content.get("field_map") or {}
    if not isinstance(fields, Mapping) or not all(isinstance(path, str) for path in fields.values()):
        raise DataError(f"{where}: field_map is no mapping of fields to paths such as json[0][value]")
    return dict(fields)


def _row_converter(part: EnergonSplitPart) -> Callable[[_SampleFieldReader, Fields], dict[str, Any]]:
    """Return the function from a sample's reader and a join's fields to a LLaVA row, by the kind in dataset.yaml."""
    content, where = part.dataset_yaml_content, f"{part.folder}/{META}/dataset.yaml"
    kind = part.kind or content.get("sample_type", content)
    name = re.sub(r"(Sample|Webdataset)$", "", str(kind.get("__class__", "") if isinstance(kind, Mapping) else kind))
    known = _read_yaml_field_map(part)
    module = kind.get("__module__", "megatron.energon") if isinstance(kind, Mapping) else "megatron.energon"
    if module != "megatron.energon":
        raise DataError(f"{where}: samples of the kind {name!r} of {short_value(module)} are code that is not run")
    if name == "Crude" and not part.joined:
        return _llava_row_without_field_map
    if name not in _KINDS:
        raise DataError(f"{where}: samples of the kind {name!r} are not read; kinds are {', '.join(_KINDS)}, Crude")
    needed, convert = _KINDS[name]
    if strange := sorted(known.keys() - {*needed, "answer_weights", *_UNREAD_FIELDS}):
        raise DataError(f"{where}: the fields {', '.join(strange)} of {name} are not read")
    if not part.joined and not known.keys() >= set(needed):
        raise DataError(f"{where}: a field_map with {', '.join(needed)} is needed for {name}")

    def row_fields(access: _SampleFieldReader, more: Fields) -> dict[str, Any]:
        result = {
            field: access.interleaved_items(path) if field == "sequence" else access(path)
            for field, path in known.items()
            if field not in more and (field in needed or field == "answer_weights")
        } | dict(more)
        if lacking := [field for field in needed if field not in result]:
            raise DataError(f"it has no {', '.join(lacking)}")
        return result

    return lambda access, more: convert(row_fields(access, more))
