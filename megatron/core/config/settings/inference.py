"""How text is generated: what is decoded together, and how much memory that may take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.core.config.flags.declare import flag

MOST_CACHE_BYTES = 4 * 10**9  # of keys and values on a rank, unless another size is requested


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """Text generation. Requests are decoded together, each with its own settings; new ones join and finished ones
    leave at every step.
    """

    inference_max_requests: int = flag(
        32,
        "requests decoded together by each copy of the network; the others wait",
        also=("--inference-dynamic-batching-max-requests", "--inference-max-batch-size"),
    )
    inference_max_waiting_requests: int = flag(1024, "requests that may wait; more are refused")
    inference_max_seq_length: int | None = flag(
        None, "tokens of a prompt and its continuation; left out: the network's positions"
    )
    inference_dynamic_batching_buffer_size_gb: float | None = flag(
        None, "GB of keys and values kept on each rank; left out: what all requests need at their longest, at most 4 GB"
    )
    inference_dynamic_batching_block_size: int = flag(
        16, "tokens whose keys and values are kept, shared and let go together"
    )
    inference_dynamic_batching_max_tokens: int = flag(2048, "new tokens in one forward pass, of all requests together")
    inference_dynamic_batching_prefix_caching: bool = flag(
        True, "texts that begin alike do not share the keys and values of their beginning"
    )
    inference_dynamic_batching_prefix_caching_mamba_gb: float | None = flag(
        None,
        "GB on each rank of states that are kept for texts that begin alike, of layers that have a state in the place of keys and values; left out: as "
        "many states as requests are decoded together; 0: none, and then no beginnings are shared",
    )
    mamba_inference_conv_states_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None,
        "format in which the last inputs of convolutions are kept between steps, of layers with a state; left out: the network's",
    )
    mamba_inference_ssm_states_dtype: Literal["fp32", "bf16", "fp16"] | None = flag(
        None,
        "format in which states are kept between steps, of layers that have one; they are computed in fp32 or wider, in which they are kept if "
        "this is left out: in half precision they lose what a long text adds",
    )
    enable_chunked_prefill: bool = flag(
        True, "do not read a prompt in several forward passes; it waits until it fits into one"
    )
    inference_dynamic_batching_num_cuda_graphs: int | None = flag(
        None,
        "shapes of a step of one token a text that are kept as CUDA graphs; left out: 16 where that is possible; 0: none",
    )
    inference_paged_attention: Literal["auto", "triton", "gathered"] = flag(
        "auto",
        "how attention reads the blocks of the cache: where they lie, by Triton's kernel; gathered, by the run's attention; auto: the "
        "first on a GPU, in all formats but fp64",
    )
    inference_async_scheduling: bool = flag(
        True,
        "do not schedule the next step while the GPU computes one, but when its tokens are known (always so on a CPU, over several ranks, "
        "and with drafts)",
    )
    num_speculative_tokens: int = flag(0, "tokens that a draft proposes and one forward pass checks")
    max_loras: int = flag(8, "adapters that are served beside the network at once")
    max_lora_rank: int = flag(64, "largest rank of an adapter that is served")

    def problems(self) -> Iterator[str]:
        """Yield which settings are out of range, and what to give."""
        least = {
            "inference_max_requests": 1,
            "inference_max_waiting_requests": 0,
            "inference_dynamic_batching_block_size": 1,
            "inference_dynamic_batching_max_tokens": 1,
            "num_speculative_tokens": 0,
            "max_loras": 0,
            "max_lora_rank": 1,
            "inference_dynamic_batching_num_cuda_graphs": 0,
        }
        for name, number in least.items():
            if (given := getattr(self, name)) is not None and given < number:
                yield f"--{name.replace('_', '-')} {given} is too small; give {number} or more"
        if self.inference_max_seq_length is not None and self.inference_max_seq_length < 2:
            yield f"--inference-max-seq-length {self.inference_max_seq_length} has no room for a prompt and a token; give 2 or more"
        size = self.inference_dynamic_batching_buffer_size_gb
        if size is not None and size <= 0:
            yield f"--inference-dynamic-batching-buffer-size-gb {size} is no size; give a number above 0"
        states = self.inference_dynamic_batching_prefix_caching_mamba_gb
        if states is not None and states < 0:
            yield f"--inference-dynamic-batching-prefix-caching-mamba-gb {states} is no size; give a number, or 0 for none"
        together = self.inference_max_requests * (1 + self.num_speculative_tokens)
        if self.inference_dynamic_batching_max_tokens < together:
            yield (
                f"--inference-dynamic-batching-max-tokens {self.inference_dynamic_batching_max_tokens} is less than "
                f"--inference-max-requests {self.inference_max_requests} x (1 + --num-speculative-tokens {self.num_speculative_tokens}) "
                f"= {together}; give {together} or more"
            )
