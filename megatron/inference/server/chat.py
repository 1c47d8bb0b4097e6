"""Messages to ids, by a chat template, as in training: text of a message cannot forge a mark."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.conversations import ConversationEncoder
from megatron.core.datasets.images import ImageError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.marks import IMAGE
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.image_prompts import ImagePrompts
from megatron.inference.server.fields import Refused
from megatron.inference.step_input import PromptImages

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat:
    """template: a name of `templates.FORMATS`, or tokenizer for the tokenizer's own.

    stop_ids, stop_words: what the template writes after an answer. Raises `ConfigError` if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "tokenizer") -> None:
        if template == "tokenizer" and tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; start the server with --chat-format")
        self._encoder = ConversationEncoder(tokenizer, template)
        self.stop_ids, self.stop_words = self._encoder.answer_end()

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The conversation and what stands before an answer; `Refused` if the template does not take it."""
        try:
            return self._encoder.encode_prompt(messages)
        except (DataError, ValueError) as error:
            raise Refused(f"messages: {error}") from None

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], files: Sequence[bytes], prompts: ImagePrompts | None, most: int
    ) -> tuple[tuple[int, ...], PromptImages | None]:
        """The ids of a conversation, and its images. prompts: of a network that reads some. most: how many one call may show."""
        if prompts is None:
            if files:
                raise Refused("the network reads no images; send text alone")
            return tuple(self.encode(messages)), None
        if len(files) > most:
            raise Refused(f"messages hold {len(files)} images; this server takes {most} in a call", 413)
        try:
            ids, images = prompts.write(messages, files)
        except ImageError as error:
            raise Refused(f"an image cannot be used: {error}") from None
        except (DataError, ValueError) as error:
            raise Refused(f"messages: {error}") from None
        return ids, images if files else None


def messages_of(value: Any) -> tuple[list[dict[str, str]], list[bytes]]:
    """Roles and texts, contents in parts joined, and the files of images, for each of which `<image>` stands. Raises `Refused`."""
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of messages, of which there is one at least")
    messages: list[dict[str, str]] = []
    images: list[bytes] = []
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise Refused(f"{where} must be an object with a role and a content")
        unknown = sorted(set(message) - {"role", "content", "name", "refusal"})
        if unknown:
            raise Refused(f"{where} has {unknown[0][:100]!r}, which is not served; it may have role, content and name")
        if message.get("role") not in _ROLES:
            raise Refused(f"{where}: role must be one of {', '.join(_ROLES)}")
        parts = message.get("content")
        texts = [_part_text(part, where, images) for part in (parts if isinstance(parts, list) else [parts])]
        if not texts:
            raise Refused(f"{where}: content must be a string, or a list of parts")
        messages.append({"role": message["role"], "content": "".join(texts)})
    return messages, images


def _part_text(part: Any, where: str, images: list[bytes]) -> str:
    """The text of a part of a content; the file of an image is added to `images`."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part["text"] if "text" in part else None, str):
        return part["text"]
    if kind != "image_url":
        raise Refused(f"{where}: content must be a string, or a list of parts of the types text and image_url")
    address = part.get("image_url")
    address = address.get("url") if isinstance(address, dict) else address
    if not isinstance(address, str) or not (match := _DATA_URL.match(address)):
        raise Refused(f"{where}: the url of an image must be a data URL, data:image/png;base64,...; nothing is fetched")
    try:
        images.append(base64.b64decode(address[match.end() :], validate=True))
    except ValueError:
        raise Refused(f"{where}: the data URL of an image is not base64") from None
    return IMAGE
