"""Pairs of texts with hidden words: what a sample is made of, its statistics, and its splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.data import DataConfig
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.datasets.bert import BERTDataset, BERTSampleOptions
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.masking import TokenMaskingOptions, word_continuation_mask
from megatron.core.datasets.samplers import collate
from megatron.core.datasets.sentence_kinds import make_bert_dataset_kind
from megatron.core.tokenizers.build import NullTokenizer
from tests.helpers.sentences import CLS, MASK, PAD, SEP, LetterTokenizer, some_documents, write

DOCUMENTS = some_documents(120)
SIZE = 32


def options(**changes: object) -> BERTSampleOptions:
    tokenizer = LetterTokenizer()
    return BERTSampleOptions(
        **{
            "sequence_length": SIZE,
            "short_seq_prob": 0.1,
            "masking": TokenMaskingOptions(0.15),
            "pairs": "sentence-order",
            "continues": word_continuation_mask(tokenizer),
            "cls": CLS,
            "sep": SEP,
            "mask": MASK,
            "pad": PAD,
            **changes,
        }
    )


def dataset(
    folder: Path, *, documents: list = DOCUMENTS, seed: int = 1, samples: int | None = None, **changes: object
) -> BERTDataset:
    source = write(folder / "data", documents)
    return BERTDataset(source, options(**changes), SplitRequest(range(len(documents)), samples, "train"), seed=seed)


def unmasked(sample: dict[str, np.ndarray]) -> list[int]:
    """The tokens before they were hidden, padding left out."""
    there = (sample["padding_mask"] == 1) | (sample["loss_mask"] == 1)  # a random id in a token's place may be [PAD]
    return np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])[there].tolist()


def parts(sample: dict[str, np.ndarray]) -> list[list[int]]:
    """The texts between the special tokens."""
    result, ids = [[]], unmasked(sample)
    assert ids[0] == CLS and ids[-1] == SEP
    for token in ids[1:-1]:
        result.append([]) if token == SEP else result[-1].append(token)
    return result


def test_a_sample_is_a_pair_of_texts_from_its_row_in_the_stated_form(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    for index in range(len(data)):
        sample, (first, last, target) = data[index], data.row(index)
        whole = data.token_ids(first, last)
        a, b = parts(sample)
        assert len(a) + len(b) == min(len(whole), target) and bool(sample["truncated"]) == (len(whole) > target)
        one, other = (b, a) if sample["is_random"] else (a, b)  # in the order of the text
        boundaries = np.cumsum([len(data.source.get(sentence)) for sentence in range(first, last)])[:-1].tolist()
        assert any(_is_run(one, whole[:cut]) and _is_run(other, whole[cut:]) for cut in boundaries), (
            "no cut gives this pair"
        )
        used = 3 + len(a) + len(b)
        assert sample["types"].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (SIZE - used)
        assert sample["padding_mask"].tolist() == [int(token != PAD) for token in sample["text"][:used]] + [0] * (
            SIZE - used
        )
        assert sample["text"][used:].tolist() == [PAD] * (SIZE - used)
        assert not sample["labels"][sample["loss_mask"] == 0].any()
        assert sample["loss_mask"].sum() <= min(0.15 * target, max(1, round(0.15 * used))), (
            "too many; a short target may have none"
        )


def _is_run(part: list[int], whole: list[int]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole) - len(part) + 1))


def test_a_text_too_long_loses_tokens_at_both_ends_and_the_longer_one_loses_first(tmp_path: Path) -> None:
    data = dataset(tmp_path, samples=1500)
    front = back = 0
    for index in range(len(data)):
        target, texts = data.row(index)[2], data._text_pair(index)[1]
        front += sum(text.low for text in texts)
        back += sum(text.length - text.high for text in texts)
        retained, cut = [text.high - text.low for text in texts], [text.high - text.low < text.length for text in texts]
        assert sum(retained) <= target and (not all(cut) or abs(retained[0] - retained[1]) <= 1)
        assert not any(cut) or retained[cut.index(True)] >= min(retained), "the shorter text is whole"
    assert abs(front / (front + back) - 0.5) < 3 * (0.25 / (front + back)) ** 0.5, (front, back)


def test_a_padding_id_other_than_zero_marks_no_token_and_no_type(tmp_path: Path) -> None:
    for index, sample in enumerate(
        dataset(tmp_path, documents=some_documents(120, high=98), pad=99)[i] for i in range(20)
    ):
        empty = (sample["padding_mask"] == 0) & (sample["loss_mask"] == 0)
        assert set(sample["text"][empty].tolist()) <= {99} and not sample["types"][empty].any(), index


def test_eighty_percent_are_masked_ten_random_ten_kept_and_half_of_the_pairs_swapped(tmp_path: Path) -> None:
    data = dataset(tmp_path, samples=4000)
    hidden, text, swapped = [], [], []
    for index in range(len(data)):
        sample = data[index]
        at = sample["loss_mask"] == 1
        hidden += sample["labels"][at].tolist()
        text += sample["text"][at].tolist()
        swapped.append(int(sample["is_random"]))
    hidden, text = np.array(hidden), np.array(text)
    count, masked, retained = len(hidden), (text == MASK).mean(), (text == hidden).mean()
    sigma = lambda share, n: 3 * (share * (1 - share) / n) ** 0.5  # noqa: E731
    assert abs(masked - (0.8 + 0.1 / 100)) < sigma(0.8, count)  # one in a hundred random ids is [MASK]
    assert abs(retained - (0.1 + 0.1 / 100)) < sigma(0.1, count)
    random = text[(text != MASK) & (text != hidden)]
    assert abs(len(random) / count - 0.1 * 98 / 100) < sigma(0.1, count)
    assert set(random.tolist()) == set(range(100)) - {MASK}, "random ids come from the whole vocabulary"
    assert abs(np.mean(swapped) - 0.5) < sigma(0.5, len(swapped))


def test_short_targets_come_as_often_as_was_said(tmp_path: Path) -> None:
    data = dataset(tmp_path, samples=5000)
    targets = data.rows[:, 2]
    share = 0.1 * (SIZE - 5) / (SIZE - 4)  # one of the short ones is as long as the longest
    assert abs((targets < SIZE - 3).mean() - share) < 3 * (share * (1 - share) / len(targets)) ** 0.5
    assert targets.min() == 2 and targets.max() == SIZE - 3


def test_a_sample_depends_on_its_number_alone(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    forward = [data[index] for index in range(30)]
    np.random.seed(99)
    for index in reversed(range(30)):
        again = data[index]
        assert all(np.array_equal(again[key], forward[index][key]) for key in again)
    moved = dataset(tmp_path, seed=2)
    assert any(not np.array_equal(moved[index]["text"], forward[index]["text"]) for index in range(30))
    with pytest.raises(IndexError, match="sample 10000000 of"):
        data[10_000_000]


def test_without_a_binary_head_a_sample_is_one_text(tmp_path: Path) -> None:
    data = dataset(tmp_path, pairs=None)
    for index in range(40):
        sample, (first, last, target) = data[index], data.row(index)
        (text,) = parts(sample)
        assert len(text) == min(target, len(data.token_ids(first, last))) and _is_run(text, data.token_ids(first, last))
        assert not sample["is_random"] and not sample["types"].any()
    assert {len(range(*data.row(index)[:2])) for index in range(len(data))} >= {1}, "a sentence alone makes a sample"


def test_next_sentence_pairs_are_half_from_elsewhere_and_keep_their_order(tmp_path: Path) -> None:
    data = dataset(tmp_path, pairs="next-sentence", samples=600)
    foreign = 0
    for index in range(len(data)):
        sample, (first, last, _) = data[index], data.row(index)
        a, b = parts(sample)
        assert _is_run(a, data.token_ids(first, last))
        assert sample["is_random"] or _is_run(b, data.token_ids(first, last))
        foreign += not _is_run(b, data.token_ids(first, last))
    assert (
        abs(foreign / len(data) - 0.5) < 3 * (0.25 / len(data)) ** 0.5 + 0.03
    )  # a random text may come from the same row


@pytest.mark.parametrize("pairs", ["sentence-order", "next-sentence", None])
def test_sources_say_where_every_token_came_from(tmp_path: Path, pairs: str | None) -> None:
    data = dataset(tmp_path, pairs=pairs)
    for index in range(60):
        ids = unmasked(data[index])
        message = [None] * len(ids)
        for span in data.token_sources(index):
            message[span.start : span.start + span.length] = data.source.get(
                span.sequence, span.offset, span.length
            ).tolist()
        assert [token for token, at in zip(ids, message) if at is not None] == [
            token for token in message if token is not None
        ]
        assert {token for token, at in zip(ids, message) if at is None} <= {CLS, SEP} and len(message) == len(ids)


def test_an_id_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    data = dataset(tmp_path, documents=[[[7, 200], [8]]])
    with pytest.raises(DataError, match="data holds the id 200, but the vocabulary has 100 ids"):
        data[0]


def run_config(**changes: object) -> RunConfig:
    return config_from_flat_dict(
        RequestedRun, {"seq_length": SIZE, "seed": 3, "architecture": "bert", **changes}
    ).resolve(1)


def test_splits_are_shares_of_the_documents_and_never_meet(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS)
    run = run_config(data_path=(str(tmp_path / "data"),), split="60,30,10")
    train, valid, test = build_split_datasets(run.data, make_bert_dataset_kind(run, LetterTokenizer()), (300, 20, 5))
    bounds = np.cumsum([0, *map(len, DOCUMENTS)])
    for part, (low, high) in ((train, (0, 72)), (valid, (72, 108)), (test, (108, 120))):
        assert part.rows[:, 0].min() >= bounds[low] and part.rows[:, 1].max() <= bounds[high]
    assert len(train) >= 300 and len(collate([train[0], train[1]])["is_random"].shape) == 1
    assert len({str(train[index]["text"].tolist()) for index in range(300)}) > 250


def test_mock_samples_need_no_files_and_avoid_special_ids() -> None:
    run = run_config(mock_data=True)
    train, _, _ = build_split_datasets(run.data, make_bert_dataset_kind(run, LetterTokenizer()), (50, 5, 5))
    for index in range(50):
        assert all(token > 5 for part in parts(train[index]) for token in part)


def test_a_tokenizer_without_the_special_tokens_is_refused_with_all_that_it_lacks() -> None:
    tokenizer = NullTokenizer(50)
    for name in ("cls", "sep", "mask"):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, None)
    with pytest.raises(
        ConfigError, match=r"BERT needs \[CLS\], \[SEP\], \[MASK\], padding, which NullTokenizer does not have"
    ):
        make_bert_dataset_kind(run_config(mock_data=True), tokenizer)


def test_the_settings_are_the_flags() -> None:
    assert DataConfig().masking.mask_prob == 0.15 and DataConfig().masking.short_seq_prob == 0.1
    kind = make_bert_dataset_kind(
        run_config(mock_data=True, mask_prob=0.3, short_seq_prob=0.0, bert_binary_head=False), LetterTokenizer()
    )
    assert (kind.options.masking.probability, kind.options.short_seq_prob, kind.options.pairs) == (0.3, 0.0, None)
