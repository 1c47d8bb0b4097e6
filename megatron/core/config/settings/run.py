"""How a run goes: duration, batches, recomputation, checkpoints, reports; and `RunConfig`, which holds every config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.idle import conditions_resolve
from megatron.core.config.flags.when import When
from megatron.core.config.settings.architecture import Architecture
from megatron.core.config.settings.compilation import CompileConfig, CudaGraphConfig
from megatron.core.config.settings.data import DataConfig, TokenizerConfig
from megatron.core.config.settings.fault_tolerance import FaultToleranceConfig
from megatron.core.config.settings.model import ModelConfig, RequestedModel
from megatron.core.config.settings.optim import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.core.config.settings.parallel import ParallelConfig


@dataclass(frozen=True, slots=True)
class RequestedTraining:
    """Training. Batches, duration, evaluation and early exits."""

    seq_length: int | None = flag(None, "tokens in one sample", role="data")
    encoder_seq_length: int | None = flag(
        None, "T5: tokens that the encoder reads; the same as --seq-length", role="free"
    )
    decoder_seq_length: int | None = flag(
        None,
        "T5: tokens that the decoder writes; left out: --seq-length",
        role="data",
        used_with=When("architecture", ("t5",)),
    )
    micro_batch_size: int | None = flag(None, "samples in one forward pass of a rank", role="training")
    global_batch_size: int | None = flag(
        None, "samples in one step; left out: micro batch times data-parallel size", role="training"
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "start, increment and samples of a growing global batch", role="training"
    )
    step_batch_size_schedule: str | None = flag(None, "global batch by tokens seen: '0:768 250B:1536'", role="training")
    decrease_batch_size_if_needed: bool = flag(
        False, "round the global batch down to what the ranks divide", role="training"
    )
    train_iters: int | None = flag(None, "iterations to train", role="training")
    train_samples: int | None = flag(None, "samples to train, instead of iterations", role="training")
    calculate_per_token_loss: bool = flag(
        True, "the loss is not the mean over all tokens of the step, but the mean of microbatch means", role="training"
    )
    eval_iters: int = flag(100, "global batches in one evaluation", role="training")
    eval_global_batch_size: int | None = flag(
        None,
        "samples in one global batch of an evaluation; left out: as many as in a step of training",
        role="training",
    )
    eval_interval: int | None = flag(None, "iterations between evaluations (default: 1000)", role="training")
    eval_generate: str | None = flag(
        None,
        "GPT: file of prompts, one a line, that are continued at every evaluation, for log and TensorBoard; with conversations as data also "
        '{"messages": [...]}, whose next answer is written; pretrain_vlm.py: of questions '
        "about images, as megatron generate reads them, whose right answers (references) are counted",
        role="free",
        used_with=When("architecture", ("gpt",)),
    )
    eval_generate_tokens: int = flag(
        64, "most new tokens after each of those prompts", role="free", used_with=When("eval_generate")
    )
    eval_generate_temperature: float = flag(
        0.0, "how freely those tokens are drawn; 0: always the likeliest", role="free", used_with=When("eval_generate")
    )
    skip_train: bool = flag(False, "evaluate only", role="free")
    exit_interval: int | None = flag(None, "save and exit when the iteration is a multiple of this", role="free")
    exit_duration_in_mins: float | None = flag(None, "save and exit after this many minutes", role="free")
    exit_signal_handler: bool = flag(True, "do not save and exit on --exit-signal", role="free")
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = flag(
        "SIGTERM", "the signal that ends a run politely", role="free"
    )
    iterations_to_skip: tuple[int, ...] = flag((), "iterations whose data is passed over", parse=int, role="training")
    seed: int = flag(1234, "seed of weights, dropout and data order", role="data")
    data_parallel_random_init: bool = flag(False, "another dropout stream on each data-parallel rank", role="training")
    deterministic_mode: bool = flag(False, "deterministic kernels only", role="free")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "do not stop when the loss or the gradient is not finite", role="free"
    )
    manual_gc: bool = flag(False, "collect Python's garbage at fixed iterations, on all ranks at once", role="free")
    manual_gc_interval: int = flag(0, "iterations between those collections; 0: only at evaluations", role="free")
    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        0, "give cached device memory back: 1 once, 2 twice a step", role="free"
    )

    def resolve(self, architecture: Architecture, data_parallel_size: int) -> TrainConfig:
        """Return the config with sequence lengths, global batch size and evaluation interval filled in."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.seq_length is None:
            values["seq_length"] = self.encoder_seq_length
        if architecture.is_encoder_decoder and self.decoder_seq_length is None:
            values["decoder_seq_length"] = values["seq_length"]
        if self.global_batch_size is None and self.micro_batch_size is not None:
            values["global_batch_size"] = self.micro_batch_size * data_parallel_size
        if self.eval_interval is None:
            values["eval_interval"] = 1000
        return TrainConfig(**values)


