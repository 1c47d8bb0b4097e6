"""Messages to ids, by a chat template, as in training: text of a message cannot forge a mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config.flags import ConfigError
from megatron.core.datasets.conversations import Encoder
from megatron.core.datasets.indexed import DataError
from megatron.core.tokenizers.base import Tokenizer
from megatron.inference.server.fields import Refused

_ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat:
    """template: a name of `templates.FORMATS`, or tokenizer for the tokenizer's own.

    stop_ids, stop_words: what the template writes after an answer. Raises `ConfigError` if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "tokenizer") -> None:
        if template == "tokenizer" and tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; start the server with --chat-format")
        self._encoder = Encoder(tokenizer, template)
        self.stop_ids, self.stop_words = self._answer_end()

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The conversation and what stands before an answer; `Refused` if the template does not take it."""
        try:
            (encoded,) = self._encoder.encode([self._encoder.template.invitation(messages)])
        except (DataError, ValueError) as error:
            raise Refused(f"messages: {error}") from None
        return (~encoded).tolist()  # the encoder turns over what is not learnt

    def _answer_end(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Found in a small conversation: the answer is `b`, and what comes after it ends it."""
        try:
            pieces = self._encoder.template.pieces(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            )
        except DataError:
            return (), ()
        answer = [piece for piece in pieces if piece.answer]
        marks = [self._encoder.marks[piece.text] for piece in answer if piece.mark]
        words = [
            after.strip() for piece in answer if not piece.mark and (after := piece.text.partition("b")[2]).strip()
        ]
        return tuple(marks[:1]), () if marks else tuple(words[:1])


def messages_of(value: Any) -> list[dict[str, str]]:
    """Roles and texts; contents in parts are joined. Raises `Refused`."""
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of messages, of which there is one at least")
    messages = []
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise Refused(f"{where} must be an object with a role and a content")
        unknown = sorted(set(message) - {"role", "content", "name", "refusal"})
        if unknown:
            raise Refused(f"{where} has {unknown[0][:100]!r}, which is not served; it may have role, content and name")
        if message.get("role") not in _ROLES:
            raise Refused(f"{where}: role must be one of {', '.join(_ROLES)}")
        messages.append({"role": message["role"], "content": _content_text(message.get("content"), where)})
    return messages


def _content_text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else []
    of_text = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    texts = [text for text in of_text if isinstance(text, str)]
    if not texts or len(texts) != len(parts):
        raise Refused(f"{where}: content must be a string, or a list of parts of the type text")
    return "".join(texts)
