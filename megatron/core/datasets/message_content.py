"""Messages as a chat template reads them: what their content may be differs from template to template.

Some templates read a text, some a list of parts ({"type": "text", "text": ...}), some both; one that reads the other writes
nothing of it, or Python's spelling of a list, and does not complain. So each role is tried once with a probe, and content is
given in the form that the template reads; what it would leave out is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.template_sandbox import RenderError

Message = Mapping[str, Any]
PreparedMessage = dict[str, Any]
Form = Literal["text", "parts", "either", "left out", "unknown"]
# Renders several (messages, whether an invitation to answer follows).
Render = Callable[[Sequence[tuple[Sequence[Message], bool]]], list[str | RenderError]]

_PROBE = "probe7"
_QUESTION = {"role": "user", "content": "q"}
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # where thoughts stand, the most usual name first


class ContentForms:
    """The forms of content that one template reads."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._forms: dict[str, Form] = {}

    def prepare(self, messages: Sequence[Message]) -> list[PreparedMessage]:
        """Return the messages as the template is given them: no nulls, thoughts under each of their names, content in a form
        that it reads. `DataError` for what it would leave out.
        """
        return [self._prepare(message, f"message {number}") for number, message in enumerate(messages, 1)]

    def _prepare(self, message: Message, where: str) -> PreparedMessage:
        given = {name: value for name, value in message.items() if value is not None}
        thoughts = next((given[name] for name in _THOUGHTS if name in given), None)
        result = given if thoughts is None else {"thinking": thoughts, **given, "reasoning_content": thoughts}
        if result.get("tool_calls") and not self._writes_tool_calls:
            raise DataError(f"{where}: the chat template writes nothing of tool_calls; write the call as content")
        if "content" in result:
            result["content"] = self._content(result["content"], result["role"], where)
        return result

    def _content(self, content: Any, role: str, where: str) -> Any:
        """Return the content of a message in a form that the template reads. `DataError` for what it would leave out."""
        form = self._form(role)
        if form == "left out" and content:
            raise DataError(
                f"{where}: the chat template writes nothing of messages with the role {role}; give the text another role"
            )
        if isinstance(content, list):
            parts = [_checked_part(part, where, form) for part in content]
            return "".join(part["text"] for part in parts) if form == "text" else parts
        return [{"type": "text", "text": content}] if form == "parts" else content

    def _form(self, role: str) -> Form:
        """Return the form of content that the template reads in messages of a role, found once by a probe."""
        if role not in self._forms:
            parts = [{"type": "text", "text": _PROBE}]
            as_text, as_parts = self._render(
                [(self._conversation(role, content), False) for content in (_PROBE, parts)]
            )
            reads_text = not isinstance(as_text, RenderError) and _PROBE in as_text
            reads_parts = not isinstance(as_parts, RenderError) and _PROBE in as_parts and not _spells_list(as_parts)
            self._forms[role] = (
                "either"
                if reads_text and reads_parts
                else "text"
                if reads_text
                else "parts"
                if reads_parts
                else "unknown"
                if isinstance(as_text, RenderError)
                else "left out"
            )
        return self._forms[role]

    def _conversation(self, role: str, content: Any) -> list[Message]:
        """Return a conversation with a message of a role in its usual place."""
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        parts_of_user = [{"type": "text", "text": "q"}] if self._form("user") == "parts" else "q"
        question = {**_QUESTION, "content": parts_of_user}
        if role == "assistant":
            return [question, message]
        if role in _TOOL_ROLES:
            return [question, self._tool_call("f"), {**message, "name": "f", "tool_call_id": "123456789"}]
        return [message, question]

    @cached_property
    def _writes_tool_calls(self) -> bool:
        """Whether the template writes the name of a tool that is called, as far as a probe can tell."""
        question, _ = self._conversation("assistant", "")
        (text,) = self._render([([question, self._tool_call(_PROBE)], False)])
        return isinstance(text, RenderError) or _PROBE in text

    def _tool_call(self, name: str) -> Message:
        """Return an assistant's message that calls a tool."""
        content = [{"type": "text", "text": ""}] if self._form("assistant") == "parts" else ""
        call = {"type": "function", "id": "123456789", "function": {"name": name, "arguments": {}}}
        return {"role": "assistant", "content": content, "tool_calls": [call]}


def with_other_arguments(messages: Sequence[PreparedMessage]) -> list[PreparedMessage] | None:
    """Return the messages with the arguments of tool calls as objects where they are JSON text, and as text where they are
    objects: some templates read one alone. None if there are no such calls.
    """
    result, changed = [], False
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            other = [_with_other_arguments(call) for call in calls]
            changed = changed or other != calls
            message = {**message, "tool_calls": other}
        result.append(message)
    return result if changed else None


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every string in it, but not to keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(part, change) for key, part in value.items()}
    return [map_strings(part, change) for part in value] if isinstance(value, list) else value


def strings_of(value: Any) -> Iterator[str]:
    """Yield every string of a JSON value, but not keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from strings_of(part)


def _checked_part(part: Any, where: str, form: Form) -> dict[str, Any]:
    """Return a part of a content without nulls. `DataError` for one that is no text."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise DataError(f"{where}: a part of its content is neither text nor an object")
    given = {name: value for name, value in part.items() if value is not None}
    if isinstance(given.get("text"), str) and given.get("type", "text") == "text":
        return {"type": "text", **given}
    kind = given.get("type", "no type")
    if kind in _THOUGHTS and form in ("parts", "either"):
        return given
    raise DataError(
        f"{where}: its content has a part of the type {kind}, and this network reads text; conversations about images are "
        "read by pretrain_vlm.py (docs/multimodal.md)"
        if kind in ("image", "image_url", "video", "audio", "input_audio")
        else f"{where}: its content has a part of the type {kind}; parts are of the type text"
    )


def _spells_list(text: str) -> bool:
    """Whether a text shows the list of parts itself, as Python or JSON spells it."""
    return "'type'" in text or '"type"' in text


def _with_other_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            other: Any = json.loads(arguments)
        except ValueError:
            return call
    elif isinstance(arguments, Mapping):
        other = json.dumps(arguments, ensure_ascii=False)
    else:
        return call
    assert isinstance(function, Mapping), "it has arguments"
    changed = {**function, "arguments": other}
    return {**call, "function": changed} if "function" in call else changed
