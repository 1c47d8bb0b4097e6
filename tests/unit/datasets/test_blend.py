"""Blends: parsing, the greedy order against the plain rule, sizes, and the datasets of a whole run."""

import json
import logging
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.data import DataConfig
from megatron.core.datasets import blend as blend_module
from megatron.core.datasets.blend import BlendedDataset, build_gpt_datasets, build_split_datasets, data_source_usage
from megatron.core.datasets.blend_index import blend_order
from megatron.core.datasets.data_splits import parse_blend, parse_split, plan_data_splits
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.gpt import GPTDataset, GPTSampleOptions
from megatron.core.datasets.indexed import DataError, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.text_kinds import maskable_pad_id
from megatron.core.tokenizers.base import tokenizer_fingerprint_fields
from megatron.core.tokenizers.build import ByteTokenizer, NullTokenizer


def greedy(weights, size):
    """The rule itself, one step after the other."""
    drawn, order = [0] * len(weights), []
    for step in range(size):
        lag = [weight * float(max(step, 1)) - count for weight, count in zip(weights, drawn)]
        chosen = lag.index(max(lag))
        order.append((chosen, drawn[chosen]))
        drawn[chosen] += 1
    return order


def exhaustive(sizes):
    """The rule that drops a dataset once it is spent."""
    total, drawn, order = sum(sizes), [0] * len(sizes), []
    unspent = set(range(len(sizes)))
    while unspent:
        lag = {i: sizes[i] / total * float(max(len(order), 1)) - drawn[i] for i in sorted(unspent)}
        chosen = max(lag, key=lambda i: (lag[i], -i))
        order.append((chosen, drawn[chosen]))
        drawn[chosen] += 1
        if drawn[chosen] == sizes[chosen]:
            unspent.remove(chosen)
    return order


def as_pairs(arrays):
    """(dataset, sample) of every step."""
    assert [array.dtype for array in arrays] == [np.int16, np.int64]
    return list(zip(*(array.tolist() for array in arrays)))


RANDOM = np.random.default_rng(3)
WEIGHTS = {
    "one": [1.0],
    "equal": [1.0] * 7,
    "tenths": [1.0, 2.0, 3.0, 4.0],
    "random": RANDOM.random(8).tolist(),
    "many": RANDOM.random(60).tolist(),
    "steep": [1 / (i + 1) ** 2 for i in range(20)],
    "tiny": [1.0, 1e-3, 1e-4, 1e-5, 1e-9],
    "equally tiny": [0.6, 0.4] + [1e-4] * 20,
    "wild": np.exp(RANDOM.normal(0, 4, 30)).tolist(),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_order_of_a_blend_is_the_greedy_rule_step_by_step(name):
    weights = np.array(WEIGHTS[name]) / sum(WEIGHTS[name])
    expected = greedy(weights.tolist(), 20_000)
    for size in (1, 2, 255, 256, 257, 511, 513, 4999, 20_000):
        assert as_pairs(blend_order(weights, size)) == expected[:size], size


def test_weights_in_proportion_to_sizes_draw_every_sample_once():
    random = np.random.default_rng(1)
    for _ in range(30):
        sizes = random.integers(1, random.choice([3, 50, 800]), random.integers(1, 9)).tolist()
        result = as_pairs(blend_order(np.array(sizes) / sum(sizes), sum(sizes)))
        assert result == exhaustive(sizes)
        assert sorted(result) == [(i, sample) for i, size in enumerate(sizes) for sample in range(size)]


def test_a_million_samples_of_eight_datasets_are_ordered():
    weights = np.random.default_rng(0).random(8)
    datasets, _ = blend_order(weights / weights.sum(), 1_000_000)
    assert abs(np.bincount(datasets) - weights / weights.sum() * 1_000_000).max() < 1


@pytest.mark.parametrize(
    "words, prefixes, weights",
    [
        (["a"], ("a",), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["a", "b"], ("a", "b"), None),
        (["30", "a", "70", "b"], ("a", "b"), (0.3, 0.7)),
        (["1.0", "a"], ("a",), (1.0,)),
        (["1", "2", "3"], ("1", "2", "3"), None),
        (["3e0", "a", "1", "2"], ("a", "2"), (0.75, 0.25)),
    ],
)
def test_blend_lists_are_prefixes_or_weights_and_prefixes(words, prefixes, weights):
    blend = parse_blend(words, "--data-path")
    assert (blend.prefixes, blend.weights) == (prefixes, weights)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--data-path names no dataset"),
        (["0.3", "a", "b", "c"], "mixes datasets with and without a weight: 'b' stands"),
        (["0", "a", "1", "b"], "gives a the weight 0.0"),
        (["-1", "a", "1", "b"], "gives a the weight -1.0"),
        (["nan", "a", "1", "b"], "gives a the weight nan"),
    ],
)
def test_blend_lists_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_blend(words, "--data-path")


