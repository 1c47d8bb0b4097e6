"""Token windows: which ids a sample holds, and what its masks and positions say, against plain loops."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.gpt import GPTDataset, GPTSampleOptions
from megatron.core.datasets.index_map import IndexCacheFolder
from megatron.core.datasets.indexed import DataError, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.mock import MockTokens

EOD = 9


def write(prefix, documents, dtype=np.uint16):
    """A pair of the given documents."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for ids in documents:
            builder.add_sequence(ids)
            builder.end_document()
    return IndexedDataset(prefix)


def dataset(source, *, length=8, samples=None, first=0, last=None, cache=IndexCacheFolder(None), **options):
    """A training split of `source`."""
    window = GPTSampleOptions(sequence_length=length, vocab_size=options.pop("vocab_size", 10), eod=EOD, **options)
    sequences = range(first, len(source.sequence_lengths) if last is None else last)
    return GPTDataset(source, window, SplitRequest(sequences, samples, "train", cache), seed=1234)


def random_documents(count, seed=0):
    """Documents of digits, each ending in EOD."""
    random = np.random.default_rng(seed)
    return [random.integers(1, EOD, random.integers(0, 13)).tolist() + [EOD] for _ in range(count)]


@pytest.mark.parametrize("mmap", [True, False])
def test_samples_are_the_windows_of_the_shuffled_token_stream(tmp_path, mmap):
    documents = random_documents(40)
    write(tmp_path / "data", documents)
    data = dataset(IndexedDataset(tmp_path / "data", mmap), samples=60, first=5, last=35)
    order = data.document_index.tolist()
    assert sorted(order) == sorted(list(range(5, 35)) * (len(order) // 30)) and len(order) > 30
    stream = [token for number in order for token in documents[number]]
    assert len(data) == (len(stream) - 1) // 8 >= 60
    for index in range(len(data)):
        start = int(data.shuffle_index[index]) * 8
        sample = data[index]
        assert sample["tokens"].tolist() == stream[start : start + 8]
        assert sample["labels"].tolist() == stream[start + 1 : start + 9]
        assert sample["position_ids"].tolist() == list(range(8))
        assert sample["loss_mask"].tolist() == [1.0] * 8
        assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
        assert [sample[key].dtype.name for key in sorted(sample)] == ["int64", "float32", "int64", "int64"]


def test_options_on_document_ends_equal_a_loop_over_positions(tmp_path):
    source = write(tmp_path / "data", random_documents(40))
    plain = dataset(source, samples=40)
    marked = dataset(source, samples=40, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    ends_seen = set()
    for index in range(40):
        tokens = plain[index]["tokens"].tolist()
        position, document, expected = 0, 0, []
        for place, token in enumerate(tokens):
            expected.append((position, document, float(token != EOD)))
            position, document = (0, document + 1) if token == EOD else (position + 1, document)
            if token == EOD:
                ends_seen.add(place)
        sample = marked[index]
        result = zip(sample["position_ids"].tolist(), sample["document_ids"].tolist(), sample["loss_mask"].tolist())
        assert list(result) == expected
        assert sample["tokens"].tolist() == tokens
        assert sample["document_ids"].dtype == np.int64 and sample["loss_mask"].dtype == np.float32
    assert ends_seen == set(range(8)), "documents end at every place, the first and the last too"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, EOD), min_size=9, max_size=9), st.booleans(), st.booleans(), st.booleans(), st.booleans()
)
def test_options_hold_together_with_padding_for_any_window(window, positions, apart, masked, padded):
    pad = 7 if padded else -1
    lengths, starts = np.array([9]), np.array([0, 1])
    source = SimpleNamespace(
        prefix="x",
        sequence_lengths=lengths,
        document_indices=starts,
        get=lambda sequence, offset=0, length=None: np.array(window)[
            offset : None if length is None else offset + length
        ],
    )
    sample = dataset(source, pad=pad, reset_position_ids=positions, reset_attention_mask=apart, eod_mask_loss=masked)[0]
    tokens, labels = window[:-1], window[1:]
    assert sample["tokens"].tolist() == [0 if token == pad else token for token in tokens]
    assert sample["labels"].tolist() == [0 if label == pad else label for label in labels]
    assert sample["loss_mask"].tolist() == [
        float(label != pad and not (masked and token == EOD)) for token, label in zip(tokens, labels)
    ]
    since = [next((back for back in range(place) if tokens[place - back - 1] == EOD), place) for place in range(8)]
    assert sample["position_ids"].tolist() == (since if positions else list(range(8)))
    if apart:
        # A query sees a key before it unless an end of document stands at the key, or between the two.
        seen = sample["document_ids"][:, None] == sample["document_ids"][None, :]
        assert all(seen[query, key] == (EOD not in tokens[key:query]) for query in range(8) for key in range(query + 1))
    else:
        assert "document_ids" not in sample


@pytest.mark.parametrize(
    "option, key",
    [("reset_position_ids", "position_ids"), ("reset_attention_mask", "document_ids"), ("eod_mask_loss", "loss_mask")],
)
def test_each_option_changes_only_its_own_array(tmp_path, option, key):
    source = write(tmp_path / "data", [[1, EOD, 2, 3, EOD, 4, 5, 6, 7, 8]])
    plain, changed = dataset(source)[0], dataset(source, **{option: True})[0]
    different = [name for name in changed if name not in plain or (plain[name] != changed[name]).any()]
    assert different == [key]


