"""Flags of train_rl.py, beside those of every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from megatron.core.config.flags.declare import flag, flag_name
from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.config.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class RLConfig:
    """Reinforcement learning.

    Answers are sampled, rewarded and trained on, in rounds.
    """

    rl_algorithm: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++", "ppo"] = flag(
        "grpo", "method: how rewards become advantages, and how tokens are weighed"
    )
    langrl_env_config: str | None = flag(None, "YAML file of the environments", metavar="FILE")
    grpo_prompts_per_step: int = flag(32, "prompts of a round")
    grpo_group_size: int = flag(2, "answers sampled to each prompt")
    grpo_iterations: int = flag(2, "times that the rollouts of a round are trained on")
    grpo_clamp_eps_lower: float = flag(0.01, "ratios are clipped at 1 minus this")
    grpo_clamp_eps_upper: float = flag(0.01, "ratios are clipped at 1 plus this")
    grpo_kl_beta: float = flag(0.001, "weight of the KL divergence to the reference network; 0: no reference is needed")
    grpo_entropy_term_weight: float = flag(
        0.0, "weight of -p log p of the sampled tokens, which is added to the objective"
    )
    rl_full_entropy: bool = flag(
        False,
        "log the entropy of each token's whole distribution, and let --grpo-entropy-term-weight weigh that instead of -p log p of the sampled token; costs "
        "the output layer's logits once more",
    )
    grpo_filter_groups_with_same_reward: bool = flag(
        False,
        "leave out prompts whose answers all have the same reward, so that they do not count in means over tokens",
    )
    rl_kl_estimator: Literal["k1", "k2", "k3"] = flag(
        "k3", "estimator of the KL divergence: d, d^2/2 or exp(-d) + d - 1"
    )
    rl_dual_clip: float | None = flag(None, "a token with a negative advantage A loses at most this times |A|")
    rl_discount: float = flag(1.0, "with ppo: what a reward is worth a token earlier (gamma)")
    rl_gae_lambda: float = flag(
        0.95, "with ppo: how far advantages look ahead; 0: to the next value of the critic, 1: to the reward"
    )
    rl_value_clip: float = flag(0.2, "with ppo: values of the critic move by at most this in a round; 0: no limit")
    rl_value_loss_coef: float = flag(0.1, "with ppo: weight of the critic's loss")
    rl_critic_lr_ratio: float = flag(1.0, "with ppo: learning rate of the critic over that of the policy")
    rl_reference: str | None = flag(
        None,
        "checkpoint of the reference network; left out: --pretrained-checkpoint, or with --lora-rank the base",
        metavar="FOLDER",
    )
    rl_default_temperature: float = flag(
        1.0, "temperature of sampling; the log-probabilities in training are divided alike"
    )
    rl_default_top_p: float = flag(0.0, "sample from the fewest tokens that reach this probability; 0: from all")
    rl_default_top_k: int = flag(-1, "sample from so many likeliest tokens; -1: from all")
    rl_max_new_tokens: int | None = flag(
        None, "most tokens of an answer; left out: what --seq-length leaves", metavar="TOKENS"
    )
    rl_rollout_seconds: float = flag(
        0.0, "an environment that takes longer loses its rollout; 0: no limit", metavar="SECONDS"
    )
    rl_max_inflight_requests: int | None = flag(
        None,
        "most rollouts played at once; left out: 64 of each replica of the network that generates",
        metavar="COUNT",
    )
    rl_generation_lag: int | None = flag(
        None,
        "rounds that rollouts are sampled ahead of their training; left out: 0, or 1 with --rl-partial-rollouts",
        metavar="ROUNDS",
    )
    rl_partial_rollouts: bool = flag(
        False,
        "begin a round when its own rollouts have ended; those of later rounds go on with the weights that come next",
    )
    rl_overlong_margin: int = flag(
        0, "answers within so many tokens of the limit lose up to 1 of their reward (DAPO)", metavar="TOKENS"
    )
    rl_overlong_filtering: bool = flag(
        False,
        "do not train on answers that were cut off at the limit; their rewards still count in the means of their prompts",
    )
    rl_inference_logprobs_is_correction: bool = flag(
        False, "weigh tokens by how much likelier training finds them than generation did"
    )
    rl_importance_sampling_truncation_coef: float | None = flag(None, "upper limit of these weights")
    rl_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = flag(
        "token_truncate",
        "these weights are of each token, or of the whole answer (the product of its tokens); those above the limit become the limit, or 0 (mask)",
    )
    rl_max_logprob_difference: float | None = flag(
        None, "stop when log-probabilities of generation and training differ by more than this on average (nats)"
    )
    rl_use_sequence_packing: bool = flag(
        False, "train on several rollouts in a row of --seq-length, which do not see each other"
    )
    rl_inference_tensor_model_parallel_size: int | None = flag(
        None,
        "tensor size of the network that generates, a copy of its own then; left out: as in training",
        metavar="SIZE",
    )
    rl_inference_pipeline_model_parallel_size: int | None = flag(
        None, "pipeline size of the network that generates; left out: as in training", metavar="SIZE"
    )
    rl_inference_expert_model_parallel_size: int | None = flag(
        None, "expert size of the network that generates; left out: as in training", metavar="SIZE"
    )
    rl_inference_expert_tensor_model_parallel_size: int | None = flag(
        None, "expert-tensor size of the network that generates; left out: as in training", metavar="SIZE"
    )
    rl_generation_ranks: int = flag(
        0,
        "the last so many ranks of the job generate and do not train, at the same time as the others train where --rl-generation-lag is 1 or more; 0: all "
        "ranks do both",
        metavar="RANKS",
    )
    rl_ray_address: str | None = flag(
        None,
        "start the ranks of --rl-generation-ranks over Ray, beside those of the launcher, which all train: address of the cluster, auto, or local for one on this "
        "machine",
        metavar="ADDRESS",
    )
    rl_ray_seconds: float = flag(120.0, "how long Ray may look for room for these ranks", metavar="SECONDS")
    rl_verify_model_weights_swap: bool = flag(
        False, "compare a hash of all weights after they were copied into the network that generates"
    )
    rl_offload_optimizer_during_inference: bool = flag(
        False,
        "keep the optimizer's state in CPU memory while rollouts are sampled (nothing to move where the run is on a CPU)",
    )
    rl_offload_inference_model_weights_when_idle: bool = flag(
        False, "give back the memory of the copy that generates while the run trains; the next refit fills it anew"
    )
    rl_prompts_per_eval: int = flag(32, "held-out problems of each environment at each --eval-interval; 0: none")
    rl_eval_answers: int = flag(
        1, "answers to each held-out problem; 1: the likeliest; more: sampled, and pass@k is told for k up to this"
    )
    rl_samples_per_round: int = flag(
        4, "prompts of a round whose answers go to samples.jsonl and samples.html beside the rollouts; 0: none"
    )
    rl_rollout_bank_dir: str | None = flag(
        None, "folder of JSON lines of all rollouts; left out: SAVE/rollouts", metavar="FOLDER"
    )
    rl_rollout_bank_max_bytes: int = flag(
        0,
        "remove the oldest rounds of this folder that no checkpoint needs when it grows larger; 0: none",
        metavar="BYTES",
    )

    @property
    def rollouts_per_round(self) -> int:
        """Answers sampled before the weights change."""
        return self.grpo_prompts_per_step * self.grpo_group_size

    @property
    def generation_lag(self) -> int:
        """Rounds that rollouts are sampled ahead of their training."""
        return int(self.rl_partial_rollouts) if self.rl_generation_lag is None else self.rl_generation_lag

    @property
    def inference_parallel_sizes(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Tensor, pipeline, expert and expert-tensor size of the network that generates; None: as in training."""
        return (
            self.rl_inference_tensor_model_parallel_size,
            self.rl_inference_pipeline_model_parallel_size,
            self.rl_inference_expert_model_parallel_size,
            self.rl_inference_expert_tensor_model_parallel_size,
        )

    def needs_network_copy(self, run: RunConfig) -> bool:
        """Return whether a separate network generates: on other ranks, in another layout, or because training uses
        context parallelism.
        """
        return (
            self.rl_generation_ranks > 0
            or run.parallel.context_parallel_size > 1
            or any(size is not None for size in self.inference_parallel_sizes)
        )