@pytest.mark.parametrize(
    "text, shares",
    [
        ("969, 30, 1", [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("90,10", [(0.0, 0.9), (0.9, 1.0), None]),
        ("1", [(0.0, 1.0), None, None]),
        ("0,0,5", [None, None, (0.0, 1.0)]),
        ("[.5/.25/.25]", [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]),
    ],
)
def test_a_split_is_three_shares(text, shares):
    result = parse_split(text)
    assert [share is None for share in result] == [share is None for share in shares]
    assert [share for share in result if share] == [pytest.approx(share) for share in shares if share]


@pytest.mark.parametrize("text", ["", "0,0", "1,2,3,4", "90,-10,0", "1.2.3", "most of it"])
def test_a_split_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match="--split"):
        parse_split(text)


@pytest.fixture
def prefixes(tmp_path):
    """Three pairs a, b, c whose ids are all 1, 2 and 3, of 40, 80 and 20 documents of 11 tokens."""
    for number, (name, count) in enumerate([("a", 40), ("b", 80), ("c", 20)], 1):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for _ in range(count):
                builder.add_sequence([number] * 11)
                builder.end_document()
    return [str(tmp_path / name) for name in "abc"]


def build(config, train, valid=0, test=0, tokenizer=ByteTokenizer(), length=10):
    """The datasets of a run with samples of 10 tokens."""
    return build_gpt_datasets(
        config,
        sequence_length=length,
        seed=1234,
        train_samples=train,
        valid_samples=valid,
        test_samples=test,
        tokenizer=tokenizer,
    )


def drawn_ids(dataset, count=None):
    """The id that fills each sample."""
    return [int(dataset[index]["tokens"][0]) for index in range(len(dataset) if count is None else count)]


def test_one_path_is_cut_into_three_splits_of_sequences(prefixes):
    train, valid, test = build(DataConfig(data_path=(prefixes[0],), split="50,25,25"), 30, 7, 7)
    assert [sorted(set(dataset.document_index.tolist())) for dataset in (train, valid, test)] == [
        list(range(20)),
        list(range(20, 30)),
        list(range(30, 40)),
    ]
    assert [len(train) >= 30, len(valid) >= 7, len(test) >= 7] == [True] * 3
    train, valid, test = build(DataConfig(data_path=(prefixes[0],), split="1"), 30, 7, 0)
    assert (len(train.source), valid, test) == (40, None, None)
    assert build(DataConfig(data_path=(prefixes[0],)), 0) == (None, None, None)


def test_the_default_split_is_969_30_1(prefixes):
    train, valid, _ = build(DataConfig(data_path=(prefixes[1],)), 5, 5)
    assert (train.document_index.max() + 1, valid.document_index.min(), valid.document_index.max() + 1) == (78, 78, 80)


def test_an_empty_test_split_says_what_to_change(prefixes):
    with pytest.raises(DataError, match="the test split of .*a holds 0 of its 40 sequences.*--split"):
        build(DataConfig(data_path=(prefixes[0],), split="969, 30, 1"), 5, 5, 5)


def test_a_weighted_blend_draws_its_shares(prefixes):
    a, b, c = prefixes
    train, _, _ = build(DataConfig(data_path=("2", a, "1", b, "1", c), split="1"), 102)
    assert len(train) == 51 + 26 + 26
    ids = drawn_ids(train)
    assert ids == [dataset + 1 for dataset, _ in greedy([0.5, 0.25, 0.25], len(ids))]
    assert [int(train[index]["dataset_id"]) for index in range(5)] == [token - 1 for token in ids[:5]]
    # 26 samples and a surplus of half a percent need 27 * 10 + 1 tokens, two epochs of c: 440 tokens.
    assert [dataset.description["num_samples"] for dataset in train.datasets] == [52, 27, 27]
    assert len(train.datasets[2]) == 43


def test_a_blend_without_weights_goes_through_every_dataset_once(prefixes):
    train, _, _ = build(DataConfig(data_path=tuple(prefixes), split="1"), None)
    sizes = [(count * 11 - 1) // 10 for count in (40, 80, 20)]
    assert np.bincount(drawn_ids(train))[1:].tolist() == sizes
    assert as_pairs((train.dataset_index, train.dataset_sample_index)) == exhaustive(sizes)
    part, _, _ = build(DataConfig(data_path=tuple(prefixes), split="1"), 33)
    assert drawn_ids(part) == drawn_ids(train, 33) and len(part) == 33


def test_a_blend_without_weights_refuses_to_run_out(prefixes):
    with pytest.raises(ConfigError, match="1000 train samples are asked for, but .* once and has 151; give weights"):
        build(DataConfig(data_path=tuple(prefixes), split="1"), 1000)
    train, _, _ = build(DataConfig(data_path=tuple(prefixes), split="1", dataloader_type="cyclic"), 1000)
    assert len(train) == 151


def test_a_weighted_blend_needs_a_number_of_samples(prefixes):
    with pytest.raises(ConfigError, match="one pass over the train data"):
        build(DataConfig(data_path=("1", prefixes[0], "1", prefixes[1]), split="1"), None)


def test_many_tiny_weights_do_not_overdraw_a_large_one(prefixes):
    words = ["0.99", prefixes[2]] + [word for _ in range(40) for word in ("0.00025", prefixes[0])]
    train, _, _ = build(DataConfig(data_path=tuple(words), split="1"), 20)
    # Every share is rounded up: 20 + 40 x 1. The order is the rule's, and the large one has all that it takes.
    weights = [float(weight) for weight in words[::2]]
    assert drawn_ids(train, 20) == [(3 if dataset == 0 else 1) for dataset, _ in greedy(weights, 20)]
    assert len(train) == 60 and len(train.datasets[0]) >= train.drawn[0] > 21
    assert abs(train.samples_per_dataset(20) - 20 * np.array(weights)).max() <= 1


def test_each_split_may_have_its_own_paths(prefixes, tmp_path):
    a, b, c = prefixes
    expected = [[1] * 5, [3] * 5, None]
    arguments = tmp_path / "splits.json"
    arguments.write_text(json.dumps({"train": f"1.0 {a}", "valid": [c], "test": None}))
    for config in (
        DataConfig(train_data_path=("1.0", a), valid_data_path=(c,)),
        DataConfig(per_split_data_args_path=str(arguments)),
    ):
        datasets = build(config, 5, 5, 5)
        assert [dataset and drawn_ids(dataset, 5) for dataset in datasets] == expected
        assert type(datasets[0]).__name__ == "GPTDataset" and len(datasets[0].source) == 40
    train, _, _ = build(DataConfig(train_data_path=("1", a, "3", b)), 40)
    assert np.bincount(drawn_ids(train)).tolist() == [0, 10, 30]


def test_the_words_of_a_file_are_those_of_the_command_line(prefixes, tmp_path):
    a, b, _ = prefixes
    (tmp_path / "words").write_text(f"0.25 {a}\n  0.75 {b}\n")
    by_file, by_flag = (
        build(config, 40)[0]
        for config in (DataConfig(data_args_path=str(tmp_path / "words")), DataConfig(data_path=("0.25", a, "0.75", b)))
    )
    assert drawn_ids(by_file) == drawn_ids(by_flag)


@pytest.mark.parametrize(
    "config, message",
    [
        (DataConfig(), "comes from nowhere; give exactly one of --mock-data; --data-path"),
        (DataConfig(mock_data=True, data_path=("a",)), "comes from --mock-data and --data-path; give exactly one"),
        (DataConfig(train_data_path=("a",), split="1,1,1"), "every split has its own: leave it out"),
        (DataConfig(data_args_path="not/there"), "--data-args-path not/there cannot be read"),
        (DataConfig(per_split_data_args_path="not/there"), "--per-split-data-args-path not/there cannot be read"),
    ],
)
def test_sources_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        plan_data_splits(config)


@pytest.mark.parametrize(
    "content, message", [("{", "is not JSON"), ("[]", "is not an object"), ('{"dev": "a"}', "keys train, valid, test")]
)
def test_a_damaged_file_of_splits_is_refused(tmp_path, content, message):
    (tmp_path / "splits.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        plan_data_splits(DataConfig(per_split_data_args_path=str(tmp_path / "splits.json")))


def test_caches_stand_beside_the_data_or_where_the_user_says(prefixes, tmp_path):
    build(DataConfig(data_path=(prefixes[0],), split="1"), 5)
    assert len(list((tmp_path / "a" / "cache" / "GPTDataset_indices").glob("*-GPTDataset-train-*"))) == 4
    config = DataConfig(
        data_path=("1", prefixes[1], "1", prefixes[2]), split="1", data_cache_path=str(tmp_path / "mine")
    )
    first, _, _ = build(config, 50)
    assert not (tmp_path / "b").exists()
    names = sorted(path.name.split("-", 1)[1] for path in (tmp_path / "mine").iterdir())
    assert [name for name in names if name.startswith("Blended")] == [
        f"BlendedDataset-train-{part}" for part in ("dataset_index.npy", "dataset_sample_index.npy", "description.txt")
    ]
    again, _, _ = build(config, 50)
    assert not again.dataset_index.flags.writeable, "read from the file, not built"
    assert drawn_ids(again) == drawn_ids(first)


def test_threads_build_the_same_datasets(prefixes):
    words = tuple(word for prefix in prefixes * 3 for word in ("1", prefix))
    one, four = (
        build(DataConfig(data_path=words, split="8,1,1", num_dataset_builder_threads=threads), 60, 20)
        for threads in (1, 4)
    )
    for first, second in zip(one[:2], four[:2]):
        assert drawn_ids(first) == drawn_ids(second)


def test_mock_data_needs_no_files_and_is_cut_in_thirds():
    train, valid, test = build(DataConfig(mock_data=True), 50, 20, 10, NullTokenizer(1000), 1024)
    assert [(int(d.document_index.min()), int(d.document_index.max()) + 1) for d in (train, valid, test)] == [
        (0, 33333),
        (33333, 66667),
        (66667, 100000),
    ]
    assert train[0]["tokens"].max() <= 1000


class Padded(ByteTokenizer):
    """Bytes with a padding id."""

    def __init__(self, pad: int) -> None:
        self.pad = pad


def test_a_padding_id_with_another_meaning_is_not_masked_unless_allowed():
    assert maskable_pad_id(ByteTokenizer(), False) == -1
    assert maskable_pad_id(Padded(0), False) == 0
    assert maskable_pad_id(Padded(256), False) == -1
    assert maskable_pad_id(Padded(256), True) == 256


def test_counts_of_long_blends_are_added_up_in_pieces(prefixes, monkeypatch):
    train, _, _ = build(DataConfig(data_path=("1", prefixes[0], "2", prefixes[1]), split="1"), 60)
    monkeypatch.setattr(blend_module, "COUNTED_AT_ONCE", 7)
    again = BlendedDataset(train.datasets, (1 / 3, 2 / 3), size=60, split="train")
    assert again.drawn.tolist() == [20, 40] == train.drawn.tolist()


def test_the_default_split_of_a_small_corpus_leaves_out_what_it_has_no_data_for(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "small", np.uint16) as builder:
        for _ in range(20):
            builder.add_sequence(np.arange(40) % 9)
            builder.end_document()
    config = DataConfig(data_path=(str(tmp_path / "small"),), data_cache_path=str(tmp_path / "cache"))
    made = build_gpt_datasets(
        config,
        sequence_length=8,
        seed=1,
        train_samples=10,
        valid_samples=4,
        test_samples=4,
        tokenizer=NullTokenizer(20),
    )
    assert [dataset is None for dataset in made] == [False, False, True]


QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# From 1e-9 to 1e9, and many equal small ones beside a few large ones: the worst for the rule of the largest lag.
ANY_WEIGHT = st.one_of(st.floats(1e-9, 1.0), st.floats(1.0, 1e9), st.sampled_from([1e-9, 1e-4, 0.5, 1.0]))
ANY_WEIGHTS = st.one_of(
    st.lists(ANY_WEIGHT, min_size=1, max_size=25),
    st.builds(
        lambda large, small, count: large + [small] * count,
        st.lists(st.floats(0.1, 1.0), min_size=1, max_size=4),
        st.floats(1e-9, 0.1),
        st.integers(1, 30),
    ),
)


def furthest(weights, datasets):
    """How far the counts after any number of draws are from the shares; weights and result are fractions."""
    counts, worst = [0] * len(weights), Fraction(0)
    for step, chosen in enumerate(datasets, 1):
        counts[chosen] += 1
        worst = max(worst, *(abs(weight * step - count) for weight, count in zip(weights, counts)))
    return worst


def as_fractions(weights):
    """Exact shares of the weights as they were written."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact) for weight in exact]


@QUICK
@given(weights=ANY_WEIGHTS, size=st.integers(1, 700))
def test_the_exact_order_is_never_one_sample_from_the_shares(weights, size):
    shares = np.array(weights) / sum(weights)
    datasets, samples = blend_order(shares, size, exact=True)
    assert furthest(as_fractions(weights), datasets.tolist()) < 1
    for dataset in set(datasets.tolist()):
        assert samples[datasets == dataset].tolist() == list(range(int((datasets == dataset).sum())))


@QUICK
@given(weights=ANY_WEIGHTS, size=st.integers(1, 700))
def test_the_common_order_is_the_rule_for_any_weights(weights, size):
    shares = np.array(weights) / sum(weights)
    assert as_pairs(blend_order(shares, size)) == greedy(shares.tolist(), size)


def test_lanes_of_the_exact_order_join_into_one_walk():
    weights = np.array([0.6, 0.4] + [1e-4] * 20)
    weights /= weights.sum()
    whole, _ = blend_order(weights, 40_000, exact=True)
    for size in (1, 255, 511, 513, 5000, 20_000):
        assert (blend_order(weights, size, exact=True)[0] == whole[:size]).all()

    def distances(datasets):
        counts = np.cumsum(datasets[:, None] == np.arange(len(weights)), axis=0)
        return abs(np.arange(1, 40_001)[:, None] * weights - counts)

    assert distances(whole).max() < 1 < distances(blend_order(weights, 40_000)[0]).max(), (
        "the common order is not so exact"
    )


@QUICK
@given(weights=st.lists(ANY_WEIGHT, min_size=3, max_size=3), samples=st.integers(1, 300))
def test_a_run_draws_within_one_sample_of_any_shares_and_never_fails(prefixes, weights, samples):
    words = tuple(word for weight, prefix in zip(weights, prefixes) for word in (repr(weight), prefix))
    for order in ("exact", "megatron"):
        train, _, _ = build(DataConfig(data_path=words, split="1", blend_order=order), samples)
        drawn = train.samples_per_dataset(samples).tolist()
        assert sum(drawn) == samples and np.bincount(drawn_ids(train, samples), minlength=4)[1:].tolist() == drawn
        if order == "exact":
            assert all(abs(count - share * samples) <= 1 for count, share in zip(drawn, as_fractions(weights)))


def test_a_run_says_what_it_draws_from_each_source(prefixes, caplog):
    a, b, c = prefixes
    caplog.set_level(logging.INFO)
    config = DataConfig(data_path=("0.5", a, "0.25", b, "0.25", c), split="1", warn_epochs=2.0)
    train, _, _ = build(config, 200)
    ids = drawn_ids(train, 200)
    uses = data_source_usage(train, 200)
    for number, (use, documents) in enumerate(zip(uses, (40, 80, 20)), 1):
        assert use.samples == ids.count(number) and use.tokens == 10 * use.samples
        assert use.epochs == pytest.approx(10 * use.samples / (11 * documents))
    lines = [record.getMessage() for record in caplog.records]
    [row] = [line.split() for line in lines if line.split()[:1] == [a]]
    assert row == [a, "0.5", "100", "50.0000%", "1000", "2.273"]
    [first, second] = [line for line in lines if line.startswith("WARNING")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "which every rank would say"
    assert (
        f"train: {a} is gone through 2.3 times, more than --warn-epochs 2" in first
        and f"{c} is gone through 2.3" in second
    )


def test_what_goes_round_in_cycles_is_counted_as_often_as_it_comes(prefixes):
    train, _, _ = build(DataConfig(data_path=tuple(prefixes), split="1", dataloader_type="cyclic"), 1000)
    assert sum(use.samples for use in data_source_usage(train, 1000)) == 1000
    assert [use.samples for use in data_source_usage(train, 302)] == [2 * count for count in train.drawn.tolist()]


@dataclass(frozen=True)
class PerDocument:
    """A kind whose samples are documents, so that --split counts them."""

    name: str = "Documents"

    def open(self, prefix):
        return IndexedDataset(prefix)

    def num_split_units(self, source):
        return len(source.document_indices) - 1

    def split_has_any_sample(self, source, part):
        return len(part) > 0

    def build_one_split(self, source, request):
        return Documents(source, request.part, request.num_samples, request.cache)


class Documents:
    """Each sample is the first token of a document."""

    def __init__(self, source, part, num_samples, cache):
        self.source, self.part, self.num_samples, self.cache, self.prefix = (
            source,
            part,
            num_samples,
            cache,
            source.prefix,
        )
        self.description = {"part": [part.start, part.stop]}
        self.tokens_per_epoch, self.samples_per_epoch = len(part), len(part)

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return {"tokens": self.source.get(self.part[index % len(self.part)], 0, 1)}


def test_a_kind_says_what_split_counts_and_how_samples_are_cut(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "d", np.uint16) as builder:
        for document in range(10):  # of 1, 2, 3 ... sequences
            for sequence in range(document + 1):
                builder.add_sequence([document])
            builder.end_document()
    config = DataConfig(data_path=(str(tmp_path / "d"),), split="70,20,10")
    train, valid, test = build_split_datasets(config, PerDocument(), (20, 3, 3))
    assert [dataset.part for dataset in (train, valid, test)] == [range(0, 7), range(7, 9), range(9, 10)]
    assert str(train.cache.folder).endswith("d/cache/Documents_indices")
    mixed, _, _ = build_split_datasets(
        DataConfig(data_path=("1", str(tmp_path / "d"), "3", str(tmp_path / "d"))), PerDocument(), (20, 0, 0)
    )
    assert mixed.drawn.tolist() == [5, 15] and int(mixed[0]["dataset_id"]) in (0, 1)


def test_data_of_another_tokenizer_is_refused(tmp_path):
    with IndexedDatasetBuilder(
        tmp_path / "bytes", np.uint16, tokenizer=tokenizer_fingerprint_fields(ByteTokenizer())
    ) as builder:
        for _ in range(40):
            builder.add_sequence([1] * 11)
            builder.end_document()
    config = DataConfig(data_path=(str(tmp_path / "bytes"),), split="1")
    assert len(build(config, 10)[0]) >= 10
    with pytest.raises(DataError, match="was written with ByteTokenizer .*but the tokenizer given is NullTokenizer"):
        build(config, 10, tokenizer=NullTokenizer(300))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=12),
    length=st.integers(1, 9),
    samples=st.one_of(st.none(), st.integers(1, 40)),
    seed=st.integers(0, 99),
)
def test_a_sample_says_where_each_token_came_from_and_documents_where_they_went(
    tmp_path_factory, lengths, length, samples, seed
):
    """Documents of any number of sequences of any length, over any number of epochs; every token id is unique."""
    tokens = sum(map(sum, lengths))
    if tokens == 0 or (samples is None and tokens <= length):
        return
    prefix = tmp_path_factory.mktemp("spans") / "p"
    ids = iter(range(tokens))
    home = {}
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document, sequences in enumerate(lengths):
            for size in sequences:
                local = [next(ids) for _ in range(size)]
                home.update(dict.fromkeys(local, document))
                builder.add_sequence(local)
            builder.end_document()
    source = IndexedDataset(prefix)
    dataset = GPTDataset(
        source,
        GPTSampleOptions(sequence_length=length, vocab_size=tokens, eod=-2),
        SplitRequest(range(len(source)), samples, "train"),
        seed=seed,
    )
    seen = {document: set() for document in range(len(lengths))}
    for index in range(len(dataset)):
        sample = dataset[index]
        window = sample["tokens"].tolist() + sample["labels"].tolist()[-1:]
        rebuilt = []
        for span in dataset.token_sources(index):
            assert span.start == len(rebuilt) and span.length > 0 and span.prefix == str(prefix)
            part = source.get(span.sequence, span.offset, span.length).tolist()
            assert {home[token] for token in part} == {span.document}
            rebuilt += part
        assert rebuilt == window
        for token in window:
            seen[home[token]].add(index)
    assert {document: dataset.samples_with_document(document).tolist() for document in seen} == {
        document: sorted(indices) for document, indices in seen.items()
    }
    assert (dataset.tokens_per_epoch, dataset.samples_per_epoch) == (tokens, tokens / length)
