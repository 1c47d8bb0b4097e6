"""Chat templates of the kinds that published tokenizers have, conversations for them, and a tokenizer with their marks.

The templates are written for these tests, small, each with what makes its kind difficult.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]

_MERGES = (("\u010a", "\u010a"), ("\u010a\u010a", "\u010a"), ("a", "n"), ("t", "h"), ("th", "i"), ("\u0120", "t"))
_WORDS = re.compile(r"<[^<>\s'\"+{}]{1,40}>|\[/?[A-Z_]+\]")
_NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def parts(message: Message) -> Message:
    """The message with its text as a list of parts."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "n"}},
                "required": [],
            },
        },
    }
]
CALL = answer(
    "", tool_calls=[{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"a": 1}}}]
)
TEXT_CALL = answer(
    "", tool_calls=[{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": '{"a": 1}'}}]
)
RESULT = {"role": "tool", "content": "42", "name": "add", "tool_call_id": "123456789"}
CONVERSATIONS: dict[str, tuple[list[Message], Any]] = {
    "one turn": ([user("Q1"), answer("A1")], None),
    "three turns": ([user("Q1"), answer("A1"), user("Q2"), answer("A2"), user("Q3"), answer("A3")], None),
    "a system message": ([{"role": "system", "content": "SYS"}, user("Q1"), answer("A1")], None),
    "a tool is called": ([user("Q1"), CALL, RESULT, answer("A2")], TOOLS),
    "a tool is called in the past": ([user("Q1"), CALL, RESULT, answer("A2"), user("Q2"), answer("A3")], TOOLS),
    "arguments as text": ([user("Q1"), TEXT_CALL, RESULT, answer("A2")], TOOLS),
    "thoughts in content": (
        [user("Q1"), answer("<think>\nT1\n</think>\n\nA1"), user("Q2"), answer("<think>\nT2\n</think>\n\nA2")],
        None,
    ),
    "thoughts apart": (
        [user("Q1"), answer("A1", reasoning_content="T1"), user("Q2"), answer("A2", reasoning_content="T2")],
        None,
    ),
    "thoughts around a tool": (
        [
            user("Q1"),
            {**CALL, "reasoning_content": "T1"},
            RESULT,
            answer("A2", reasoning_content="T2"),
            user("Q2"),
            answer("A3", reasoning_content="T3"),
        ],
        TOOLS,
    ),
    "parts": ([parts(user("Q1")), parts(answer("A1"))], None),
    "space around": ([user("  Q1 \n"), answer("\n\n A1\t\n"), user("Q2\n\n"), answer(" A2")], None),
    "nothing said": ([user("Q1"), answer(""), user("Q2"), answer("A2")], None),
    "nulls": ([{**user("Q1"), "tool_calls": None}, {**answer("A1"), "name": None, "reasoning_content": None}], None),
    "the last word is the user's": ([user("Q1"), answer("A1"), user("Q2")], None),
}

_LOOP = "{%- for m in messages %}"
KINDS: dict[str, str] = {
    # The past loses its thoughts; they are cut out of the content.
    "thinks": (
        "{%- set ns = namespace(last=messages | length) %}"
        "{%- for m in messages[::-1] %}{%- if m.role == 'user' and ns.last == messages | length %}"
        "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}"
        + _LOOP
        + "{%- set content = m.content if m.content is string else '' %}"
        "{%- if m.role == 'assistant' %}{%- set thought = '' %}"
        "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
        "{%- elif '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\\n' }}"
        "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
        "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
        "{%- else %}{{- content }}{%- endif %}"
        "{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' + call.function.name + call.function.arguments | tojson"
        " + '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
        "{%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
    ),
    # The invitation opens thoughts that a stored answer does not have.
    "cuts thoughts": (
        "{{ bos_token }}" + _LOOP + "{%- if m.role == 'assistant' %}"
        "{{- '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}"
        "{%- elif m.role == 'user' %}{{- '<\uff5cUser\uff5c>' + m.content }}{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{%- endif %}"
    ),
    # The last answer has an end of its own; thoughts are a message of their own, and the clock is asked.
    "channels": (
        "{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}"
        + _LOOP
        + "{%- if m.role == 'assistant' %}"
        "{%- if m.thinking and loop.last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
    ),
    # The end of a text stands once, behind everything; marks take the space behind them.
    "ends once": (
        _LOOP + "{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}{#- <|user|> <|system|> <|assistant|> -#}"
    ),
    # Nothing ends an answer but the beginning of the next message.
    "no end": (
        "[MASK]<sop>"
        + _LOOP
        + "{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n<think></think>\\n' + m.content.strip() }}"
        "{%- else %}{{- '<|user|>\\n' + m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    ),
    # No invitation, trimmed text, and a system message that joins the user's.
    "turns": (
        "{{- bos_token }}{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}"
        "{%- for m in (messages[1:] if first else messages) %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if m.role == 'user' %}{{- '[INST] ' + (first if loop.first else '') + m.content | trim + ' [/INST]' }}"
        "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
    ),
    # Content is a list of parts, and a text is passed over.
    "reads parts": (
        "<|begin_of_text|>"
        + _LOOP
        + "{{- m.role | capitalize + ':' }}{%- for part in m.content %}{%- if part.type == 'text' %}{{- ' ' + part.text }}"
        "{%- endif %}{%- endfor %}{{- '<end_of_utterance>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"
    ),
    "reads both": (
        _LOOP + "{{- '<start_of_turn>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}{%- generation %}{%- if m.content is string %}{{- m.content }}{%- else %}"
        "{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}{{- '<end_of_turn>\\n' }}{%- endgeneration %}"
        "{%- elif m.content is string %}{{- m.content + '<end_of_turn>\\n' }}{%- else %}"
        "{%- for part in m.content %}{{- part.text }}{%- endfor %}{{- '<end_of_turn>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>assistant\\n' }}{%- endif %}"
    ),
}


def save_tokenizer(folder: Path, template: str) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer whose vocabulary has the template's marks; return it as transformers reads it."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [left + right for left, right in _MERGES]
    bpe = tokenizers.Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=list(_MERGES))
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    words = sorted({"<s>", "</s>", "<pad>", *_NOT_SPECIAL, *_WORDS.findall(template)})
    strips = "<|user|>" in words and "<|end|>" in words  # as Phi-3's do
    bpe.add_tokens(
        [
            tokenizers.AddedToken(
                word, special=word not in _NOT_SPECIAL, normalized=False, rstrip=strips and "|" in word
            )
            for word in words
        ]
    )
    theirs = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    return theirs
