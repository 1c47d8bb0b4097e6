"""What a tokenizer puts around texts: taken off where texts are parts of a sample, and refused where sentences are stored."""

from __future__ import annotations

import pytest
from tokenizers import processors

from megatron.core.config.flags.declare import ConfigError, config_from_flat_dict
from megatron.core.config.settings.data import TokenizerConfig
from megatron.core.config.settings.run import RunConfig
from megatron.core.datasets.ingest.encode import EncodeOptions, RecordEncoder
from megatron.core.datasets.sentence_kinds import make_bert_dataset_kind, make_t5_dataset_kind
from megatron.core.datasets.special_tokens import (
    count_ids_around_text,
    encode_without_special_tokens,
    refuse_added_special_tokens,
)
from megatron.core.tokenizers.build import NullTokenizer, build_tokenizer
from tests.helpers.architecture import ROOT
from tests.helpers.toytext import package_tokenizer

TEXTS = ["So abc", "", "on"]


@pytest.fixture(scope="module")
def framing(tmp_path_factory: pytest.TempPathFactory) -> TokenizerConfig:
    """A tokenizer.json that puts <s> before and </s> after every text, and names tokens as BERT needs them."""
    folder = tmp_path_factory.mktemp("framing")
    made = package_tokenizer(("<|endoftext|>", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]", "[PAD]"))
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A $B",
        special_tokens=[(name, made.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    made.save(str(folder / "tokenizer.json"))
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))


def without_frame(config: TokenizerConfig) -> TokenizerConfig:
    """The same without special tokens around texts."""
    return TokenizerConfig(
        tokenizer_type=config.tokenizer_type,
        tokenizer_model=config.tokenizer_model,
        tokenizer_hf_include_special_tokens=False,
    )


def test_ids_of_texts_are_taken_out_of_their_frames(framing: TokenizerConfig) -> None:
    framed, bare = build_tokenizer(framing), build_tokenizer(without_frame(framing))
    assert framed.tokenize("on") == [framed.bos, *bare.tokenize("on"), framed.eos]
    assert [ids.tolist() for ids in encode_without_special_tokens(framed, TEXTS)] == [
        bare.tokenize(text) for text in TEXTS
    ]
    assert encode_without_special_tokens(framed, []) == []


def test_sentences_are_not_written_with_a_frame_each(framing: TokenizerConfig) -> None:
    with pytest.raises(ConfigError, match="makes '<s> 1 </s>' of '1'.*give --tokenizer-hf-no-include-special-tokens"):
        RecordEncoder(EncodeOptions(framing, language="english"))
    RecordEncoder(EncodeOptions(framing))
    RecordEncoder(EncodeOptions(without_frame(framing), language="english"))


@pytest.mark.parametrize("kind", [make_bert_dataset_kind, make_t5_dataset_kind])
def test_samples_of_sentences_refuse_a_tokenizer_with_a_frame(framing: TokenizerConfig, kind: object) -> None:
    config = config_from_flat_dict(RunConfig, {"seq_length": 32, "mock_data": True})
    with pytest.raises(ConfigError, match="--tokenizer-hf-no-include-special-tokens"):
        kind(config, build_tokenizer(framing))


def test_a_vocabulary_of_one_id_has_nothing_around_texts() -> None:
    assert count_ids_around_text(NullTokenizer(1)) == (0, 0)


def test_users_of_a_llama_model_are_shown_the_kind_without_a_begin_of_text() -> None:
    model = str(ROOT / "examples/data/demo-llama.model")
    with pytest.raises(ConfigError) as caught:
        refuse_added_special_tokens(
            build_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model))
        )
    assert "GPTSentencePieceTokenizer" in str(caught.value) and "--tokenizer-hf" not in str(caught.value)
    refuse_added_special_tokens(
        build_tokenizer(TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model))
    )
