"""The flags of preference optimization, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags import flag
from megatron.core.config.settings.run import RunConfig
from megatron.preference.options import WITHOUT_REFERENCE, LossOptions, PreferenceLoss


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """Preference optimization.

    --data-path names JSONL files with a prompt and a chosen and a rejected answer a line; docs/finetuning.md has the forms.
    """

    preference_loss: PreferenceLoss = flag("sigmoid", "loss of a pair of answers; sigmoid is DPO", role="training")
    preference_beta: float = flag(0.1, "how strongly the policy is tied to the reference (beta)", role="training")
    preference_label_smoothing: float = flag(
        0.0,
        "share of pairs whose label is taken to be wrong: with sigmoid cDPO, with robust its unbiased form",
        role="training",
    )
    preference_margin: float = flag(
        0.0, "with simpo: by how much the chosen answer is to be better (gamma)", role="training"
    )
    preference_sft_weight: float = flag(
        0.0, "weight of the chosen answers' mean cross entropy beside the loss (RPO)", role="training"
    )
    preference_reference: str | None = flag(
        None,
        "checkpoint of the reference network; left out: the base under adapters, else --pretrained-checkpoint",
        role="training",
    )

    preference_prompt_format: Literal["tokenizer", "chatml", "llama2", "llama3", "mistral", "plain"] = flag(
        "tokenizer", "how a conversation is written, as with --sft-tokenizer-prompt-format", role="training"
    )

    @property
    def options(self) -> LossOptions:
        """What the loss of a pair is given."""
        return LossOptions(self.preference_beta, self.preference_label_smoothing, self.preference_margin)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.preference_loss not in WITHOUT_REFERENCE


def reference_folder(config: PreferenceConfig, run: RunConfig) -> str | None:
    """The checkpoint of the reference; None where the loss has none, or where it is the base under adapters."""
    if not config.has_reference or (run.model.adapter.has_adapters and config.preference_reference is None):
        return None
    return config.preference_reference or run.checkpoint.pretrained_checkpoint


def problems(config: PreferenceConfig, run: RunConfig) -> Iterator[str]:
    """What is wrong between these settings and those of the run, a line each."""
    smoothing = config.preference_label_smoothing
    if config.preference_beta <= 0:
        yield f"--preference-beta {config.preference_beta} must be positive"
    if not 0 <= smoothing < 0.5:
        yield f"--preference-label-smoothing {smoothing} is a share of wrong labels; give 0 or more, and less than 0.5"
    if smoothing and config.preference_loss not in ("sigmoid", "robust", "simpo"):
        yield f"--preference-label-smoothing is for sigmoid, robust and simpo; leave it out with {config.preference_loss}"
    if config.preference_loss == "robust" and not smoothing:
        yield "--preference-loss robust is DPO without --preference-label-smoothing; give the share of wrong labels"
    if config.preference_margin and config.preference_loss != "simpo":
        yield f"--preference-margin is SimPO's; leave it out with --preference-loss {config.preference_loss}"
    if config.preference_sft_weight < 0:
        yield f"--preference-sft-weight {config.preference_sft_weight} must not be negative"
    if config.preference_reference and not config.has_reference:
        yield f"--preference-loss {config.preference_loss} has no reference; leave out --preference-reference"
    if config.has_reference and not run.model.adapter.has_adapters and reference_folder(config, run) is None:
        yield (
            f"--preference-loss {config.preference_loss} compares with a reference; give --pretrained-checkpoint, which is also where "
            "the policy starts, or --preference-reference, or --lora-rank, whose base is the reference"
        )
    yield from _run_problems(run)


def _run_problems(run: RunConfig) -> Iterator[str]:
    """What training on pairs needs of the settings of every run."""
    if run.data.chat.sft or run.data.mock_data:
        yield "pairs of answers are read from the files of --data-path; leave out --sft and --mock-data"
    if run.model.hidden_dropout or run.model.attention_dropout:
        yield "with dropout, answers would be compared by different networks; give --hidden-dropout 0 --attention-dropout 0"
    if not run.train.calculate_per_token_loss:
        yield "losses are means over the pairs of a step; leave out --no-calculate-per-token-loss"
    if run.model.mtp.mtp_num_layers:
        yield "pairs are not trained with --mtp-num-layers; leave it out"
    if run.parallel.hybrid_context_parallel:
        yield "--hybrid-context-parallel spreads documents, and the answers of a pair belong together; leave it out"
    if not (run.data.reset_attention_mask and run.data.reset_position_ids):
        yield "answers share a sample and must not see each other; leave out --no-reset-attention-mask and --no-reset-position-ids"
