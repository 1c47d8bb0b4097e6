"""The flags of finetune.py, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.adapters import is_trained_parameter
from megatron.core.config.flags.declare import flag, flag_fields, flag_name
from megatron.core.config.flags.figures import match_metric_name
from megatron.core.config.settings.run import RunConfig

Task = Literal["sft", "dpo", "kto", "reward"]
PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
OF_MEANS = ("ipo", "simpo", "orpo")  # losses that compare means over tokens
_ALL = ("sft", "dpo", "kto", "reward")
_DURATION = ("train_iters", "train_samples")
# Flag -> tasks that read it; the others are read by all.
_TASKS_OF = {
    **dict.fromkeys(
        ("preference_loss", "preference_label_smoothing", "preference_margin", "preference_sft_weight"), ("dpo",)
    ),
    **dict.fromkeys(("preference_beta", "preference_reference", "preference_reference_cache"), ("dpo", "kto")),
    **dict.fromkeys(("kto_desirable_weight", "kto_undesirable_weight"), ("kto",)),
    "reward_centre": ("reward",),
    **dict.fromkeys(("finetune_packing", "preference_prompt_format"), ("dpo", "kto", "reward")),
}
# Task -> figures of its evaluations.
_REWARDS = ("preference loss", "preference accuracy", "reward margin", "chosen reward", "rejected reward")
FIGURES = {
    "sft": ("lm loss",),
    "dpo": (*_REWARDS, "chosen logprob"),
    "kto": ("preference loss", "preference accuracy", "chosen reward", "rejected reward", "divergence"),
    "reward": _REWARDS,
}


@dataclass(frozen=True, slots=True)
class PreferenceConfig:
    """Finetuning by answers.

    --data-path names JSONL files of conversations (sft), of pairs of answers (dpo, reward) or of judged answers (kto); docs/finetuning.md
    has the forms.
    """

    finetune_task: Task = flag(
        "dpo",
        "sft: learn answers; dpo: prefer the chosen of two answers, by --preference-loss; kto: prefer answers judged desirable; reward: a "
        "model that scores texts",
        role="training",
    )
    finetune_epochs: float | None = flag(
        None, "times that the training data are gone through, in the place of --train-iters", role="training"
    )
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
    preference_reference_cache: str | None = flag(
        None,
        "folder for the reference's log-probabilities of all answers, computed once before training, which then needs no reference network",
        role="free",
        metavar="FOLDER",
    )
    kto_desirable_weight: float = flag(1.0, "with kto: weight of desirable answers", role="training")
    kto_undesirable_weight: float = flag(1.0, "with kto: weight of the others", role="training")
    reward_centre: float = flag(
        0.0, "with reward: weight of the square of both scores' sum, which keeps scores around 0", role="training"
    )
    finetune_packing: bool = flag(True, "a sample holds a single pair, or a single judged answer", role="training")

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return (
            self.finetune_task == "kto" or self.finetune_task == "dpo" and self.preference_loss not in WITHOUT_REFERENCE
        )

    @property
    def compares_means(self) -> bool:
        """Whether the loss compares means over the tokens of answers, and not sums."""
        return self.finetune_task == "dpo" and self.preference_loss in OF_MEANS

    @property
    def num_scoring_passes(self) -> int:
        """Forward passes over a step's samples before it trains: one by the reference, unless cached; for kto as many
        over the mismatched answers, and one by the policy.
        """
        num_reference = self.has_reference and self.preference_reference_cache is None
        return num_reference + (num_reference + 1) * (self.finetune_task == "kto")


def reference_checkpoint_path(config: PreferenceConfig, run: RunConfig) -> str | None:
    """Return the reference's checkpoint; None if the loss needs none, or if it is the base under adapters."""
    if not config.has_reference or (run.model.adapter.has_adapters and config.preference_reference is None):
        return None
    return config.preference_reference or run.checkpoint.pretrained_checkpoint


