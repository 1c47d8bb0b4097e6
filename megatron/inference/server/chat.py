"""Messages to ids, by a chat template, as in training: the text of a user or a tool cannot forge a mark."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.foreign.mapping import ForeignMapping
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.images import ImageError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.message_content import strings_of
from megatron.core.datasets.special_tokens import IMAGE
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.server.body_fields import RequestRefused
from megatron.inference.step_input import PromptImages

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_OTHER_KEYS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")  # given to the template
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class PromptEnding:
    """How a prompt ends. invites: with the beginning of an answer; continues: where the last message, an answer, goes on.
    variables: of the template, beside the usual ones.
    """

    invites: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


class ChatPromptEncoder:
    """Encodes conversations. template: a name of `templates.FORMATS`, or tokenizer for the tokenizer's own. stop_ids,
    stop_words: what the template writes after an answer. Raises `ConfigError` if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "tokenizer") -> None:
        if template == "tokenizer" and tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; start the server with --chat-format")
        self._encoder = ConversationEncoder(tokenizer, template, now=None)
        self.stop_ids, self.stop_words = self._encoder.answer_end_ids_and_texts()

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], ending: PromptEnding = PromptEnding()
    ) -> list[int]:
        """Return the ids of a conversation up to where the answer begins; `RequestRefused` if the template does not accept it."""
        marks = [mark for text in strings_of(ending.variables) for mark in self._encoder.template.marks_in(text)]
        if marks:
            raise RequestRefused(f"chat_template_kwargs hold {marks[0]}, which is a token of the template's")
        try:
            return self._encoder.encode_prompt(
                messages, None, ending.variables, invites=ending.invites, continues=ending.continues
            )
        except (DataError, ValueError) as error:
            raise RequestRefused(f"messages: {error}") from None

    def encode_with_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        files: Sequence[bytes],
        prompts: ImagePromptWriter | None,
        most: int,
        ending: PromptEnding = PromptEnding(),
    ) -> tuple[tuple[int, ...], PromptImages | None]:
        """Return the ids of a conversation, and its images or None. prompts: writer of a network that reads images, or
        None. most: images in one request. Raises `RequestRefused`.
        """
        if prompts is None:
            if files:
                raise RequestRefused("the network reads no images; send text alone")
            return tuple(self.encode_messages(messages, ending)), None
        if ending != PromptEnding():
            raise RequestRefused(
                "a network that reads images is asked without chat_template_kwargs, add_generation_prompt and "
                "continue_final_message; leave them out"
            )
        if len(files) > most:
            raise RequestRefused(f"messages hold {len(files)} images; this server takes {most} in a call", 413)
        try:
            ids, images = prompts.encode_prompt(messages, files)
        except ImageError as error:
            raise RequestRefused(f"an image cannot be used: {error}") from None
        except (DataError, ValueError) as error:
            raise RequestRefused(f"messages: {error}") from None
        return ids, images if files else None


def prompt_ending_of_fields(fields: Mapping[str, Any]) -> PromptEnding:
    """Return how the prompt of a request ends. Raises `RequestRefused`."""
    invites, continues = fields["add_generation_prompt"], fields["continue_final_message"]
    if invites and continues:
        raise RequestRefused("continue_final_message needs add_generation_prompt to be false: the last answer goes on")
    if invites is None:
        invites = not continues
    return PromptEnding(invites, continues, fields["chat_template_kwargs"])


def parse_messages(value: Any) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return (the messages, parts joined to a text; image files). Raises `RequestRefused`."""
    if not isinstance(value, list) or not value:
        raise RequestRefused("messages must be a list of messages, of which there is one at least")
    images: list[bytes] = []
    return [_parse_message(message, f"messages[{place}]", images) for place, message in enumerate(value)], images


def _parse_message(message: Any, where: str, images: list[bytes]) -> dict[str, Any]:
    """Return a message as a template reads it; its images are added to `images`. Raises `RequestRefused`."""
    if not isinstance(message, dict):
        raise RequestRefused(f"{where} must be an object with a role and a content")
    keys = ForeignMapping(message, harmless=("refusal",))
    role, parts, calls = keys.pop_or_none("role"), keys.pop_or_none("content"), keys.pop_or_none("tool_calls")
    others = {name: text for name in _OTHER_KEYS if (text := keys.pop_or_none(name)) is not None}
    if unknown := keys.keys_left():
        raise RequestRefused(
            f"{where} has {unknown[0][:100]!r}, which is not served; it may have role, content, tool_calls, {', '.join(_OTHER_KEYS)}"
        )
    if role not in _ROLES:
        raise RequestRefused(f"{where}: role must be one of {', '.join(_ROLES)}")
    if not all(isinstance(text, str) for text in others.values()):
        raise RequestRefused(f"{where}: {', '.join(others)} must be a string")
    parsed = {"role": role, **others}
    if calls:
        parsed["tool_calls"] = _parse_tool_calls(calls, where)
    if parts is not None or not calls:
        texts = [_content_part_text(part, where, images) for part in (parts if isinstance(parts, list) else [parts])]
        if not texts:
            raise RequestRefused(f"{where}: content must be a string, or a list of parts")
        parsed["content"] = "".join(texts)
    return parsed


def _parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments, which clients send as text, as objects. Raises `RequestRefused`."""
    result: list[dict[str, Any]] = []
    for given in calls if isinstance(calls, list) else [None]:
        call = given if isinstance(given, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"{where}: tool_calls must be a list of objects with a function that has a name")
        arguments = function.get("arguments") or "{}"  # some clients send nothing for none
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            raise RequestRefused(f"{where}: the arguments of a tool call are no JSON") from None
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _content_part_text(part: Any, where: str, images: list[bytes]) -> str:
    """Return a part's text; an image is `<image>`, its file added to `images`. Raises `RequestRefused`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part["text"] if "text" in part else None, str):
        return part["text"]
    if kind != "image_url":
        raise RequestRefused(f"{where}: content must be a string, or a list of parts of the types text and image_url")
    address = part.get("image_url")
    address = address.get("url") if isinstance(address, dict) else address
    if not isinstance(address, str) or not (match := _DATA_URL.match(address)):
        raise RequestRefused(
            f"{where}: the url of an image must be a data URL, data:image/png;base64,...; nothing is fetched"
        )
    try:
        images.append(base64.b64decode(address[match.end() :], validate=True))
    except ValueError:
        raise RequestRefused(f"{where}: the data URL of an image is not base64") from None
    return IMAGE
