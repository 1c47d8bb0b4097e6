"""Keys and values are the same wherever they lie: read in place, gathered, or by turns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron.core.kernels.ops import paged
from megatron.inference import cache, engine_setup
from tests.unit.inference.serving import engine_of, greedy, network, prompts, slowly


@pytest.mark.parametrize("kind", ["rope", "window", "sinks and windows", "latent", "one group"])
@pytest.mark.parametrize("place", ["in place", "gathered", "paged"])
def test_texts_are_the_same_wherever_they_lie(monkeypatch: pytest.MonkeyPatch, place: str, kind: str) -> None:
    if place == "gathered":
        monkeypatch.setattr(cache, "_contiguous_cache_views", lambda *_: [])
    if place == "paged":
        monkeypatch.setattr(engine_setup, "choose_paged_attention", lambda build, config: paged.paged_attention)
    monkeypatch.setattr(cache, "_CALL", 0)
    read: Counter[str] = Counter()
    for way in (cache.EqualQueryLengthGroup, cache._ContiguousCacheView):
        monkeypatch.setattr(
            way,
            "last_keys_and_values",
            lambda self, *how, old=way.last_keys_and_values, name=way.__name__: (read.update([name]), old(self, *how))[
                1
            ],
        )
    model, texts = network(kind), prompts(6, longest=20)
    settings: dict[str, Any] = {"block": 3, "tokens": 9, "together": 4, "sharing": False}
    replies = engine_of(model, **settings).run([greedy(text, 12 + number) for number, text in enumerate(texts)])
    assert [list(reply.ids) for reply in replies] == [
        slowly(model, text, 12 + number)[0] for number, text in enumerate(texts)
    ]
    # Where blocks are read by a kernel, only prompts that begin are attention by another.
    assert (
        set(read)
        == {
            "in place": {"_ContiguousCacheView"},
            "gathered": {"EqualQueryLengthGroup"},
            "paged": {"_ContiguousCacheView"},
        }[place]
    )


def test_texts_as_long_and_as_far_apart_are_one_view() -> None:
    spans = [cache.SequenceSpan(1, 5, blocks) for blocks in ((1, 2, 3), (4, 5, 6), (7, 8, 9))]
    assert cache._contiguous_cache_views(spans, 2, 4) == [cache._ContiguousCacheView(4, 1, 3, 6, 2, 6)]
    assert cache._contiguous_cache_views([spans[0], spans[2]], 2, 0) == [cache._ContiguousCacheView(0, 1, 2, 6, 2, 12)]
    longer = cache.SequenceSpan(1, 6, (12, 13, 14, 15))
    assert [view.rows for view in cache._contiguous_cache_views([longer, *spans], 2, 0)] == [1, 3]
    assert cache._contiguous_cache_views([*spans, cache.SequenceSpan(1, 5, (12, 14, 15))], 2, 0) == [], (
        "one of them is scattered"
    )
