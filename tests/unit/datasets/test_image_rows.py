"""Rows of LLaVA's JSON as people keep them: read, refused by name, or told as not read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.image_conversations import _parse_conversation_row
from megatron.core.datasets.indexed import DataError
from tests.unit.datasets.test_images import content, picture
from tests.unit.datasets.test_multimodal import dataset, row, write

ASKED = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
ROW: dict[str, Any] = {"image": "cat.jpg", "conversations": ASKED}
PARTS = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nWhat?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
]


def parsed(given: Any) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Roles and texts with # for an image, the paths, and the keys that were not read."""
    unread: dict[str, None] = {}
    read = _parse_conversation_row(given, plain=False, unread=unread)
    messages = [(message["role"], message["content"].replace("\ufdd5", "#")) for message in read.messages]
    return messages, list(read.images), list(unread)


SAME = [("user", "#\nWhat?"), ("assistant", "A cat.")]


@pytest.mark.parametrize(
    "given",
    [
        ROW,
        {**ROW, "image": ["cat.jpg"]},
        {**ROW, "id": "7", "source": "x", "width": 3, "video": None, "tools": []},
        {"images": ["cat.jpg"], "messages": PARTS},
        {"image": "cat.jpg", "images": None, "messages": [{"role": "user", "content": "<image>\nWhat?"}, ASKED[1]]},
        {**ROW, "conversations": [{**ASKED[0], "weight": None}, {**ASKED[1], "weight": 1}]},
    ],
)
def test_a_row_is_read_in_every_spelling(given: dict[str, Any]) -> None:
    assert parsed(given) == (SAME, ["cat.jpg"], [])


def test_a_system_text_beside_the_turns_comes_first() -> None:
    assert parsed({**ROW, "system": "Be brief."})[0] == [("system", "Be brief."), *SAME]


def test_what_a_row_holds_besides_is_told() -> None:
    turns = [{**ASKED[0], "speaker": "x"}, ASKED[1]]
    assert parsed({**ROW, "difficulty": 3, "conversations": turns})[2] == ["speaker (of turns)", "difficulty"]


@pytest.mark.parametrize(
    "given, words",
    [
        ({**ROW, "video": "a.mp4"}, '"video" is not read'),
        ({**ROW, "videos": ["a.mp4"]}, '"videos" is not read'),
        ({**ROW, "audio": "a.wav"}, '"audio" is not read'),
        ({**ROW, "tools": [{}]}, '"tools" is not read'),
        ({**ROW, "images": ["a.png"]}, '"image" and "images": keep one'),
        ({**ROW, "messages": PARTS}, '"conversations" and "messages": keep one'),
        ({**ROW, "image": None}, "says <image> 1 times, and there are 0 images"),
        ({**ROW, "image": ["a", "b"]}, "says <image> 1 times, and there are 2 images"),
        ({"image": "cat.jpg", "conversations": [{"from": "human", "value": "What?"}, ASKED[1]]}, "0 times"),
        ({**ROW, "image": {"bytes": "x"}}, "neither a path nor a list"),
        ({**ROW, "conversations": [ASKED[0]]}, "without an answer"),
        ({**ROW, "conversations": [{**ASKED[0], "from": []}, ASKED[1]]}, 'turn 1 has no "from"'),
        ({**ROW, "conversations": [ASKED[0], {**ASKED[1], "weight": 0}]}, 'turn 2 has a "weight"'),
        ({**ROW, "conversations": [{**ASKED[0], "content": "x"}, ASKED[1]]}, '"value" and "content": keep one'),
        ({"images": ["a"], "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "holds the part"),
        ({"images": ["a"], "messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}, "the part"),
        ([], 'no list of "conversations"'),
        ({"conversations": "x"}, 'no list of "conversations"'),
    ],
)
def test_what_a_row_cannot_mean_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(DataError) as refused:
        parsed(given)
    assert words in str(refused.value)


def test_keys_that_are_not_read_are_named_once_for_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row("a.png", answer=f"<{number}>"), "difficulty": number} for number in range(3)]
    with caplog.at_level(logging.WARNING, "megatron"):
        dataset(write(tmp_path, rows, **{"a": content(picture(20, 30))}))
    assert caplog.text.count("what rows hold besides is not read: difficulty") == 1
