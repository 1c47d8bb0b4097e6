"""Rules about what is read: documents, fill in the middle, conversations, masked text."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.flags.declare import flag_name
from megatron.core.config.rules.rule import ConfigRuleInput, config_rule


@config_rule("data")
def _data_source_problem(s: ConfigRuleInput) -> str:
    """The data is given by one method."""
    data = s.run.data
    per_split = data.train_data_path or data.valid_data_path or data.test_data_path or data.per_split_data_args_path
    given = [
        name
        for name, value in (
            ("--mock-data", data.mock_data),
            ("--data-path", data.data_path),
            ("--data-args-path", data.data_args_path),
            ("paths for each split", per_split),
        )
        if value
    ]
    if len(given) > 1:
        return f"{' and '.join(given)} each say what to read; keep one"
    if not given:
        return "nothing says what to read; give --data-path, paths for each split, or --mock-data"
    if data.full_validation and data.dataloader_type == "external":
        return (
            "--full-validation must know how much there is, which the iterables of --dataloader-type external do not "
            "say; choose single or cyclic, or --eval-iters"
        )
    return ""


@config_rule("fill-in-the-middle")
def _fim_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Fill-in-the-middle has its special tokens and valid rates."""
    fill = s.run.data.fill
    if not fill.fim_data:
        return
    if s.run.data.chat.sft:
        yield "--fim-data rearranges documents, and --sft reads conversations; keep one"
    for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
        rate = getattr(fill, name)
        if rate is not None and not 0 <= rate <= 1:
            yield f"{flag_name(name)} {rate:g} is a probability, from 0 to 1"


@config_rule("conversations")
def _sft_data_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Conversations have one prompt format, and no other setting of their loss."""
    data = s.run.data
    if not data.chat.sft:
        return
    if data.eod_mask_loss:
        yield (
            "--eod-mask-loss has no place under --sft: the loss is on the answers and on the token that ends each; "
            "leave it out"
        )
    if s.run.tokenizer.chat_template is not None and data.chat.sft_tokenizer_prompt_format != "tokenizer":
        yield (
            f"--chat-template and --sft-tokenizer-prompt-format {data.chat.sft_tokenizer_prompt_format} both say "
            "how a conversation is written; keep one"
        )


@config_rule("masked-text")
def _masked_text_problems(s: ConfigRuleInput) -> Iterator[str]:
    """Rates of masked text are valid, and two texts fit into a sequence."""
    model, masking = s.run.model, s.run.data.masking
    if model.architecture.is_decoder_only:
        return
    if not 0 < masking.mask_prob < 1:
        yield f"--mask-prob {masking.mask_prob:g} hides nothing or everything; choose a share between 0 and 1"
    if not 0 <= masking.short_seq_prob <= 1:
        yield f"--short-seq-prob {masking.short_seq_prob:g} is a probability, from 0 to 1"
    if model.architecture.predicts_masked_words and s.run.train.seq_length is not None and s.run.train.seq_length < 5:
        yield f"--seq-length {s.run.train.seq_length} has no room for [CLS], two [SEP] and two texts; give at least 5"