def test_padding_has_no_loss_and_is_fed_as_zero(tmp_path):
    source = write(tmp_path / "data", [[1, 7, 2, 7, 7, 3, 4, 5, 6]])
    sample = dataset(source, pad=7)[0]
    assert sample["tokens"].tolist() == [1, 0, 2, 0, 0, 3, 4, 5]
    assert sample["labels"].tolist() == [0, 2, 0, 0, 3, 4, 5, 6]
    assert sample["loss_mask"].tolist() == [0, 1, 0, 0, 1, 1, 1, 1]


def test_padding_at_the_first_place_only_is_fed_as_zero(tmp_path):
    sample = dataset(write(tmp_path / "data", [[7, 1, 2, 3, 4, 5, 6, 8, EOD]]), pad=7)[0]
    assert sample["tokens"].tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert sample["loss_mask"].tolist() == [1.0] * 8


@pytest.mark.parametrize("pad", [-1, 0])
def test_a_kept_partial_sample_is_padded_without_loss(tmp_path, pad):
    data = dataset(write(tmp_path / "data", [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, EOD]]), keep_partial=True, pad=pad)
    assert len(data) == 2
    short = data[data.shuffle_index.tolist().index(1)]
    assert short["tokens"].tolist() == [1, 2, 3, EOD, 0, 0, 0, 0]
    assert short["labels"].tolist() == [2, 3, EOD, 0, 0, 0, 0, 0]
    assert short["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("token, dtype", [(10, np.uint16), (65535, np.uint16), (-1, np.int32)])
def test_an_id_outside_the_vocabulary_is_named_with_its_file(tmp_path, token, dtype):
    source = write(tmp_path / "data", [[1, 2, 3, token, 5, 6, 7, 8, 8, 8]], dtype)
    with pytest.raises(DataError, match=rf"data holds the id {token}, but the vocabulary has 10 ids"):
        dataset(source)[0]


@pytest.mark.parametrize("documents, samples", [([[1] * 8], None), ([[], []], 5)])
def test_a_split_too_small_for_one_sample_is_refused(tmp_path, documents, samples):
    with pytest.raises(DataError, match=r"train split of .*data holds .* need at least 9: .*--split"):
        dataset(write(tmp_path / "data", documents), samples=samples)


def test_a_sample_longer_than_the_data_repeats_it(tmp_path):
    sample = dataset(write(tmp_path / "data", [[1, 2, 3]]), samples=1)[0]
    assert sample["tokens"].tolist() == [1, 2, 3, 1, 2, 3, 1, 2]


def test_asking_beyond_the_samples_is_refused(tmp_path):
    data = dataset(write(tmp_path / "data", random_documents(20)))
    for index in (-1, len(data)):
        with pytest.raises(IndexError, match=f"sample {index} of {len(data)}"):
            data[index]


def test_a_cache_is_not_used_for_data_that_was_written_anew(tmp_path):
    cache = IndexCacheFolder(tmp_path / "cache")
    first = dataset(write(tmp_path / "data", random_documents(20)), samples=5, cache=cache)
    same = dataset(IndexedDataset(tmp_path / "data"), samples=5, cache=cache)
    assert len(list(cache.folder.glob("*-GPTDataset-train-*.npy"))) == 3
    assert [array.tolist() for array in same[3].values()] == [array.tolist() for array in first[3].values()]
    assert not same.shuffle_index.flags.writeable, "a built array is its own; one that is found is mapped"
    changed = random_documents(20, seed=1)
    anew = dataset(write(tmp_path / "data", changed), samples=5, cache=cache)
    stream = [token for number in anew.document_index.tolist() for token in changed[number]]
    start = int(anew.shuffle_index[0]) * 8
    assert anew[0]["tokens"].tolist() == stream[start : start + 8]
    assert len(list(cache.folder.glob("*-GPTDataset-train-*.npy"))) == 6


def test_a_cache_is_not_used_for_the_same_documents_in_another_order(tmp_path):
    cache, documents = IndexCacheFolder(tmp_path / "cache"), random_documents(20)
    dataset(write(tmp_path / "data", documents), samples=5, cache=cache)
    place = next(place for place in range(20) if len(documents[place]) != len(documents[place + 1]))
    documents[place : place + 2] = reversed(documents[place : place + 2])
    source = write(tmp_path / "data", documents)
    retained, built = dataset(source, samples=5, cache=cache), dataset(source, samples=5)
    assert [retained[number]["tokens"].tolist() for number in range(len(retained))] == [
        built[number]["tokens"].tolist() for number in range(len(built))
    ]


def test_files_replaced_under_a_running_dataset_are_noticed(tmp_path):
    data = dataset(write(tmp_path / "data", [[1] * 30, [2] * 30]), samples=5)
    data.source = write(tmp_path / "data", [[1] * 3, [2] * 3])
    with pytest.raises(DataError, match="does not fit its data"):
        [data[index] for index in range(5)]


def test_mock_sequences_count_up_modulo_the_vocabulary_and_end_in_eod():
    source = MockTokens(vocab_size=100, eod=99)
    lengths = np.random.default_rng(0).integers(low=1, high=4096, size=100000, dtype=np.int32)
    assert (source.sequence_lengths == lengths).all()
    for number in (0, 1, int(lengths.argmin()), int(lengths.argmax())):
        length = int(lengths[number])
        whole = [count % 100 for count in range(1, length)] + [99]
        assert source.get(number).tolist() == whole
        assert source.get(number, length // 2).tolist() == whole[length // 2 :]
        assert source.get(number, 0, length // 2).tolist() == whole[: length // 2]
        assert source.get(number, length // 3, length - length // 3).tolist() == whole[length // 3 :]
        assert source.get(number, length).tolist() == []
        with pytest.raises(IndexError, match="mock sequence"):
            source.get(number, 1, length)