def generation_run_config(config: RunConfig, sizes: Sequence[int | None]) -> RunConfig:
    """Return the config of the generating network. sizes: its tensor, pipeline, expert and expert-tensor sizes; None: as in training."""
    parallel = config.parallel
    tensor, pipeline, expert, expert_tensor = sizes
    layout = ParallelConfig(
        tensor_model_parallel_size=tensor or parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline or parallel.pipeline_model_parallel_size,
        expert_model_parallel_size=expert or parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=expert_tensor or (parallel.expert_tensor_parallel_size if not tensor else None),
        distributed_backend=parallel.distributed_backend,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
    )
    model = config.model
    if model.true_vocab_size is not None:
        model = replace(model, padded_vocab_size=None).with_vocabulary(
            model.true_vocab_size, layout.tensor_model_parallel_size
        )
    return replace(config, parallel=layout, model=model)


def reference_checkpoint_path(rl: RLConfig, run: RunConfig) -> str | None:
    """Return the reference's checkpoint; None if it is the base under adapters, or if there is no KL term."""
    if not rl.grpo_kl_beta or run.model.adapter.has_adapters and rl.rl_reference is None:
        return None
    return rl.rl_reference or run.checkpoint.pretrained_checkpoint


def rl_config_problems(rl: RLConfig, run: RunConfig) -> Iterator[str]:
    """Yield a line for each problem between these settings and the run's."""
    if rl.langrl_env_config is None:
        yield "nothing says what is rewarded; give --langrl-env-config"
    sizes = ("grpo_prompts_per_step", "grpo_group_size", "grpo_iterations")
    bad_sizes = [f"{flag_name(name)} {getattr(rl, name)}" for name in sizes if getattr(rl, name) < 1]
    if bad_sizes:
        yield f"{', '.join(bad_sizes)} is not a positive number"
    elif run.train.global_batch_size and rl.rollouts_per_round % run.train.global_batch_size:
        yield (
            f"--global-batch-size {run.train.global_batch_size} does not divide the {rl.rollouts_per_round} rollouts of a round "
            f"(--grpo-prompts-per-step {rl.grpo_prompts_per_step} x --grpo-group-size {rl.grpo_group_size}); each optimizer step trains on "
            "one global batch of them"
        )
    if rl.rl_algorithm != "ppo" and rl.grpo_group_size == 1:
        yield (
            f"--rl-algorithm {rl.rl_algorithm} compares answers with the others to the same prompt; give --grpo-group-size 2 or more, or "
            "--rl-algorithm ppo, whose critic needs no others"
        )
    if rl.grpo_kl_beta and not reference_checkpoint_path(rl, run) and not run.model.adapter.has_adapters:
        yield (
            f"--grpo-kl-beta {rl.grpo_kl_beta} needs a reference network; give --pretrained-checkpoint or --rl-reference FOLDER, or "
            "--lora-rank, whose base is the reference, or --grpo-kl-beta 0"
        )
    if rl.grpo_kl_beta and run.model.adapter.lora_modules_to_save and rl.rl_reference is None:
        yield (
            "--lora-modules-to-save trains parameters of the base, which then is no longer the reference; give it with --rl-reference, or leave "
            "the parameters frozen"
        )
    yield from _sampling_problems(rl)
    yield from _generation_rank_problems(rl, run)
    yield from _rollout_problems(rl, run)
    yield from _critic_problems(rl, run)
    yield from _incompatible_run_settings(rl, run)


