"""Which text a run reads, and how it becomes ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When
from megatron.core.config.settings.multimodal import MultimodalDataConfig

# Windows of text are what a decoder reads; the image classifier reads none, and passes over masks.
TEXT = When("architecture", ("gpt",))
MASKED_TEXT = (When("architecture", ("bert", "t5"), idle="noted"), When("architecture", ("bert", "t5", "vit")))


def _of_tokenizer(*kinds: str) -> When:
    """Return the condition that the tokenizer is of one of these kinds."""
    return When("tokenizer_type", kinds, idle="noted")


# What a script reads of the files that its flags name: nothing, datasets, or (but with --sft) files of lines by their whole names.
DataFiles = Literal["none", "datasets", "lines"]


@dataclass(frozen=True, slots=True)
class FIMConfig:
    """Fill in the middle. Documents of a sample are rearranged, so that a model learns to write what stands between
    two texts.
    """

    USED_WITH: ClassVar[When] = When("fim_data")

    fim_data: bool = flag(False, "rearrange documents as prefix, suffix, middle", role="training", used_with=TEXT)
    fim_rate: float = flag(0.5, "probability that a document is rearranged", role="training")
    fim_spm_rate: float = flag(0.5, "probability that the suffix of a rearranged document comes first", role="training")
    fim_prefix_token: str = flag(
        "<fim_prefix>", "token before the prefix, by its text in the vocabulary", role="training"
    )
    fim_middle_token: str = flag("<fim_middle>", "token before the middle", role="training")
    fim_suffix_token: str = flag("<fim_suffix>", "token before the suffix", role="training")
    fim_pad_token: str | None = flag(
        None,
        "token that fills up a sample that became shorter; has no loss (default: the tokenizer's)",
        role="training",
    )
    fim_eod_token: str | None = flag(
        None, "token that ends documents (default: the tokenizer's end of document)", role="training"
    )
    fim_split_sample: str | None = flag(
        None, "token that cuts a document into fragments; then these are rearranged, not the whole", role="training"
    )
    fim_fragment_rate: float | None = flag(
        None,
        "probability that a fragment of a document chosen by --fim-rate is rearranged (default: 1)",
        role="training",
        used_with=(When("fim_data"), When("fim_split_sample")),
    )
    fim_no_prefix: str | None = flag(
        None, "documents and fragments that begin with this text stay as they are", role="training"
    )


@dataclass(frozen=True, slots=True)
class SFTDataConfig:
    """Fine-tuning on conversations. --data-path names JSONL files, or weights and files in turn; a line holds
    {"messages": [{"role": ..., "content": ...}, ...]}.
    """

    sft: bool = flag(
        False,
        "learn the assistant's answers; conversations are packed into samples and do not see each other",
        role="data",
        used_with=TEXT,
    )
    sft_tokenizer_prompt_format: Literal["tokenizer", "chatml", "llama2", "llama3", "mistral", "plain"] = flag(
        "tokenizer",
        "how a conversation is written; tokenizer: by the chat template of the tokenizer or of --chat-template; plain: what is said and "
        "nothing else, of the user only images",
        also=("--tokenizer-prompt-format",),
        role="training",
        used_with=When("sft"),
    )


@dataclass(frozen=True, slots=True)
class MaskingConfig:
    """Masked text. How sentences become the samples of pretrain_bert.py and pretrain_t5.py."""

    USED_WITH: ClassVar[tuple[When, ...]] = MASKED_TEXT

    mask_prob: float = flag(0.15, "share of the tokens that are hidden", role="training")
    short_seq_prob: float = flag(0.1, "share of samples that aim at a random shorter length", role="data")
    bert_pair_task: Literal["sentence-order", "next-sentence"] = flag(
        "sentence-order",
        "what the binary head learns: which text comes first, or whether the second follows the first at all",
        role="training",
    )


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Data. One of --mock-data, --data-path (or its file) or paths for each split."""

    data_path: tuple[str, ...] | None = flag(
        None, "prefixes of .bin/.idx pairs, or weights and prefixes in turn", role="data"
    )
    data_args_path: str | None = flag(None, "file with the words of --data-path", role="data")
    train_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for training only", role="data")
    valid_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for validation only", role="training")
    test_data_path: tuple[str, ...] | None = flag(None, "like --data-path, for the test only", role="training")
    per_split_data_args_path: str | None = flag(None, "JSON file with keys train, valid and test", role="data")
    mock_data: bool = flag(False, "made-up samples instead of files", role="data")
    split: str | None = flag(
        None, "shares of training, validation and test of --data-path (default: 969, 30, 1)", role="data"
    )
    data_cache_path: str | None = flag(
        None, "folder for the index caches; left out: beside the data, and nowhere for object storage", role="free"
    )
    mmap_bin_files: bool = flag(True, "do not map the .bin files into memory; read them", role="free")
    object_storage_cache_path: str | None = flag(
        None,
        "local folder for the .idx files of data in object storage, such as "
        "s3://bucket/prefix; left out: each process holds them in memory",
        role="free",
    )
    num_workers: int = flag(2, "threads that read samples ahead; 0: read in the training loop", role="free")
    dataloader_type: Literal["single", "cyclic", "external"] = flag(
        "single",
        "single: in the shuffled order; cyclic: a new shuffle each epoch; external: as the script's own iterables give",
        role="data",
    )
    data_sharding: bool = flag(
        True, "cyclic: one shuffle for all data-parallel ranks, not one of each rank's own part", role="data"
    )
    full_validation: bool = flag(
        False, "each evaluation goes through the whole validation data once, instead of --eval-iters", role="training"
    )
    warn_epochs: float = flag(4.0, "warn when a run goes through a source more often than this", role="free")
    log_samples: str | None = flag(
        None, "folder for a JSON line a microbatch: which samples each rank read, and their hash", role="free"
    )
    reset_position_ids: bool = flag(
        False, "positions start again after each end of document", role="training", used_with=TEXT
    )
    reset_attention_mask: bool = flag(
        False, "a token does not attend to earlier documents of its sequence", role="training", used_with=TEXT
    )
    dataloader_inter_document_masking: bool = flag(
        False,
        "documents of a sample are apart: --reset-attention-mask and --reset-position-ids in one",
        role="training",
        used_with=TEXT,
    )
    eod_mask_loss: bool = flag(False, "no loss where the input is an end of document", role="training", used_with=TEXT)
    mid_level_dataset_surplus: float = flag(
        0.005, "share of extra samples prepared in each dataset of a blend", role="data"
    )
    allow_ambiguous_pad_tokens: bool = flag(
        False, "accept a padding id that is also another special token", role="free"
    )
    blend_order: Literal["megatron", "exact"] = flag(
        "megatron",
        "megatron: its order, whose counts can be two samples from the weights' shares; exact: never one away",
        role="data",
    )
    num_dataset_builder_threads: int = flag(1, "threads that build the indices of a blend's datasets", role="free")
    fill: FIMConfig = FIMConfig()
    chat: SFTDataConfig = SFTDataConfig()
    masking: MaskingConfig = MaskingConfig()
    multimodal: MultimodalDataConfig = MultimodalDataConfig()

    @property
    def separates_documents(self) -> bool:
        """Whether a token sees only the document it belongs to."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking or self.chat.sft

    @property
    def restarts_positions(self) -> bool:
        """Whether positions start again with each document."""
        return self.reset_position_ids or self.dataloader_inter_document_masking or self.chat.sft


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Tokenizer. How text becomes ids."""

    tokenizer_type: str | None = flag(
        None,
        "kind of tokenizer: GPT2BPETokenizer, BertWordPieceLowerCase, BertWordPieceCase, SentencePieceTokenizer, "
        "GPTSentencePieceTokenizer, Llama2Tokenizer, HuggingFaceTokenizer, TikTokenizer, ByteTokenizer or NullTokenizer",
        role="tokenizer",
    )
    vocab_file: str | None = flag(
        None,
        "vocabulary file: vocab.json of GPT2BPETokenizer, vocab.txt of BertWordPiece*",
        role="tokenizer",
        used_with=_of_tokenizer("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
    )
    merge_file: str | None = flag(
        None, "merges of a byte-level BPE: merges.txt", role="tokenizer", used_with=_of_tokenizer("GPT2BPETokenizer")
    )
    tokenizer_model: str | None = flag(
        None,
        "model of the tokenizer: a SentencePiece .model, a rank file of tiktoken, or a "
        "tokenizer.json or the folder that holds it",
        role="tokenizer",
        used_with=_of_tokenizer(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
        ),
    )
    vocab_size: int | None = flag(
        None,
        "NullTokenizer: number of ids, the last of which ends documents; TikTokenizer: number "
        "of ids to keep, special tokens included",
        role="tokenizer",
        used_with=_of_tokenizer("NullTokenizer", "TikTokenizer"),
    )
    vocab_extra_ids: int = flag(
        0,
        "sentinels <extra_id_0>, <extra_id_1> ... to add at the end of the vocabulary",
        role="tokenizer",
        used_with=_of_tokenizer("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer"),
    )
    tiktoken_pattern: Literal["v1", "v2", "gpt2", "llama3", "cl100k", "o200k"] | None = flag(
        None,
        "how TikTokenizer cuts text into words; left out: v2 for JSON, and for the published r50k_base, cl100k_base and o200k_base "
        "their own",
        role="tokenizer",
        used_with=_of_tokenizer("TikTokenizer"),
    )
    tiktoken_num_special_tokens: int | None = flag(
        None,
        "ids that TikTokenizer keeps for special tokens, before those of a JSON rank file (default: 1000)",
        role="tokenizer",
        used_with=_of_tokenizer("TikTokenizer"),
    )
    tokenizer_special_tokens: tuple[str, ...] | None = flag(
        None,
        "names of TikTokenizer's special tokens, in the order of their ids",
        also=("--tiktoken-special-tokens",),
        role="tokenizer",
        used_with=_of_tokenizer("TikTokenizer"),
    )
    tokenizer_hf_include_special_tokens: bool = flag(
        True,
        "HuggingFaceTokenizer does not put the special tokens of its tokenizer.json around each text",
        off="--tokenizer-hf-no-include-special-tokens",
        role="tokenizer",
        used_with=_of_tokenizer("HuggingFaceTokenizer"),
    )
    chat_template: str | None = flag(
        None,
        "Jinja template of a conversation: its text, or a file; left out: the one that comes with the tokenizer",
        role="training",
    )
    null_tokenizer_eod_id: int | None = flag(
        None,
        "NullTokenizer's end of document (default: --vocab-size less one)",
        role="tokenizer",
        used_with=_of_tokenizer("NullTokenizer"),
    )
    null_tokenizer_pad_id: int | None = flag(
        None,
        "NullTokenizer's padding (default, and -1: it has none)",
        role="tokenizer",
        used_with=_of_tokenizer("NullTokenizer"),
    )

    @property
    def vocab_size_without_tokenizer(self) -> int:
        """Vocabulary size of a NullTokenizer from its flag; of any other tokenizer that of GPT-2, 50257."""
        return self.vocab_size if self.tokenizer_type == "NullTokenizer" and self.vocab_size else 50257


def resumed_null_vocab_size(given: int | None, saved: Mapping[str, Any]) -> int | None:
    """Return the --vocab-size that gives a NullTokenizer as many ids as it had in a checkpoint: one more than given, if
    that was so there.

    Before Megatron 0.18, and in early versions of this project, the tokenizer had one id more than --vocab-size: the
    end of document. saved: the checkpoint's settings, with `null_tokenizer_ids` in one of Megatron's.
    """
    size = (
        saved.get("true_vocab_size")
        if saved.get("tokenizer_type") == "NullTokenizer"
        else saved.get("null_tokenizer_ids")
    )
    return size if given is not None and size == given + 1 else given