def preference_config_problems(config: PreferenceConfig, run: RunConfig, given: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each problem between these settings and the run's. given: settings on the command line."""
    task = config.finetune_task
    yield from _epoch_problems(config, given)
    strangers = [
        flag_name(field.name)
        for field, _ in flag_fields(PreferenceConfig)
        if getattr(config, field.name) != field.default and task not in _TASKS_OF.get(field.name, _ALL)
    ]
    if strangers:
        yield f"{', '.join(strangers)}: not for --finetune-task {task}; leave {'it' if len(strangers) == 1 else 'them'} out"
    else:
        yield from _loss_number_problems(config)
    yield from _reference_problems(config, run)
    if (best := run.checkpoint.save_best) is not None and match_metric_name(best, FIGURES[task]) is None:
        yield f"--save-best {best}: --finetune-task {task} has no such figure; choose of: {', '.join(FIGURES[task])}"
    if task == "sft":
        if not run.data.chat.sft:
            yield "--finetune-task sft learns conversations; leave out --no-sft"
        return
    if (
        run.model.reward_head
        and run.model.adapter.has_adapters
        and not is_trained_parameter("score.weight", run.model.adapter)
    ):
        yield "--lora-rank freezes the head that scores; add --lora-modules-to-save score.weight"
    if run.train.eval_generate and task == "reward":
        yield "--eval-generate: a reward model writes no texts; leave it out"
    yield from _preference_training_problems(run)


def _epoch_problems(config: PreferenceConfig, given: Collection[str]) -> Iterator[str]:
    """Yield problems of --finetune-epochs."""
    if config.finetune_epochs is not None and not (
        math.isfinite(config.finetune_epochs) and config.finetune_epochs > 0
    ):
        yield f"--finetune-epochs {config.finetune_epochs} is not a positive number"
    if config.finetune_epochs is not None and (both := [name for name in _DURATION if name in given]):
        yield f"--finetune-epochs and {flag_name(both[0])} both say how long the run is; keep one"


def _loss_number_problems(config: PreferenceConfig) -> Iterator[str]:
    """Yield problems of the numbers of a task's loss."""
    task = config.finetune_task
    if config.preference_beta <= 0:
        yield f"--preference-beta {config.preference_beta} must be positive"
    if task == "dpo":
        yield from _pair_loss_problems(config)
    elif task == "kto" and min(config.kto_desirable_weight, config.kto_undesirable_weight) < 0:
        yield "--kto-desirable-weight and --kto-undesirable-weight must not be negative"
    elif task == "reward" and config.reward_centre < 0:
        yield f"--reward-centre {config.reward_centre} must not be negative"


def _pair_loss_problems(config: PreferenceConfig) -> Iterator[str]:
    """Yield problems of the loss of pairs."""
    smoothing = config.preference_label_smoothing
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


def _reference_problems(config: PreferenceConfig, run: RunConfig) -> Iterator[str]:
    """Yield problems of where the reference comes from."""
    loss = f"--preference-loss {config.preference_loss}" if config.finetune_task == "dpo" else "--finetune-task kto"
    if config.finetune_task not in ("dpo", "kto"):
        return
    if not config.has_reference:
        needless = [name for name in ("preference_reference", "preference_reference_cache") if getattr(config, name)]
        if needless:
            yield f"{loss} has no reference; leave out {', '.join(map(flag_name, needless))}"
    elif not run.model.adapter.has_adapters and reference_checkpoint_path(config, run) is None:
        yield (
            f"{loss} compares with a reference; give --pretrained-checkpoint, which is also where "
            "the policy starts, or --preference-reference, or --lora-rank, whose base is the reference"
        )
    elif run.model.adapter.lora_modules_to_save and config.preference_reference is None:
        yield (
            "--lora-modules-to-save trains parameters of the base, which then is no longer the reference; give it with --preference-reference, "
            "or leave the parameters frozen"
        )
    elif config.preference_reference_cache and not (
        config.preference_reference or run.checkpoint.pretrained_checkpoint
    ):
        yield "--preference-reference-cache keeps what a checkpoint says; give that with --pretrained-checkpoint"


def _preference_training_problems(run: RunConfig) -> Iterator[str]:
    """Yield what in the run's settings does not allow training on answers."""
    if run.data.chat.sft or run.data.mock_data:
        yield "answers are read from the files of --data-path; leave out --sft and --mock-data"
    if run.model.hidden_dropout or run.model.attention_dropout or run.model.adapter.lora_dropout:
        zero = "--hidden-dropout 0 --attention-dropout 0"
        zero += " --lora-dropout 0" if run.model.adapter.lora_dropout else ""
        yield f"with dropout, answers would be compared by different networks; give {zero}"
    if not run.train.calculate_per_token_loss:
        yield "losses are means over the pairs or answers of a step; leave out --no-calculate-per-token-loss"
    if run.model.mtp.mtp_num_layers:
        yield "answers are not compared with --mtp-num-layers; leave it out"
    if run.parallel.hybrid_context_parallel:
        yield "--hybrid-context-parallel spreads documents, and the answers of a pair belong together; leave it out"
    if not (run.data.reset_attention_mask and run.data.reset_position_ids):
        yield "answers share a sample and must not see each other; leave out --no-reset-attention-mask and --no-reset-position-ids"