def _critic_problems(rl: RLConfig, run: RunConfig) -> Iterator[str]:
    """Yield problems of the critic's flags and of what it cannot be combined with."""
    if rl.rl_algorithm != "ppo":
        given = [flag_name(name) for name in _CRITIC_FLAGS if getattr(rl, name) != getattr(RLConfig(), name)]
        if given:
            yield f"{', '.join(given)} set up the critic of --rl-algorithm ppo; leave them out with {rl.rl_algorithm}"
        return
    if not (0 <= rl.rl_discount <= 1 and 0 <= rl.rl_gae_lambda <= 1):
        yield f"--rl-discount {rl.rl_discount} and --rl-gae-lambda {rl.rl_gae_lambda} must lie between 0 and 1"
    bad = [name for name in ("rl_value_clip", "rl_value_loss_coef") if getattr(rl, name) < 0]
    bad += ["rl_critic_lr_ratio"] if rl.rl_critic_lr_ratio <= 0 else []
    if bad:
        yield f"{', '.join(f'{flag_name(name)} {getattr(rl, name)}' for name in bad)} must be positive"
    if run.model.moe.moe_enable_routing_replay:
        yield "--moe-enable-routing-replay: the critic of --rl-algorithm ppo has routers of its own; leave it out"
    if run.model.adapter.has_adapters:
        yield "--rl-algorithm ppo trains a critic of its own and --lora-rank freezes all but adapters; choose another algorithm, or leave it out"
    if run.parallel.use_torch_fsdp2:
        yield "--rl-algorithm ppo has two networks in a stage, which --use-torch-fsdp2 does not wrap; give --use-distributed-optimizer"


