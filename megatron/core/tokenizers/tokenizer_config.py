"""The files beside a tokenizer.json, as transformers reads them: tokenizer_config.json, special_tokens_map.json, added_tokens.json
and the files of chat templates.

tokenizer.json says how text is encoded. These files name special tokens, change the flags of added tokens, and may hold settings
that change ids or texts: each is read, known to change nothing where there is a tokenizer.json, or refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.core.config.flags.declare import ConfigError, raise_config_error_if
from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.tokenizers.base import read_flag_file_json, read_flag_file_text

FLAG = "--tokenizer-model"
FILE = "tokenizer_config.json"
ROLES = ("bos", "eos", "pad", "cls", "sep", "mask")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of an added token
_GENERIC = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer")
HARMLESS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("add_bos_token", "add_eos_token"), "the post-processor of tokenizer.json has the last word"),
        **dict.fromkeys(
            (
                "legacy sp_model_kwargs from_slow unk_id keep_accents remove_space do_basic_tokenize never_split "
                "wordpieces_prefix spm_file vocab_file merges_file tokenizer_file full_tokenizer_file special_tokens_map_file "
                "added_tokens_file fast_tokenizer_files byte_fallback unicode_normalizer normalization vocab_type"
            ).split(),
            "says how a tokenizer.json would be made",
        ),
        **dict.fromkeys(
            (
                "model_max_length max_len max_length stride truncation truncation_side truncation_strategy padding padding_side "
                "pad_to_multiple_of pad_token_type_id model_input_names max_model_input_sizes return_token_type_ids"
            ).split(),
            "of batches that transformers makes",
        ),
        **dict.fromkeys(
            (
                "_commit_hash name_or_path tokenizer_class tokenizer_type processor_class image_processor_class auto_map "
                "backend is_local local_files_only use_fast device_map trust_remote_code init_inputs transformers_version "
                "verbose token revision model_type"
            ).split(),
            "says where it is from, and no code of a folder is run",
        ),
        **dict.fromkeys(
            "bos_token_id eos_token_id pad_token_id cls_token_id sep_token_id mask_token_id unk_token_id".split(),
            "the tokens are named, too",
        ),
        **dict.fromkeys(
            ("use_default_system_prompt", "response_schema"), "of conversations in transformers' own pipelines"
        ),
        "unk_token": "the model of tokenizer.json names its own",
        "spaces_between_special_tokens": "of tokenizers without a tokenizer.json",
    }
)
_OFF: Mapping[str, Any] = MappingProxyType(
    {"errors": "replace", "split_special_tokens": False, "fix_mistral_regex": False, "dropout": 0.0}
)
_ADVICE = "is unknown here and may change ids or texts; if it does not, take it out of tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class TokenizerFolderConfig:
    """What the files beside a tokenizer.json say. names: role (bos, eos ..) -> token; None if they name none. extra: other
    special tokens; of_model: those that only some networks have, such as an image's. added: (id or None, fields of tokenizers' AddedToken) of tokens that are to be in the vocabulary with
    these flags. cleans_up_spaces: of decoded texts. tool_chat_template: the chat template of conversations with tools.
    """

    names: Mapping[str, str] | None = None
    extra: tuple[str, ...] = ()
    of_model: tuple[str, ...] = ()
    added: tuple[tuple[int | None, Mapping[str, Any]], ...] = ()
    cleans_up_spaces: bool = False
    chat_template: str | None = None
    tool_chat_template: str | None = None


def read_tokenizer_config(folder: Path, parsed: Mapping[str, Any]) -> TokenizerFolderConfig:
    """Read the files beside a tokenizer.json, whose content is `parsed`. `ConfigError` with all that cannot be done."""
    config = _merged_files(folder)
    keys = ForeignMapping(config, harmless=HARMLESS, defaults=_OFF, advice=_ADVICE)
    templates = _chat_templates(folder, keys.pop_or_none("chat_template"))
    names, of_model, extra = _named_tokens(keys, config)
    cleans = keys.boolean("clean_up_tokenization_spaces", False)
    forced = keys.boolean("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    listed = tuple(_added_tokens(keys.pop_or_none("added_tokens_decoder"), keys.problems))
    keys.problems += _class_problems(
        keys, str(config.get("tokenizer_class") or "").removesuffix("Fast") or None, parsed
    )
    raise_config_error_if(f"{FLAG} {folder}, {FILE}: {problem}" for problem in keys.all_problems())
    cleans = cleans and (forced or parsed["model"].get("type") != "BPE")
    return TokenizerFolderConfig(
        names or None,
        extra,
        of_model,
        listed or _legacy_added_tokens(folder, config),
        cleans,
        templates.get("default"),
        templates.get("tool_use"),
    )


def _named_tokens(
    keys: ForeignMapping, config: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Take the names of special tokens; return them by their role, those of some networks only, and all others."""
    names, of_model, extra = dict[str, str](), list[str](), list[str]()
    for key in [key for key in config if key.endswith("_token") and key not in HARMLESS]:
        role, value = key.removesuffix("_token"), keys.pop_or_none(key)
        if isinstance(value, bool) or value is None:
            continue
        if role in ROLES:
            names[role] = _token_text(value, key, keys.problems)
        else:
            of_model.append(_token_text(value, key, keys.problems))
    for key in ("extra_special_tokens", "additional_special_tokens"):
        value = keys.pop_or_none(key) or []
        if isinstance(value, dict):
            of_model += [_token_text(one, key, keys.problems) for one in value.values()]
        else:
            values = value if isinstance(value, list) else [value]
            extra += [_token_text(one, key, keys.problems) for one in values]
    return names, tuple(dict.fromkeys(of_model)), tuple(dict.fromkeys(extra))


