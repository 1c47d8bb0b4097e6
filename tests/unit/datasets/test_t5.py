"""Texts with spans taken out: encoder, decoder and labels fit together, whatever the lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.blend import build_split_datasets
from megatron.core.datasets.dataset_protocols import SplitRequest
from megatron.core.datasets.masking import TokenMaskingOptions, word_continuation_mask
from megatron.core.datasets.sentence_kinds import make_t5_dataset_kind
from megatron.core.datasets.t5 import T5Dataset, T5SampleOptions
from tests.helpers.sentences import BOS, EOS, PAD, LetterTokenizer, some_documents, write

DOCUMENTS = some_documents(80, longest=25, high=80)
ENCODER, DECODER, EXTRA = 64, 32, 20
TOKENIZER = LetterTokenizer(100, extra=EXTRA)
SENTINELS = TOKENIZER.additional_special_tokens_ids


def options(**changes: object) -> T5SampleOptions:
    return T5SampleOptions(
        **{
            "encoder_length": ENCODER,
            "decoder_length": DECODER,
            "short_seq_prob": 0.1,
            "sentinels": SENTINELS,
            "masking": TokenMaskingOptions(0.15, max_ngram=10, geometric=True),
            "continues": word_continuation_mask(TOKENIZER),
            "bos": BOS,
            "eos": EOS,
            "pad": PAD,
            **changes,
        }
    )


def dataset(folder: Path, *, samples: int | None = None, documents: list = DOCUMENTS, **changes: object) -> T5Dataset:
    source = write(folder / "data", documents)
    return T5Dataset(source, options(**changes), SplitRequest(range(len(documents)), samples, "train"), seed=1)


def filled(sample: dict[str, np.ndarray]) -> list[int]:
    """The encoder's text with the spans that the decoder names put back."""
    spans: dict[int, list[int]] = {}
    for token in sample["text_dec"][sample["dec_mask"] == 1].tolist()[1:]:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == list(SENTINELS[: len(spans)]), "sentinels come in order"
    read = sample["text_enc"][sample["enc_mask"] == 1].tolist()
    assert [token for token in read if token in SENTINELS] == list(spans)
    return [token for part in read for token in (spans[part] if part in SENTINELS else [part])]


@pytest.mark.parametrize(
    "changes", [{}, {"decoder_length": 8}, {"sentinels": SENTINELS[:2]}, {"masking": TokenMaskingOptions(0.5, 3)}]
)
def test_the_spans_put_back_give_the_text_and_labels_are_the_decoder_one_ahead(tmp_path: Path, changes: dict) -> None:
    data = dataset(tmp_path, **changes)
    length = options(**changes).decoder_length
    for index in range(len(data)):
        sample, (first, last, target) = data[index], data.row(index)
        text = data.token_ids(first, last)
        assert filled(sample) == text[:target] and bool(sample["truncated"]) == (len(text) > target)
        used = int(sample["dec_mask"].sum())
        assert sample["text_dec"][0] == BOS and sample["labels"][used - 1] == EOS
        assert sample["labels"][: used - 1].tolist() == sample["text_dec"][1:used].tolist()
        assert sample["loss_mask"].tolist() == sample["dec_mask"].tolist() == [1] * used + [0] * (length - used)
        assert set(sample["text_dec"][used:].tolist()) <= {PAD} and not sample["labels"][used:].any()
        assert set(sample["text_enc"][sample["enc_mask"] == 0].tolist()) <= {PAD}


def test_about_the_stated_share_of_tokens_is_taken_out_in_runs_of_words(tmp_path: Path) -> None:
    data = dataset(tmp_path, samples=1500)
    taken = total = requested = spans = 0
    for index in range(len(data)):
        sample = data[index]
        decoder = sample["text_dec"][sample["dec_mask"] == 1].tolist()[1:]
        here = sum(token not in SENTINELS for token in decoder)
        spans += len(decoder) - here
        text = len(filled(sample))
        taken, total, requested = taken + here, total + text, requested + max(1, round(0.15 * text))
    assert 0.9 * requested < taken <= requested and abs(taken / total - 0.15) < 0.02
    assert taken / spans > 2, "spans are longer than words"


def test_sources_say_where_the_text_came_from(tmp_path: Path) -> None:
    data = dataset(tmp_path)
    for index in range(30):
        text = filled(data[index])
        message = [
            token
            for span in data.token_sources(index)
            for token in data.source.get(span.sequence, span.offset, span.length).tolist()
        ]
        assert message == text


def test_a_text_without_tokens_leaves_the_encoder_something_to_look_at(tmp_path: Path) -> None:
    sample = dataset(tmp_path, documents=[[[]]])[0]
    assert sample["enc_mask"].sum() == 1 and sample["labels"][0] == EOS and sample["loss_mask"].sum() == 1


def run_config(**changes: object) -> RunConfig:
    return config_from_flat_dict(
        RunConfig,
        {
            "encoder_seq_length": ENCODER,
            "decoder_seq_length": DECODER,
            "seed": 3,
            "architecture": "t5",
            "mock_data": True,
            **changes,
        },
    ).resolve(1)


def test_mock_samples_and_settings_come_from_the_flags() -> None:
    run = run_config()
    train, _, _ = build_split_datasets(run.data, make_t5_dataset_kind(run, TOKENIZER), (30, 3, 3))
    assert train[0]["text_enc"].shape == (ENCODER,) and train[0]["text_dec"].shape == (DECODER,)
    assert all(6 <= token < 80 for index in range(30) for token in filled(train[index]))


def test_a_tokenizer_without_sentinels_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vocab-extra-ids"):
        make_t5_dataset_kind(run_config(), LetterTokenizer())
