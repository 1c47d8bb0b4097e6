"""How ranks are divided, and how they talk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag
from megatron.core.config.flags.when import When

Placement = Literal["wrap", "v"]
CPComm = Literal["p2p", "a2a", "allgather", "all_gather", "a2a+p2p"]
StateComm = Literal["auto", "a2a", "states"]


def can_exchange_heads(size: int, heads: int, groups: int) -> bool:
    """Whether `size` context ranks can divide heads with their groups; fewer groups than ranks are repeated."""
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Parallelism. How the ranks share the work. Whatever is left over after tensor and pipeline is data parallel."""

    tensor_model_parallel_size: int = flag(1, "ranks that share each layer's matrices", role="free")
    pipeline_model_parallel_size: int = flag(1, "ranks in a line, each with some of the layers", role="free")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleave: layers in one chunk of a rank", role="free"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleave: chunks on each pipeline rank", role="free"
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        None,
        "interleave: microbatches a chunk runs in a row; left out: the pipeline size",
        also=("--microbatch-group-size-per-vp-stage",),
        role="free",
    )
    pipeline_schedule: Literal["1f1b", "gpipe", "zb-h1", "zb-v"] = flag(
        "1f1b",
        "order of forward and backward passes; zb-h1: gradients of weights wait until a rank would idle; zb-v: the same over two "
        "chunks a rank, there and back",
        role="free",
    )
    decoder_first_pipeline_num_layers: int | None = flag(None, "layers on the first pipeline rank", role="free")
    decoder_last_pipeline_num_layers: int | None = flag(None, "layers on the last pipeline rank", role="free")
    account_for_embedding_in_pipeline_split: bool = flag(
        False, "count the embedding as one layer of the split", role="free"
    )
    account_for_loss_in_pipeline_split: bool = flag(
        False, "count the output layer and loss as one layer of the split", role="free"
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "the split as a string: E embedding, t layer, m multi-token prediction, L loss, | next stage, *n repeat; e.g. 'Et*3|(tt|)*2mL'",
        role="free",
    )
    sequence_parallel: bool = flag(False, "between matrices, cut the sequence over the tensor ranks", role="free")
    use_tp_pp_dp_mapping: bool = flag(
        False, "lay ranks out tensor, pipeline, data instead of tensor, data, pipeline", role="free"
    )
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag(
        "auto", "transport; auto: nccl on GPUs, gloo on CPUs", role="free"
    )
    distributed_timeout_minutes: float = flag(
        10, "how long a rank waits for the others before it gives up", role="free"
    )
    use_distributed_optimizer: bool = flag(
        False, "cut optimizer state over the data-parallel ranks (ZeRO-1)", role="free"
    )
    use_torch_fsdp2: bool = flag(
        False,
        "cut weights, gradients and optimizer state over the data-parallel ranks, layer by layer (ZeRO-3)",
        role="free",
    )
    torch_fsdp2_no_reshard_after_forward: bool = flag(
        False,
        "--use-torch-fsdp2: a gathered layer stays whole until its backward pass (ZeRO-2): less to send, more memory",
        role="free",
        used_with=When("use_torch_fsdp2"),
    )
    overlap_grad_reduce: bool = flag(False, "sum gradients bucket by bucket while the backward pass runs", role="free")
    overlap_param_gather: bool = flag(
        False,
        "gather parameters bucket by bucket while the next forward pass runs",
        role="free",
        used_with=When("use_distributed_optimizer"),
    )
    ddp_bucket_size: int | None = flag(
        None, "elements in one bucket of gradients; left out: max(40M, 1M * data-parallel size)", role="free"
    )
    ddp_num_buckets: int | None = flag(None, "number of buckets, instead of their size", role="free")
    ddp_average_in_collective: bool = flag(
        False, "let the collective average gradients instead of scaling them before", role="free"
    )
    gradient_accumulation_fusion: bool = flag(
        True, "matrix products do not add gradients of weights to the sum over microbatches themselves", role="free"
    )
    overlap_p2p_communication: bool = flag(
        True, "do not overlap messages between pipeline stages with compute", role="free"
    )
    tp_comm_overlap: bool = flag(
        False,
        "--sequence-parallel: pieces of the sequence travel round the tensor ranks while others are multiplied",
        role="free",
        used_with=When("sequence_parallel"),
    )
    tp_comm_overlap_ag: bool = flag(True, "--tp-comm-overlap: not where a product's input is gathered", role="free")
    tp_comm_overlap_rs: bool = flag(
        True, "--tp-comm-overlap: not where a product is summed over the ranks", role="free"
    )
    tp_comm_overlap_rs_dgrad: bool = flag(
        False,
        "--tp-comm-overlap: where the gradient of an input is summed too, in place of summing it behind that of the weight",
        role="free",
        used_with=When("tp_comm_overlap"),
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "dual-batch overlap: the forward pass of a microbatch and the backward pass of another alternate; one computes while the other's tokens travel to "
        "experts and back",
        role="free",
    )
    delay_wgrad_compute: bool = flag(
        False,
        "gradients of weights wait until a backward pass would wait for tokens on their way to experts and back, or for other ranks",
        role="free",
    )
    use_cpu_initialization: bool = flag(
        False, "draw initial weights on the CPU, the same on every kind of device", role="free"
    )
    context_parallel_size: int = flag(
        1, "ranks that share each sequence", role="free", used_with=When("architecture", ("gpt",))
    )
    cp_comm_type: tuple[CPComm, ...] = flag(
        ("p2p",),
        "how attention sees the whole sequence, once or a layer: p2p sends keys round a ring, a2a trades sequence for "
        "heads, allgather collects all keys, a2a+p2p does both",
        role="free",
    )
    state_comm_type: StateComm = flag(
        "auto",
        "how layers with a state see the whole sequence: a2a trades sequence for heads; states sends what a state becomes over a rank's positions, "
        "whatever the length; auto: a2a where the context ranks divide the heads, else states",
        role="free",
        used_with=When("keeps_state"),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None,
        "a2a+p2p: ranks of the inner a2a and of the outer ring",
        role="free",
        used_with=When("cp_comm_type", ("a2a+p2p",)),
    )
    hybrid_context_parallel: bool = flag(
        False, "cut each packed sequence over as many ranks as its length deserves", role="free"
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None,
        "--hybrid-context-parallel: most tokens of one sequence on a rank",
        role="free",
        used_with=When("hybrid_context_parallel"),
    )
    expert_model_parallel_size: int = flag(
        1, "ranks that share the experts of a layer", role="free", used_with=When("num_experts")
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "ranks that share each expert's matrices; left out: the tensor size",
        role="free",
        used_with=When("num_experts", idle="noted"),
    )
    elastic: bool = flag(
        False,
        "fit the layout to the ranks that there are, by fewer or more copies first, with the same batches",
        role="free",
    )

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self.tensor_model_parallel_size

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline schedule computes weight gradients as actions of their own (zero bubble)."""
        return self.pipeline_schedule in ("zb-h1", "zb-v")

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether layers delay weight gradients beyond the backward pass of their inputs."""
        return self.splits_backward or self.delay_wgrad_compute

    @property
    def stage_placement(self) -> Placement:
        """How pipeline stages are placed on ranks: "v" for zb-v, else "wrap" (see `stage_rank_and_chunk`)."""
        return "v" if self.pipeline_schedule == "zb-v" and self.pp > 1 else "wrap"

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return self.pipeline_model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks: world_size over tensor x pipeline x context size."""
        return world_size // max(
            1, self.tp * self.pp * self.context_parallel_size
        )  # rules/engine.py refuses sizes below 1