def _merged_files(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json without nulls; over it special_tokens_map.json, which counts only where the former has no
    `added_tokens_decoder`.
    """
    config = _read_object_without_nulls(folder / FILE)
    return (
        config
        if "added_tokens_decoder" in config
        else config | _read_object_without_nulls(folder / "special_tokens_map.json")
    )


def _read_object_without_nulls(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_flag_file_json(path, FLAG)
    if not isinstance(content, dict):
        raise ConfigError(f"{FLAG} {path} is not a JSON object")
    return {key: value for key, value in content.items() if value is not None}


def _class_problems(keys: ForeignMapping, kind: str | None, parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield where a class of transformers overrules tokenizer.json by settings of its own."""
    prefix = keys.pop_or_none("add_prefix_space")
    steps = list(_steps(parsed.get("pre_tokenizer"), "pretokenizers"))
    spaces = [bool(step.get("add_prefix_space")) for step in steps if step.get("type") == "ByteLevel"]
    if kind not in _GENERIC and spaces and any(spaces) != bool(prefix):
        yield (
            f"add_prefix_space: {short_value(prefix)} of the class {kind} overrules {any(spaces)} of tokenizer.json; "
            "give both one value"
        )
    normalizers = [
        step for step in _steps(parsed.get("normalizer"), "normalizers") if step.get("type") == "BertNormalizer"
    ]
    for key, field in (
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ):
        value = keys.pop_or_none(key)
        if value is not None and kind not in _GENERIC and any(step.get(field) != value for step in normalizers):
            yield (
                f"{key}: {short_value(value)} of the class {kind} overrules {short_value(normalizers[0].get(field))} of "
                "tokenizer.json; give both one value"
            )


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of tokenizer.json, those in sequences one by one. name: key of a sequence's steps."""
    for step in (part or {}).get(name) or [part or {}]:
        yield from _steps(step, name) if step.get(name) else [step]


def _token_text(value: Any, key: str, problems: list[str]) -> str:
    """Return the text of a token that is named by itself or with its flags."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if isinstance(text, str):
        return text
    problems.append(f"names {short_value(value)} as {key}, which is no token")
    return ""


def _added_tokens(value: Any, problems: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (id, fields) of the tokens of `added_tokens_decoder`, by id."""
    if value is None:
        return
    tokens = value.items() if isinstance(value, Mapping) else [("?", value)]
    for number, token in sorted(tokens, key=lambda row: (len(str(row[0])), str(row[0]))):
        fields = dict(token) if isinstance(token, Mapping) else {}
        fields.pop("__type", None)
        flags = [fields.get(name, False) for name in _FLAGS]
        if (
            not str(number).isdecimal()
            or not isinstance(fields.get("content"), str)
            or not {*fields} <= {"content", *_FLAGS}
            or not all(isinstance(flag, bool) for flag in flags)
        ):
            problems.append(
                f"added_tokens_decoder: {short_value({number: token})} is not an id and a token with its flags"
            )
            continue
        yield int(number), fields


def _legacy_added_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[int | None, Mapping[str, Any]], ...]:
    """Return the tokens of added_tokens.json, which counts only where tokenizer_config.json has no `added_tokens_decoder`."""
    if "added_tokens_decoder" in config:
        return ()
    tokens = _read_object_without_nulls(folder / "added_tokens.json")
    if not all(type(number) is int for number in tokens.values()):
        raise ConfigError(f"{FLAG} {folder / 'added_tokens.json'} is not an object of tokens and their ids")
    return tuple((number, {"content": token}) for token, number in sorted(tokens.items(), key=lambda row: row[1]))


def _chat_templates(folder: Path, setting: object) -> dict[str, str]:
    """Return the chat templates by their names; the usual one is named default. Files have precedence."""
    if isinstance(setting, list):
        setting = {str(row.get("name")): row.get("template") for row in setting if isinstance(row, dict)}
    given = setting if isinstance(setting, dict) else {"default": setting}
    templates = {str(name): text for name, text in given.items() if isinstance(text, str)}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    return templates | {name: read_flag_file_text(path, FLAG) for name, path in files.items()}
