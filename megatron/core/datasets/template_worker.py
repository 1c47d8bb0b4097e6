"""The program that renders chat templates, in a process of its own: a template is data of others, and must neither hold
nor fill the process that trains or serves.

    python -I template_worker.py       reads requests, and writes replies, until its input ends

A message is its length in 8 bytes, then JSON. Request: {"template", "contexts": [variables, ...], "now": ISO time or null};
reply: {"marks_answers", "results": [{"text"} or {"problem"}, ...]}, or {"no_template": why} or {"limit": what was met}.
A template sees what transformers shows it: its globals, its `tojson`, blocks trimmed. What stands in {% generation %} is put
between OPENS and CLOSES. Only `template_sandbox.py` starts this; it imports nothing of this package.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPENS, CLOSES = "\ufdd0", "\ufdd1"  # characters that Unicode keeps out of text
MOST_CHARACTERS = 2**26  # of what a template writes
MOST_BYTES = 2**30  # of memory
_KEPT_TEMPLATES = 16
_MOST_OF_A_PROBLEM = 1000  # characters


class _GenerationTag(Extension):
    """{% generation %}: what is written inside stands between OPENS and CLOSES."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a generation block into a call of `mark`. Called by Jinja."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Macro) -> str:
        """Return the text of the block between the characters that say where it stands."""
        return OPENS + caller() + CLOSES


def _read_message(stream: BinaryIO) -> Any:
    """Return the next message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return json.loads(stream.read(int.from_bytes(head, "little")))


def _write_message(stream: BinaryIO, value: Any) -> None:
    """Write a message."""
    body = json.dumps(value).encode()  # ASCII: half of a surrogate pair comes through
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


@lru_cache(_KEPT_TEMPLATES)
def _compile_template(text: str) -> Any:
    """Return (template, whether it marks answers). Raises Jinja's errors."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    marks = any(
        isinstance(block.call.node, nodes.ExtensionAttribute)
        for block in environment.parse(text).find_all(nodes.CallBlock)
    )
    return environment.from_string(text), marks


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _explain(error: Exception) -> str:
    """Return why a template cannot be used, shortened: it may raise a text of any length."""
    try:
        return f"{error}"[:_MOST_OF_A_PROBLEM] or type(error).__name__
    except Exception:
        return type(error).__name__


def _format_time(now: str | None, form: str) -> str:
    return (datetime.now() if now is None else datetime.fromisoformat(now)).strftime(form)


def _answer(request: Any) -> Any:
    """Return the reply to a request."""
    try:
        template, marks = _compile_template(request["template"])
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # whatever a template of others raises is told to who asked
        return {"no_template": _explain(error)}
    clock = partial(_format_time, request["now"])
    results: list[dict[str, str]] = []
    for context in request["contexts"]:
        try:
            text = template.render({"strftime_now": clock, **context})
        except MemoryError:
            return {"limit": "memory"}
        except Exception as error:
            results.append({"problem": _explain(error)})
            continue
        if len(text) > MOST_CHARACTERS:
            return {"limit": "text"}
        results.append({"text": text})
    return {"marks_answers": marks, "results": results}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (request := _read_message(sys.stdin.buffer)) is not None:
        _write_message(sys.stdout.buffer, _answer(request))


if __name__ == "__main__":
    main()
