"""Rows of conversations as people keep them, read into one form.

| row | what is learnt |
|---|---|
| {"messages": [{"role", "content"}, ...]} | every answer |
| {"conversations": [{"from", "value"}, ...], "system"} (ShareGPT) | every answer |
| {"prompt": [messages], "completion": [messages]} | what the completion adds |
| {"prompt": text, "completion": text} | the completion and the end of a text; no template |

"tools" (a list, or its JSON) and "chat_template_kwargs" (variables of the template) are read beside messages. What a row
holds besides is not read, and named once for a file. In "messages" and "conversations" a system message that is not the
first begins a new conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.core.config.foreign.mapping import ForeignMapping, short_value
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.templates import Message

_SHAREGPT_ROLES = MappingProxyType(
    {
        "human": "user",
        "gpt": "assistant",
        "chatgpt": "assistant",
        "bing": "assistant",
        "bard": "assistant",
        "observation": "tool",
        "function_response": "tool",
    }
)
_MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning"}
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_KINDS = 'a row has "messages", "conversations", or "prompt" and "completion"'


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation. variables: of the template, beside the usual ones. prompt: number of messages before what is learnt;
    None: every answer is learnt.
    """

    messages: list[Message]
    tools: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class TextRow:
    """Two texts that follow each other, of which the second is learnt."""

    prompt: str
    completion: str


class ConversationRowParser:
    """Parses lines of JSON to rows. unread_keys: keys of rows, and of messages, that were passed over. has_tools: a row
    had some.
    """

    def __init__(self) -> None:
        self.unread_keys: dict[str, None] = {}
        self.has_tools = False

    def parse_line(self, line: bytes) -> list[ConversationRow | TextRow]:
        """Return the conversations of a line; [] for a blank one. `DataError` if it is invalid."""
        if not line.strip():
            return []
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON
            raise DataError(f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f'no list of "messages": {_KINDS}')
        keys = ForeignMapping(row)
        media = [name for name in _MEDIA if keys.pop_or_none(name)]
        if media:
            raise DataError(
                f'"{media[0]}" is not read by a network of text; conversations about images are read by pretrain_vlm.py'
            )
        conversations = self._parse_row(keys, row)
        self.has_tools |= any(isinstance(one, ConversationRow) and bool(one.tools) for one in conversations)
        self.unread_keys.update(dict.fromkeys(keys.keys_left()))
        return conversations

    def _parse_row(self, keys: ForeignMapping, row: Mapping[str, Any]) -> list[ConversationRow | TextRow]:
        """Return the conversations of a row of either kind."""
        names = [name for name in ("messages", "conversations", "completion") if row.get(name) is not None]
        if len(names) > 1:
            raise DataError(f"a row of two kinds: {_KINDS}, and this one has {', '.join(row)}")
        if not names:
            raise DataError(_explain_other_row(row))
        if names == ["completion"]:
            return [self._parse_completion(keys)]
        messages = self._messages(keys.pop_or_none(names[0]), names[0])
        system = keys.pop_or_none("system")
        if isinstance(system, str) and system:
            if messages[0]["role"] == "system":
                raise DataError('"system" and a first message of the system: keep one')
            messages = [{"role": "system", "content": system}, *messages]
        tools, variables = tools_and_variables(keys)
        return [ConversationRow(part, tools, variables) for part in _split_at_system_messages(messages)]

    def _parse_completion(self, keys: ForeignMapping) -> ConversationRow | TextRow:
        """Return the row of a prompt and its completion, both text or both messages."""
        prompt, completion = keys.pop_or_none("prompt"), keys.pop_or_none("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise DataError("the completion is empty")
            return TextRow(prompt, completion)
        given, answer = self._messages(prompt, "prompt"), self._messages(completion, "completion")
        return ConversationRow([*given, *answer], *tools_and_variables(keys), len(given))

    def _messages(self, value: Any, name: str) -> list[Message]:
        """Return a list of messages, with ShareGPT's names replaced. `DataError` for what is none."""
        if not isinstance(value, list) or not value:
            raise DataError(f'no list of "{name}"')
        messages = [_message(message, f"message {number}") for number, message in enumerate(value, 1)]
        unread = {f"{name} (of messages)" for message in messages for name in message.keys() - _MESSAGE_KEYS}
        self.unread_keys.update(dict.fromkeys(sorted(unread)))
        return messages


def _split_at_system_messages(messages: list[Message]) -> list[list[Message]]:
    """Return the conversations of a list of messages. `DataError` for one without an answer."""
    starts = [place for place, message in enumerate(messages) if place == 0 or message["role"] == "system"]
    parts = [messages[first:last] for first, last in zip(starts, [*starts[1:], len(messages)])]
    if any(all(message["role"] != "assistant" for message in part) for part in parts):
        raise DataError("a conversation without an answer: none of its messages has the role assistant")
    return parts


def _message(given: Any, where: str) -> Message:
    """Return a message with role and content. `DataError` for one without."""
    if not isinstance(given, dict):
        raise DataError(f'{where} has no "role"')
    message = {"role": _SHAREGPT_ROLES.get(str(given.get("from")), given.get("from")), "content": given.get("value")}
    message |= {name: value for name, value in given.items() if name not in ("from", "value")}
    if not isinstance(message["role"], str):
        raise DataError(f'{where} has no "role"')
    if message["role"] == "function_call":
        raise DataError(f'{where} has the role function_call; write it as the assistant\'s, with "tool_calls"')
    says_other = message.get("tool_calls") or any(isinstance(message.get(name), str) for name in _THOUGHTS)
    if not isinstance(message["content"], (str, list)) and not (message["content"] is None and says_other):
        raise DataError(f'{where} has no text as "content"')
    if (weight := message.pop("weight", None)) not in (None, 1):
        raise DataError(
            f'{where} has the "weight" {short_value(weight)}; all answers of "messages" are learnt, so leave the weight out, or '
            'give "prompt" and "completion"'
        )
    return message


def tools_and_variables(keys: ForeignMapping) -> tuple[Any, Mapping[str, Any]]:
    """Take a row's tools and the variables of its template. `DataError` if they are none."""
    tools, variables = keys.pop_or_none("tools"), keys.pop_or_none("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f'"tools" is text and no JSON: {error}') from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise DataError('"tools" is no list of objects')
    if not isinstance(variables, Mapping):
        raise DataError('"chat_template_kwargs" is no object')
    return tools or None, variables


def _explain_other_row(row: Mapping[str, Any]) -> str:
    """Return what to do with a row that is no conversation."""
    if "chosen" in row or "rejected" in row:
        return f"a row of preferences; finetune.py --finetune-task dpo reads it ({_KINDS})"
    if isinstance(row.get("text"), str):
        return f'no list of "messages": text without a prompt is read without --sft (docs/data.md); {_KINDS}'
    return f'no list of "messages": {_KINDS}, and this one has {", ".join(row) or "nothing"}'
