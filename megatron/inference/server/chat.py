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
from megatron.core.datasets.special_tokens import IMAGE
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.image_prompts import ImagePromptWriter
from megatron.inference.server.body_fields import RequestRefused
from megatron.inference.step_input import PromptImages

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatPromptEncoder:
    """Encodes conversations. template: a name of `templates.FORMATS`, or tokenizer for the tokenizer's own. stop_ids,
    stop_words: what the template writes after an answer. Raises `ConfigError` if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "tokenizer") -> None:
        if template == "tokenizer" and tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; start the server with --chat-format")
        self._encoder = ConversationEncoder(tokenizer, template)
        self.stop_ids, self.stop_words = self._encoder.answer_end_ids_and_texts()

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the answer begins; `RequestRefused` if the template does not accept it."""
        try:
            return self._encoder.encode_prompt(messages)
        except (DataError, ValueError) as error:
            raise RequestRefused(f"messages: {error}") from None

    def encode_with_images(
        self,
        messages: Sequence[Mapping[str, Any]],
        files: Sequence[bytes],
        prompts: ImagePromptWriter | None,
        most: int,
    ) -> tuple[tuple[int, ...], PromptImages | None]:
        """Return the ids of a conversation, and its images or None. prompts: writer of a network that reads images, or
        None. most: images in one request. Raises `RequestRefused`.
        """
        if prompts is None:
            if files:
                raise RequestRefused("the network reads no images; send text alone")
            return tuple(self.encode_messages(messages)), None
        if len(files) > most:
            raise RequestRefused(f"messages hold {len(files)} images; this server takes {most} in a call", 413)
        try:
            ids, images = prompts.encode_prompt(messages, files)
        except ImageError as error:
            raise RequestRefused(f"an image cannot be used: {error}") from None
        except (DataError, ValueError) as error:
            raise RequestRefused(f"messages: {error}") from None
        return ids, images if files else None


def parse_messages(value: Any) -> tuple[list[dict[str, str]], list[bytes]]:
    """Return (role and text of each message, image files), joined parts. Raises `RequestRefused`."""
    if not isinstance(value, list) or not value:
        raise RequestRefused("messages must be a list of messages, of which there is one at least")
    messages: list[dict[str, str]] = []
    images: list[bytes] = []
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise RequestRefused(f"{where} must be an object with a role and a content")
        unknown = sorted(set(message) - {"role", "content", "name", "refusal"})
        if unknown:
            raise RequestRefused(
                f"{where} has {unknown[0][:100]!r}, which is not served; it may have role, content and name"
            )
        if message.get("role") not in _ROLES:
            raise RequestRefused(f"{where}: role must be one of {', '.join(_ROLES)}")
        parts = message.get("content")
        texts = [_content_part_text(part, where, images) for part in (parts if isinstance(parts, list) else [parts])]
        if not texts:
            raise RequestRefused(f"{where}: content must be a string, or a list of parts")
        messages.append({"role": message["role"], "content": "".join(texts)})
    return messages, images


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