_CRITIC_FLAGS = ("rl_discount", "rl_gae_lambda", "rl_value_clip", "rl_value_loss_coef", "rl_critic_lr_ratio")


def _generation_rank_problems(rl: RLConfig, run: RunConfig) -> Iterator[str]:
    """Yield problems of --rl-generation-ranks and --rl-ray-address."""
    if rl.rl_generation_ranks < 0:
        yield f"--rl-generation-ranks {rl.rl_generation_ranks} must be 0 or more"
    if rl.rl_ray_address and rl.rl_generation_ranks < 1:
        yield f"--rl-ray-address {rl.rl_ray_address} starts the ranks of --rl-generation-ranks; say how many"
    if rl.rl_ray_address and find_spec("ray") is None:
        yield f"--rl-ray-address {rl.rl_ray_address} needs the package ray, which is not installed here; pip install ray, or leave it out"
    if rl.rl_ray_seconds <= 0:
        yield f"--rl-ray-seconds {rl.rl_ray_seconds} must be positive"
    if rl.rl_generation_ranks <= 0:
        return
    idle = ("rl_offload_optimizer_during_inference", "rl_offload_inference_model_weights_when_idle")
    for name in idle:
        if getattr(rl, name):
            yield f"{flag_name(name)}: with --rl-generation-ranks no rank both trains and generates, so that nothing has to make room; leave it out"
    if run.parallel.elastic:
        yield "--elastic chooses which ranks train, and so does --rl-generation-ranks; leave one out"


def _sampling_problems(rl: RLConfig) -> Iterator[str]:
    """Yield problems of how answers are sampled and their tokens weighted."""
    if rl.rl_default_temperature <= 0:
        yield f"--rl-default-temperature {rl.rl_default_temperature}: answers are sampled; give a temperature above 0"
    if rl.rl_dual_clip is not None and rl.rl_dual_clip <= 1:
        yield f"--rl-dual-clip {rl.rl_dual_clip} must be above 1"
    if rl.rl_importance_sampling_truncation_coef is not None and not rl.rl_inference_logprobs_is_correction:
        yield "--rl-importance-sampling-truncation-coef limits the weights of --rl-inference-logprobs-is-correction; add that"
    mode = rl.rl_importance_sampling_mode
    if mode != "token_truncate" and not rl.rl_inference_logprobs_is_correction:
        yield f"--rl-importance-sampling-mode {mode} says what the weights of --rl-inference-logprobs-is-correction are; add that"
    if mode.endswith("mask") and rl.rl_importance_sampling_truncation_coef is None:
        yield f"--rl-importance-sampling-mode {mode} leaves out weights above a limit; give --rl-importance-sampling-truncation-coef"


