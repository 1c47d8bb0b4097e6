"""Records out of lines that may hold anything, against a plain reading of them."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.datasets.ingest.encode import EncodeOptions, RecordEncoder
from megatron.core.datasets.ingest.input_spans import InputPosition, RecordChunk
from megatron.core.datasets.ingest.records import PLACES, parse_records

# JSON values of all kinds, objects with the keys in question more often than others.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "b", ""]), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(st.sampled_from('a\n\0\u2028\ufeff\ud800\udc00\U0001f30d\\"'), max_size=6) | st.text(max_size=6)
DOCUMENTS = st.fixed_dictionaries({"text": TEXT | ANY}, optional={"b": TEXT | ANY})


@st.composite
def broken_lines(draw):
    """Lines of JSON, some of them with bytes changed, cut out or put in; also lines of anything."""
    line = draw(
        st.builds(
            lambda value, ascii: json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass"),
            DOCUMENTS,
            st.booleans(),
        )
        | st.binary(max_size=20)
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        low = draw(st.integers(0, len(line)))
        line = (
            line[:low]
            + draw(st.binary(max_size=2) | st.sampled_from([b'"', b"\\u", b"\\ud800", b"{", b"}", b"\0"]))
            + line[low + draw(st.integers(0, 2)) :]
        )
    return draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf"])) + line.replace(b"\n", b" ")


def plainly(line, keys):
    """The texts of a line, or None when it is none that can be tokenized."""
    try:
        content = json.loads(line.decode("utf-8-sig"))
        texts = [content[key] for key in keys] if type(content) is dict else [None]
        for text in texts:
            text.encode()
    except (ValueError, LookupError, AttributeError):
        return None
    return texts if all(type(text) is str for text in texts) else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(broken_lines(), max_size=8), st.booleans(), st.sampled_from([("text",), ("text", "b")]))
def test_lines_of_anything_are_documents_or_counted(lines, ends, keys):
    content = b"\n".join(lines) + b"\n" * ends
    rows = content.split(b"\n")
    rows = rows[:-1] if not rows[-1] else rows
    chunk = RecordChunk(
        "jsonl", content, InputPosition(records=100), InputPosition(records=100 + len(rows)), len(content), len(content)
    )
    records = parse_records(chunk, keys)
    expected = [(number, texts) for number, line in enumerate(rows, 101) if (texts := plainly(line, keys)) is not None]
    assert records.numbers == [number for number, _ in expected]
    assert [[text for (text,) in texts] for texts in zip(*records.texts)] == [texts for _, texts in expected]
    assert sum(drop.count for drop in records.drops.values()) == len(rows) - len(expected)
    named = {number for drop in records.drops.values() for number in drop.records}
    assert named.isdisjoint(records.numbers) and named <= set(range(101, 101 + len(rows)))


def test_all_bad_lines_are_counted_and_the_first_are_named():
    content = b"{}\n" * 7 + b'{"text": "a"}\n' + b"{}\n"
    (drop,) = parse_records(
        RecordChunk("jsonl", content, InputPosition(), InputPosition(), 0, 0), ("text",)
    ).drops.values()
    assert (drop.count, drop.records) == (8, [1, 2, 3, 4, 5][:PLACES])


def numbers_encoder(**facts):
    """An encoder of texts that are numbers below 100; it cannot read others."""
    return RecordEncoder(EncodeOptions(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=101), **facts))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(*[st.sampled_from(["", "1", "2 3", "x", "4 5 6", "101"])] * 2), max_size=8), st.booleans())
def test_what_the_tokenizer_cannot_read_is_left_out_under_every_key(rows, append_eod):
    encoder = numbers_encoder(keys=("a", "b"), append_eod=append_eod)
    content = b"".join(json.dumps({"a": a, "b": b}).encode() + b"\n" for a, b in rows)
    chunk = RecordChunk("jsonl", content, InputPosition(), InputPosition(), len(content), len(content))
    encoded = encoder.encode_documents(encoder.parse_chunk(chunk))
    good = [(a, b) for a, b in rows if not {a, b} & {"x", "101"}]
    for column, texts in zip(encoded.columns, zip(*good) if good else [(), ()]):
        documents = [[int(word) for word in text.split()] + [100] * (append_eod and bool(text)) for text in texts]
        assert column.ids.tolist() == sum(documents, [])
        assert column.lengths.tolist() == [len(ids) for ids in documents if ids]
        assert column.sequences.tolist() == [int(bool(ids)) for ids in documents]
    bad = [number for number, row in enumerate(rows, 1) if set(row) & {"x", "101"}]
    assert [drop.count for drop in encoded.drops.values()] == [len(bad)] * bool(bad)
    assert [drop.records for drop in encoded.drops.values()] == [bad[:PLACES]] * bool(bad)


def test_a_tokenizer_whose_memory_grows_is_built_again(monkeypatch):
    memory = iter([100, 110, 100 + 2**27, 300, 310, 300 + 2**27])
    monkeypatch.setattr("megatron.core.datasets.ingest.encode._resident_bytes", lambda: next(memory))
    encoder = numbers_encoder()
    chunk = RecordChunk("jsonl", b'{"text": "7"}', InputPosition(), InputPosition(), 0, 0)
    seen = []
    for _ in range(6):
        seen.append(encoder.tokenizer)
        assert encoder.encode_documents(encoder.parse_chunk(replace(chunk))).columns[0].ids.tolist() == [7]
    first, second = seen[0], seen[3]
    assert seen == [first, first, first, second, second, second] and first is not second
    assert encoder.tokenizer is not second