class TrainConfig(RequestedTraining):
    """Batches, duration and evaluation with every size there."""

    __slots__ = ()
    seq_length: int
    decoder_seq_length: int
    micro_batch_size: int
    global_batch_size: int
    eval_interval: int


@dataclass(frozen=True, slots=True)
class RecomputeConfig:
    """Activation recomputation. Trade compute for memory: drop activations in the forward pass and compute them
    again in the backward pass.
    """

    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "whole layers, or chosen modules", role="free"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        "full: keep the input of every group of layers, or recompute the first layers of each stage",
        role="free",
        used_with=When("recompute_granularity", ("full",)),
    )
    recompute_num_layers: int | None = flag(
        None, "layers in one group (uniform), or layers to recompute (block)", role="free"
    )
    recompute_modules: (
        tuple[Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"], ...] | None
    ) = flag(
        None,
        "selective: what to recompute (default: core_attn)",
        role="free",
        used_with=When("recompute_granularity", ("selective",)),
    )
    recompute_activations: bool = flag(False, "short for --recompute-granularity selective", role="free")
    distribute_saved_activations: bool = flag(
        False,
        "full: keep each saved input in pieces over the tensor ranks",
        role="free",
        used_with=When("recompute_granularity", ("full",)),
    )

    def resolve(self) -> RecomputeConfig:
        """Return the config with granularity and modules that --recompute-activations or the granularity implies."""
        granularity, modules = self.recompute_granularity, self.recompute_modules
        if self.recompute_activations and granularity is None:
            granularity = "selective"
        if granularity == "selective" and modules is None:
            modules = ("core_attn",)
        return dataclasses.replace(self, recompute_granularity=granularity, recompute_modules=modules)

    @property
    def selected_modules(self) -> frozenset[str]:
        """The modules that selective recomputation recomputes in the backward pass."""
        return frozenset(self.recompute_modules or ()) if self.recompute_granularity == "selective" else frozenset()


@dataclass(frozen=True, slots=True)
class ActivationOffloadConfig:
    """Activation offloading. Trade copies for memory: keep activations in CPU memory between the forward and the
    backward pass.
    """

    cpu_offloading_num_layers: int = flag(
        0, "first layers of each stage whose activations go there, all of them", role="free"
    )
    fine_grained_activation_offloading: bool = flag(
        False, "activations of --offload-modules go there, in every layer", role="free"
    )
    offload_modules: tuple[
        Literal["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"], ...
    ] = flag(
        (),
        "modules whose inputs, or of core_attn all it saves, go there",
        role="free",
        used_with=When("offloads_activations"),
    )
    min_offloaded_tensor_size: int = flag(
        1024 * 1024,
        "elements of the smallest tensor that goes there",
        role="free",
        used_with=When("offloads_activations"),
    )

    @property
    def offloads_activations(self) -> bool:
        """Whether any activations are offloaded to the CPU."""
        return self.cpu_offloading_num_layers > 0 or self.fine_grained_activation_offloading


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints. Where the run's state goes and comes from. Any layout loads any other layout's checkpoint."""

    save: str | None = flag(None, "folder for checkpoints", role="free")
    load: str | None = flag(None, "folder to resume from; empty is accepted only when it is also --save", role="free")
    save_interval: int | None = flag(
        None,
        "iterations between checkpoints",
        also=("--persistent-save-interval",),
        role="free",
        used_with=When("save"),
    )
    save_retain_interval: int | None = flag(
        None, "keep only checkpoints that are multiples of this, and the newest", role="free"
    )
    save_keep_last: int | None = flag(
        None, "keep this many of the newest checkpoints, beside those of --save-retain-interval", role="free"
    )
    save_best: str | None = flag(
        None,
        "save and keep the checkpoint of the best evaluation, which SAVE/best leads to: the best by this figure of the validation line, "
        "or by the first whose name ends in this word (loss, accuracy)",
        role="free",
        metavar="FIGURE",
    )
    save_best_mode: Literal["min", "max"] | None = flag(
        None,
        "whether the smallest or the largest value of --save-best is the best; left out: min for losses, max for others",
        role="free",
        used_with=When("save_best"),
    )
    export_hf: str | None = flag(
        None,
        "folder in which each saved checkpoint also becomes a Hugging Face folder, iter_NNNNNNN",
        role="free",
        used_with=When("save"),
    )
    export_hf_like: str | None = flag(
        None,
        "Hugging Face folder whose tokenizer files and token ids go into those of --export-hf",
        role="free",
        used_with=When("export_hf"),
    )
    async_save: bool = flag(
        True, "do not train on while a checkpoint is written; takes no host memory for a copy of it", role="free"
    )
    save_optim: bool = flag(True, "do not save the optimizer's state", role="free")
    save_rng: bool = flag(True, "do not save random streams", role="free")
    load_optim: bool = flag(True, "do not load the optimizer's state", role="free")
    load_rng: bool = flag(True, "do not load random streams", role="free")
    finetune: bool = flag(False, "load weights only, and start at iteration 0", role="free")
    pretrained_checkpoint: str | None = flag(None, "weights to start from when --load has none yet", role="free")
    allow_missing_vision_projection_checkpoint: bool = flag(
        False, "the projector of images starts afresh where the weights have none", role="free"
    )
    adapter: str | None = flag(
        None,
        "adapters to start from when --load has none yet: a folder of PEFT's, or a checkpoint of a run with adapters; it says ranks, "
        "alphas and targets",
        role="free",
    )
    ckpt_step: int | None = flag(None, "iteration to load, instead of the newest", role="free")
    require_iteration: int | None = flag(
        None, "stop unless the newest checkpoint is of this iteration, and sound", role="free", used_with=When("load")
    )
    verify_integrity: bool = flag(
        True,
        "do not read all of a checkpoint before it is loaded, to go back to an older one if any bit of it has changed",
        role="free",
    )
    allow_other_tokenizer: bool = flag(False, "load a checkpoint that was trained with another tokenizer", role="free")
    allow_other_data: bool = flag(
        False,
        "go on from a checkpoint whose samples came from other data, or in another order; the count of them is kept",
        role="free",
    )
    use_checkpoint_args: bool = flag(False, "take the model's shape and tokenizer from the checkpoint", role="free")
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True, "with --use-checkpoint-args, do not take its tokenizer", role="free"
    )
    exit_on_missing_checkpoint: bool = flag(
        False, "stop when --load has no checkpoint, even when it is also --save", role="free"
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Reports. What is written, where, and how often."""

    log_interval: int = flag(100, "iterations between log lines", role="free")
    log_throughput: bool = flag(False, "model TFLOP/s and tokens/s in the log line", role="free")
    peak_tflops: float | None = flag(
        None, "peak TFLOP/s of one device, for MFU; left out: known for common GPUs", role="free"
    )
    log_params_norm: bool = flag(False, "norm of the parameters in the log line", role="free")
    log_num_zeros_in_grad: bool = flag(False, "number of zeros in the gradient in the log line", role="free")
    log_progress: bool = flag(False, "append a line to progress.txt in --save at every checkpoint", role="free")
    log_memory_interval: int | None = flag(
        None, "iterations between memory reports; left out: one after the first log line", role="free"
    )
    log_jsonl: str | None = flag(None, "file for one JSON object a report", role="free")
    run_log: str | None = flag(
        None,
        "file that keeps what this run was given and what became of it; left out: run_log.jsonl in --save",
        role="free",
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard", role="free")
    tensorboard_log_interval: int = flag(1, "iterations between TensorBoard points", role="free")
    tensorboard_queue_size: int = flag(1000, "points kept before TensorBoard writes them", role="free")
    log_timers_to_tensorboard: bool = flag(False, "timers to TensorBoard", role="free")
    log_memory_to_tensorboard: bool = flag(False, "memory to TensorBoard", role="free")
    log_validation_ppl_to_tensorboard: bool = flag(False, "validation perplexity to TensorBoard", role="free")
    log_world_size_to_tensorboard: bool = flag(False, "number of ranks to TensorBoard", role="free")
    log_loss_scale_to_tensorboard: bool = flag(True, "no loss scale to TensorBoard", role="free")
    timing_log_level: Literal[0, 1, 2] = flag(0, "0: the whole iteration, 1: its big parts, 2: everything", role="free")
    timing_log_option: Literal["max", "minmax", "all"] = flag("minmax", "which ranks' timers are shown", role="free")
    barrier_with_level_1_timing: bool = flag(
        True, "ranks do not wait for each other around level 1 timers", role="free"
    )
    wandb_project: str | None = flag(None, "Weights & Biases project", role="free")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run", role="free")
    wandb_save_dir: str | None = flag(None, "folder for Weights & Biases files", role="free")
    wandb_entity: str | None = flag(None, "Weights & Biases team", role="free")
    logging_level: int | None = flag(None, "level of Python's logging (10 debug, 20 info, 30 warning)", role="free")
    profile: bool = flag(False, "record a torch profile of some iterations", role="free")
    profile_step_start: int = flag(10, "first iteration of the profile", role="free")
    profile_step_end: int = flag(12, "iteration after the last of the profile", role="free")
    profile_ranks: tuple[int, ...] = flag((0,), "ranks that record a profile", parse=int, role="free")


@conditions_resolve
@dataclass(frozen=True, slots=True)
class RequestedRun:
    """Everything the user requested; None where a size was left out. `resolve` makes the config of a run of it."""

    model: RequestedModel = RequestedModel()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    train: RequestedTraining = RequestedTraining()
    recompute: RecomputeConfig = RecomputeConfig()
    offload: ActivationOffloadConfig = ActivationOffloadConfig()
    compilation: CompileConfig = CompileConfig()
    graphs: CudaGraphConfig = CudaGraphConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    faults: FaultToleranceConfig = FaultToleranceConfig()

    def resolve(self, world_size: int) -> RunConfig:
        """Return the config of the run, with what depends on other settings filled in; nothing that was given changes.

        The `|` of a hybrid pattern become the pipeline layout, if there are several pipeline ranks. Sequence
        parallelism without tensor parallelism is switched off; so is the tensor size of experts without experts.
        Required settings that are missing stay None: the rule `required` reports them before they are used.
        """
        parallel, optimizer = self._effective_parallel_and_optimizer()
        train = self.train.resolve(self.model.architecture, max(1, parallel.data_parallel_size(world_size)))
        model = self.model.resolve()
        if model.max_position_embeddings is None and train.seq_length is not None:
            longest = max(train.seq_length, train.decoder_seq_length or 0)
            model = dataclasses.replace(model, max_position_embeddings=longest)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if parallel.pp > 1 and parallel.pipeline_model_parallel_layout is None:
            parallel = dataclasses.replace(parallel, pipeline_model_parallel_layout=model.hybrid.pipeline_layout_text)
        groups = {"model": model, "train": train, "parallel": parallel, "optimizer": optimizer}
        return RunConfig(**given | groups | {"recompute": self.recompute.resolve()})

    def _effective_parallel_and_optimizer(self) -> tuple[ParallelConfig, OptimizerConfig]:
        """Return parallel and optimizer config without ineffective settings, and with `dist_muon` replaced."""
        parallel, optimizer = self.parallel, self.optimizer
        changes: dict[str, Any] = {}
        if parallel.sequence_parallel and parallel.tp == 1:
            changes["sequence_parallel"] = False
        if parallel.expert_tensor_parallel_size is not None and not self.model.moe.num_experts:
            changes["expert_tensor_parallel_size"] = None
        if optimizer.optimizer == "dist_muon":
            optimizer = dataclasses.replace(optimizer, optimizer="muon")
            if not parallel.use_torch_fsdp2:
                changes["use_distributed_optimizer"] = True
        return dataclasses.replace(parallel, **changes), optimizer


class RunConfig(RequestedRun):
    """Everything that holds in a run: what was requested, and what follows from it."""

    __slots__ = ()
    model: ModelConfig
    train: TrainConfig