def _rollout_problems(rl: RLConfig, run: RunConfig) -> Iterator[str]:
    """Yield problems of when and how many answers are sampled."""
    if rl.generation_lag < 0 or rl.rl_partial_rollouts and not rl.generation_lag:
        yield f"--rl-generation-lag {rl.generation_lag} must be 0 or more, and 1 or more with --rl-partial-rollouts, which samples beyond the round"
    if rl.generation_lag and rl.rl_max_logprob_difference is not None:
        yield (
            f"--rl-max-logprob-difference {rl.rl_max_logprob_difference}: with --rl-generation-lag {rl.generation_lag} older weights sample, which differ by "
            "nature; leave it out"
        )
    length = run.train.seq_length
    if rl.rl_max_new_tokens is not None and length and not 0 < rl.rl_max_new_tokens < length:
        yield f"--rl-max-new-tokens {rl.rl_max_new_tokens} must lie between 1 and --seq-length {length} - 1"
    yield from _count_problems(rl)
    if rl.rl_offload_inference_model_weights_when_idle and not rl.needs_network_copy(run):
        yield (
            "--rl-offload-inference-model-weights-when-idle needs a network of its own for generation, and the one in training generates; "
            "leave it out, or give one of the --rl-inference-... sizes"
        )
    if rl.rl_offload_optimizer_during_inference and run.optimizer.optimizer_cpu_offload:
        yield "--rl-offload-optimizer-during-inference and --optimizer-cpu-offload both keep the optimizer's state in CPU memory; leave one out"


def _count_problems(rl: RLConfig) -> Iterator[str]:
    """Yield a line for each count that is too small."""
    counts = {"rl_max_inflight_requests": 1, "rl_eval_answers": 1, "rl_prompts_per_eval": 0, "rl_samples_per_round": 0}
    counts |= {"rl_rollout_bank_max_bytes": 0}
    for name, least in counts.items():
        if (given := getattr(rl, name)) is not None and given < least:
            yield f"{flag_name(name)} {given} is too small; give {least} or more"


def _incompatible_run_settings(rl: RLConfig, run: RunConfig) -> Iterator[str]:
    """Yield what in the run's settings does not allow policy training."""
    if run.model.hidden_dropout or run.model.attention_dropout:
        yield "with dropout, training would not compute the log-probabilities of generation; give --hidden-dropout 0 --attention-dropout 0"
    if not run.train.calculate_per_token_loss:
        yield "losses are means over the tokens of a step; leave out --no-calculate-per-token-loss"
    if run.train.rampup_batch_size or run.train.step_batch_size_schedule:
        yield "a round has a fixed number of rollouts; leave out --rampup-batch-size and --step-batch-size-schedule"
    if run.model.adapter.lora_base_quantization != "none" and rl.needs_network_copy(run):
        yield (
            "--lora-base-quantization: weights of 4 or 8 bits are not copied into a network of its own for generation; leave out the "
            "--rl-inference-... sizes and --context-parallel-size, or the quantization"
        )
    if run.model.mtp.mtp_num_layers:
        yield "rollouts are not trained with --mtp-num-layers; leave it out"
    if rl.rl_use_sequence_packing and not (run.data.reset_attention_mask and run.data.reset_position_ids):
        yield "--rl-use-sequence-packing keeps rollouts apart; add --reset-attention-mask --reset-position-ids"
