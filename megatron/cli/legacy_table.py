"""Every Megatron flag that is not a field of our configs, and what becomes of it. Data only; `legacy_flags.py` reads it.

A group is a reason, shared by the flags that it holds for. Names stand without their dashes:

    switches   take no value            "use-mcore-models"
    values     take values               "moe-router-topk=2": `=` gives the value that changes nothing, `|` several of them

The kinds of group:

    ignored    accepted with the reason: the flag changes no result here
    later      not built yet: refused with the reason, but accepted with a value that changes nothing
    refused    obsolete or out of scope: the same, and the reason says what to do instead

When a feature is built, its flags become fields of a config and leave this table (a test holds the two apart).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["renamed", "ignored", "later", "refused"]


@dataclass(frozen=True, slots=True)
class LegacyFlag:
    """A Megatron flag that is not ours, and what becomes of it. One whose name ends in * stands for all that begin so.
    sentence: the reason, as a clause. takes_values: whether words may follow. harmless: values that change nothing.
    becomes: of a renamed flag, the words that replace it. yields: those words give way to explicit settings.
    """

    flag: str
    kind: Kind
    sentence: str
    takes_values: bool = False
    harmless: tuple[str, ...] = ()
    becomes: tuple[str, ...] = ()
    yields: bool = False


def _renamed(flag: str, words: tuple[str, ...], *, keeps_values: bool = True, yields: bool = False) -> LegacyFlag:
    """An old spelling of a flag. words: what replaces it; the old flag's values follow if `keeps_values`."""
    return LegacyFlag(flag, "renamed", f"say {' '.join(words)}", keeps_values, becomes=words, yields=yields)


def _flags(kind: Kind, sentence: str, *, switches: str = "", values: str = "") -> Iterator[LegacyFlag]:
    """Yield the flags that one reason holds for."""
    yield from (LegacyFlag(f"--{name}", kind, sentence) for name in switches.split())
    for name, _, harmless in (entry.partition("=") for entry in values.split()):
        yield LegacyFlag(f"--{name}", kind, sentence, takes_values=True, harmless=tuple(filter(None, harmless.split("|"))))


RENAMES = (
    _renamed("--batch-size", ("--micro-batch-size",)),
    _renamed("--model-parallel-size", ("--tensor-model-parallel-size",)),
    _renamed("--warmup", ("--lr-warmup-fraction",)),
    _renamed("--bundle-weights", ("--failure-dump-weights",), keeps_values=False),
    _renamed("--ledger", ("--run-log",)),
    _renamed("--layernorm-epsilon", ("--norm-epsilon",)),
    _renamed("--override-lr-scheduler", ("--override-opt-param-scheduler",), keeps_values=False),
    _renamed("--use-checkpoint-lr-scheduler", ("--use-checkpoint-opt-param-scheduler",), keeps_values=False),
    _renamed("--use-rotary-position-embeddings", ("--position-embedding-type", "rope"), keeps_values=False),
    _renamed("--no-position-embedding", ("--position-embedding-type", "none"), keeps_values=False, yields=True),
    _renamed("--checkpoint-activations", ("--recompute-granularity", "full", "--recompute-method", "uniform",
                                        "--recompute-num-layers", "1"), keeps_values=False, yields=True),
    _renamed("--checkpoint-num-layers", ("--recompute-num-layers",)),
    _renamed("--activations-checkpoint-method", ("--recompute-granularity", "full", "--recompute-method")),
    _renamed("--activations-checkpoint-num-layers", ("--recompute-num-layers",)),
    _renamed("--moe-layer-recompute", ("--recompute-granularity", "selective", "--recompute-modules", "moe"), keeps_values=False, yields=True),
    _renamed("--distribute-checkpointed-activations", ("--distribute-saved-activations",), keeps_values=False),
    _renamed("--no-tp-comm-split-ag", ("--no-tp-comm-overlap-ag",), keeps_values=False),
    _renamed("--no-tp-comm-split-rs", ("--no-tp-comm-overlap-rs",), keeps_values=False),
    # What ModelOpt's entry of Megatron sets; the published gpt-oss was trained on 4,096 positions before, which is for the user to say.
    _renamed("--enable-gpt-oss", ("--position-embedding-type", "yarn", "--rotary-scaling-factor", "32", "--yarn-original-max-position-embeddings",
                                "131072", "--yarn-beta-fast", "32", "--yarn-beta-slow", "1", "--mscale", "1", "--mscale-all-dim", "0",
                                "--no-yarn-correction-range-round-to-int"), keeps_values=False, yields=True),
    _renamed("--enable-cuda-graph", ("--cuda-graph-impl", "local"), keeps_values=False),
    _renamed("--s3-cache-path", ("--object-storage-cache-path",)),
    _renamed("--exit-signal-handler-for-training", ("--exit-signal-handler",), keeps_values=False),
)

# Values of our own flags that change nothing here: flag, values, the word that stands for each ("" for none), reason.
REPLACED = (
    ("--moe-flex-dispatcher-backend", "hybridep ncclep", "auto", "tokens are sent by DeepEP where it can be used, else by all-to-all; the "
     "result is the same"),
    ("--cuda-graph-impl", "transformer_engine", "local", "this project's own recording stands for that of the library; the result is the same"),
    ("--cuda-graph-modules --cuda-graph-scope", "moe_router moe_preprocess", "", "experts run as they are, beside the layers that are recorded; the "
     "result is the same"),
    ("--cross-entropy-fusion-impl", "te", "auto", "the loss is this project's own"),
)

# Values of our own flags that Megatron knows and we do not (yet): flag, values, reason.
VALUES = (
    ("--experimental-attention-variant", "dsa dsv4_hybrid gdn2 gated_delta_product", "there is no such attention here; choose gated_delta_net"),
    ("--optimizer", "adaptive_muon", "this optimizer is not built yet; choose adam, muon, soap, lion, adafactor or sgd"),
    ("--transformer-impl", "inference_optimized", "generation chooses its own kernels; choose local or transformer_engine"),
    ("--cuda-graph-impl", "full_iteration", "layers are recorded one by one; choose local"),
    ("--cuda-graph-modules", "moe mamba full_iteration", "only attention and MLPs are recorded; choose attn, mlp or both"),
    ("--cuda-graph-scope", "moe mamba full_iteration", "only attention and MLPs are recorded; choose attn, mlp or both"),
    ("--cuda-graph-scope", "full", "leave it out: whole layers are recorded where they can be; or choose attn or mlp"),
    ("--muon-fp32-matmul-prec", "low", "bf16 is the least that Newton-Schulz is done in; choose medium or high"),
    ("--muon-coefficient-type", "aol custom", "these coefficients are not built in; choose quintic, simple or polar_express"),
    ("--sft-tokenizer-prompt-format", "nemotron-h-aligned nemotron-nano-v2 identity default",
     "this format is not built in; choose chatml, llama2, llama3 or mistral, or tokenizer and the model's own --chat-template"),
    ("--moe-router-load-balancing-type", "quantile_balancing",
     "this way of balancing is not built yet; choose aux_loss, seq_aux_loss, global_aux_loss, sinkhorn or none"),
)

IGNORED = (
    *_flags("ignored", "there is one implementation of the models",
          switches="use-mcore-models use-legacy-models enable-experimental"),
    *_flags("ignored", "kernels are chosen for each operation by what the machine has, and compute the same function",
          switches="use-flash-attn no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion "
                   "no-rope-fusion cross-entropy-loss-fusion no-persist-layer-norm "
                   "disable-jit-fuser no-gradient-reduce-div-fusion use-fused-weighted-squared-relu "
                   "fused-residual-rmsnorm use-transformer-engine-op-fuser use-te-activation-func "
                   "use-grouped-gemm-for-dense-mlp disable-bf16-reduced-precision-matmul",
          values="flash-attention-version"),
    *_flags("ignored", "rows of an expert are filled up where a product of 8 bits needs it, and not by the router",
          switches="moe-router-padding-for-quantization moe-router-padding-for-fp8"),
    *_flags("ignored", "softmax and loss are always summed in fp32",
          switches="attention-softmax-in-fp32 fp16-lm-cross-entropy"),
    *_flags("ignored", "with the softmax in fp32 the two factors cancel out and are not needed",
          switches="apply-query-key-layer-scaling no-query-key-layer-scaling"),
    *_flags("ignored", "it changes when ranks talk, not what they compute, and is not available here",
          switches="defer-embedding-wgrad-compute overlap-p2p-communication-warmup-flush "
                   "overlap-param-gather-with-optimizer-step no-align-grad-reduce no-align-param-gather "
                   "delay-param-gather no-delay-grad-reduce no-async-tensor-model-parallel-allreduce "
                   "no-scatter-gather-tensors-in-pipeline ddp-pad-buckets-for-high-nccl-busbw create-all-gather-group "
                   "no-use-layer-wise-param-layout use-ring-exchange-p2p no-clone-scatter-output-in-embedding",
          values="wgrad-deferral-limit DDP-impl "
                 "pipeline-model-parallel-comm-backend suggested-communication-unit-size symmetric-ar-type "
                 "train-sync-interval"),
    *_flags("ignored", "behind the first product of a backward pass an input is always gathered again, and behind the second its gradient summed",
          switches="no-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad"),
    *_flags("ignored", "--tp-comm-overlap sends pieces by the transport of the run", values="tp-comm-overlap-cfg tp-comm-bootstrap-backend"),
    *_flags("ignored", "the network library is tuned through its own environment variables",
          switches="use-sharp use-nccl-ub disable-symmetric-registration initialize-socket-comms",
          values="nccl-communicator-config-path high-priority-stream-groups sharp-enabled-group "
                 "distributed-timeout-seconds-after-init"),
    *_flags("ignored", "PyTorch's flight recorder is switched on by its own environment variables",
          switches="no-flight-recorder-dump-on-timeout flight-recorder-include-stack-trace "
                   "no-flight-recorder-include-only-active no-flight-recorder-extra-dump-on-exec",
          values="flight-recorder-dump-path flight-recorder-trace-buffer-size"),
    *_flags("ignored", "each rank learns its place from the launcher's environment",
          switches="lazy-mpu-init", values="local-rank local_rank"),
    *_flags("ignored", "groups for the CPU are made where they are needed", switches="disable-gloo-process-groups"),
    *_flags("ignored", "models are always built without memory first and filled rank by rank",
          switches="init-model-with-meta-device no-initialization"),
    *_flags("ignored", "random streams are always kept by name",
          switches="te-rng-tracker inference-rng-tracker use-same-sampling-seed-across-dp-ranks"),
    *_flags("ignored", "masks are made where attention is computed, never by the data loader",
          switches="no-create-attention-mask-in-dataloader"),
    *_flags("ignored", "it only shortens the start with very many data files",
          switches="dataloader-fast-cache-load dataloader-defer-npy-index-mmap mmap-warmup",
          values="per-dataset-sequences-path"),
    *_flags("ignored", "the weights of a blend are always normalised",
          switches="renormalize-blend-weights"),
    *_flags("ignored", "there is one checkpoint format; it is saved in parallel and loads into any layout",
          switches="auto-detect-ckpt-format use-dist-ckpt ckpt-fully-parallel-save ckpt-fully-parallel-load "
                   "no-ckpt-fully-parallel-save ckpt-assume-constant-structure dist-ckpt-optim-fully-reshardable "
                   "dist-ckpt-save-pre-mcore-014 ckpt-convert-update-legacy-dist-opt-format "
                   "ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create "
                   "no-ckpt-load-validate-sharding-integrity distrib-optim-fully-reshardable-mem-efficient "
                   "ckpt-drop-redundant-extra-state no-strict-fsdp-dtensor-load no-stream-ckpt-dequant",
          values="ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-save-process-group "
                 "ckpt-fully-parallel-load-process-group ckpt-pg-tensors-cache-path dist-ckpt-workers"),
    *_flags("ignored", "checkpoints are saved in this project's one format; those of Megatron are read as they are, "
                     "and tools/checkpoint/convert.py writes them", values="ckpt-format dist-ckpt-format"),
    *_flags("ignored", "the optimizer's state is cut over all data-parallel ranks, which takes less memory and gives the same numbers",
          values="num-distributed-optimizer-instances"),
    *_flags("ignored", "how many processors of a GPU send tokens to experts is left to the library that sends them",
          values="moe-flex-dispatcher-num-sms moe-deepep-num-sms moe-hybridep-num-sms moe-hybridep-num-blocks-permute "
                 "moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms-preprocessing"),
    *_flags("ignored", "names and shapes of a checkpoint must fit the model, whatever this says",
          values="dist-ckpt-strictness"),
    *_flags("ignored", "--async-save writes from a thread of each rank, and needs no other process",
          switches="use-persistent-ckpt-worker async-ckpt-use-cpu-shm",
          values="async-strategy async-ckpt-cpu-priority async-ckpt-io-priority"),
    *_flags("ignored", "a tokenizer is data: no code that comes with it is run", switches="trust-remote-code"),
    *_flags("ignored", "HuggingFaceTokenizer always reads tokenizer.json with the tokenizers package",
          switches="tokenizer-hf-no-use-fast"),
    *_flags("ignored", "SentencePieceTokenizer always has <CLS>, <SEP>, <EOD> and <MASK>; GPTSentencePieceTokenizer has the "
                     "model's own pieces alone", switches="tokenizer-sentencepiece-legacy"),
    *_flags("ignored", "gigatoken is used wherever it is installed and gives the same ids", switches="use-gigatoken"),
    *_flags("ignored", "the tokenizer's files stay where they are", switches="no-save-tokenizer-assets"),
    *_flags("ignored", "--profile always records with PyTorch's profiler, shapes included",
          switches="use-pytorch-profiler pytorch-profiler-collect-shapes record-shapes"),
    *_flags("ignored", "TensorBoard always gets the batch size and the learning rate",
          switches="log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard"),
    *_flags("ignored", "services outside of the run are not called, and it trains without them",
          switches="enable-one-logger no-one-logger one-logger-async otel-enabled adlr-autoresume enable-ft-package "
                   "calc-ft-timeouts run-workload-inspector-server enable-msc disable-msc",
          values="one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version otel-service-name "
                 "otel-span-groups adlr-autoresume-interval ft-num-warmup-iters config-logger-dir"),
    *_flags("ignored", "garbage is collected around every evaluation when --manual-gc is on", switches="no-manual-gc-eval"),
    *_flags("ignored", "a signal is noticed at the end of each step, wherever it arrives",
          switches="exit-signal-handler-for-dataloader"),
    *_flags("ignored", "it is a hook for tests of Megatron itself", switches="test-mode"),
)

LATER = (
    *_flags("later", "layers are this project's own and choose a kernel for each operation; no library brings whole layers",
          switches="use-te", values="te-precision-config-file"),
    *_flags("later", "embeddings of a BERT are not part of its training", switches="output-bert-embeddings",
          values="bert-embedder-type bert-load"),
    *_flags("refused", "encoder and decoder are one line of layers, cut as --pipeline-model-parallel-size and the flags of the "
                     "split say, on the same ranks; see --pipeline-model-parallel-layout",
          values="pipeline-model-parallel-split-rank encoder-tensor-model-parallel-size=0 "
                 "encoder-pipeline-model-parallel-size=0"),
    *_flags("later", "muP is not built yet", switches="use-mup",
          values="mup-base-hidden-size mup-width-mult mup-embedding-mult mup-output-mult mup-base-head-dim "
                 "mup-attn-scale-power"),
    *_flags("later", "latent vectors are not kept by training, and their projections are not fused",
          switches="cache-mla-latents mla-down-proj-fusion"),
    *_flags("ignored", "kernels are chosen for each operation by what the machine has, and compute the same function",
          switches="moe-router-fusion moe-permute-fusion use-grouped-gemm-for-shared-expert moe-use-grouped-tensor "
                   "moe-single-grouped-weight moe-single-grouped-bias moe-permute-fusion-into-hybridep"),
    *_flags("refused", "say over how many ranks each expert is cut with --expert-tensor-parallel-size", switches="moe-extended-tp"),
    *_flags("later", "this part of mixture-of-experts layers is not built yet",
          switches="overlap-dispatch-backward-with-experts-wgrad ep-overlap-early-attn-memory-release "
                   "moe-hybridep-pad-uneven-dispatch-inputs moe-pad-experts-for-cuda-graph-inference "
                   "moe-apply-probs-on-input moe-ncclep-zero-copy moe-ncclep-static-shape high-priority-a2a-comm-stream "
                   "moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states "
                   "moe-routing-trace-dump-weights",
          values="moe-latent-size moe-router-topk-limited-devices "
                 "moe-router-quantile-balancing-ema moe-router-force-biased moe-shared-expert-glu-interleave-size "
                 "moe-dispatch-fwd-dtype moe-combine-bwd-dtype "
                 "moe-mlp-glu-interleave-size moe-expert-rank-capacity-factor "
                 "expert-tensor-parallel-num-weight-shards=1 moe-routing-trace-path "
                 "moe-routing-trace-max-training-iters"),
    *_flags("later", "this part of multi-token prediction is not built yet", switches="mtp-standalone mtp-hsm"),
    *_flags("refused", "layers of multi-token prediction stand in --hybrid-layer-pattern, behind a / for each depth",
          values="mtp-hybrid-override-pattern"),
    *_flags("ignored", "the layers are those of --hybrid-layer-pattern, and scans are computed by the kernel that suits the machine",
          switches="is-hybrid-model disable-mamba-mem-eff-path"),
    *_flags("refused", "states of scans are computed and kept in fp32", values="mamba-training-ssm-states-dtype=fp32"),
    *_flags("refused", "layers with a state are Mamba-2 (M) and the gated delta net (G); there are no gated delta products",
          switches="gdp-cutedsl-kernel",
          values="gdp-num-householder gdp-num-chunk-states-to-recompute"),
    *_flags("later", "Megatron's own sharding of weights over data-parallel ranks is not built yet; --use-torch-fsdp2 shards "
                   "weights, gradients and the optimizer's state",
          switches="use-megatron-fsdp use-custom-fsdp fsdp-double-buffer fsdp-manual-registration megatron-fsdp-enable-fine-grained-param-gather "
                   "megatron-fsdp-max-pool-double-buffer fsdp-db-use-persist-buf-on-alloc-fail "
                   "enable-full-sharding-in-hsdp keep-fp8-transpose-cache",
          values="data-parallel-sharding-strategy=no_shard|optim_grads_params outer-dp-sharding-strategy=no_shard "
                 "megatron-fsdp-version megatron-fsdp-main-params-dtype "
                 "megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype"),
    *_flags("ignored", "weights of 8 bits are gathered where they stay", switches="reuse-grad-buf-for-mxfp8-param-ag"),
    *_flags("refused", "the output layer keeps the format of the run", switches="fp8-output-proj"),
    *_flags("refused", "recipes are those of --fp8-recipe and --fp4-recipe, with scales that are found anew in every step",
          switches="use-kitchen-attention",
          values="fp8-quantizer-factory fp4-quantizer-factory kitchen-attention-backend fp8-interval=1"),
    *_flags("later", "another precision of logits or of gradient sums is not built yet",
          switches="ddp-reduce-scatter-with-fp32-accumulation",
          values="output-logit-dtype ddp-param-name-patterns-for-fp32-local-accumulation"),
    *_flags("ignored", "a symmetric product is computed as any other", switches="muon-use-syrk"),
    *_flags("ignored", "the update in the CPU's memory is always torch's", switches="use-torch-optimizer-for-cpu-offload"),
    *_flags("later", "this way of keeping activations in CPU memory is not built yet; see --cpu-offloading-num-layers and --offload-modules",
          switches="delay-offload-until-cuda-graph cpu-offloading-retain-pinned-cpu-buffers moe-paged-stash",
          values="delta-offload-bytes-across-pp-ranks activation-offload-fraction "
                 "fine-grained-offloading-max-inflight-offloads moe-paged-stash-page-size "
                 "moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu"),
    *_flags("later", "the update is not recorded as a CUDA graph; --cuda-graph-impl local records the layers", switches="optimizer-cuda-graph"),
    *_flags("refused", "no library records the layers; say --cuda-graph-impl local", switches="external-cuda-graph"),
    *_flags("later", "evaluation beside the plain loop of --eval-iters is not built yet",
          switches="multiple-validation-sets",
          values="eval-micro-batch-size start-eval-at-iter=0 validation-set-names"),
    *_flags("refused", "tools/checkpoint/convert.py writes a checkpoint in another format", values="ckpt-convert-format ckpt-convert-save"),
    *_flags("later", "checkpoints beside those of --save-interval are not built yet",
          values="non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir"),
    *_flags("later", "this check or choice on loading is not built yet; --ckpt-step chooses the iteration to load",
          switches="load-main-params-from-ckpt", values="override-ckpt-iteration"),
    *_flags("later", "this report is not built yet",
          switches="log-energy log-max-attention-logit "
                   "record-memory-history nvtx-ranges log-device-memory-used pytorch-profiler-collect-chakra "
                   "pytorch-profiler-collect-callstack "
                   "dump-param-to-param-group-map",
          values="memory-snapshot-path=snapshot.pickle "
                 "save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval "
                 "save-dgrads-interval"),
    *_flags("later", "a dry run on one machine is not built yet", switches="fake-process-group"),
    *_flags("later", "this training setting is not built yet",
          switches="freeze-all-layers batch-invariant-mode",
          values="no-weight-decay-cond-type phase-transition-iterations mlp-chunks-for-training "
                 "tensor-parallel-num-weight-shards=1 batch-invariant-backend"),
    *_flags("ignored", "training generates no text; megatron generate takes it",
          switches="enable-chunked-prefill inference-dynamic-batching-prefix-caching",
          values="inference-max-requests inference-max-batch-size inference-max-seq-length inference-dynamic-batching-max-requests "
                 "inference-dynamic-batching-max-tokens inference-dynamic-batching-buffer-size-gb "
                 "inference-dynamic-batching-block-size inference-dynamic-batching-prefix-caching-mamba-gb "
                 "mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype num-speculative-tokens"),
    *_flags("ignored", "training generates no text", values="inference-dynamic-batching-num-cuda-graphs"),
    *_flags("ignored", "text generation has one engine, which batches requests as they come", switches="inference-dynamic-batching flash-decode"),
    *_flags("later", "this setting of text generation is not built, and a training run has no use for it",
          switches="use-legacy-static-engine inference-dynamic-batching-track-paused-request-events "
                   "inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs "
                   "inference-cuda-graph-all-prefills inference-text-gen-server-logging inference-wandb-logging "
                   "inference-use-synchronous-zmq-collectives inference-disable-ep-consensus "
                   "nccl-all-reduce-for-prefill inference-fuse-tp-communication inference-disable-triton-nvls-kernels "
                   "inference-moe-disable-fused-quant-kernels",
          values="max-tokens-to-oom=12000 inference-batch-times-seqlen-threshold=-1 "
                 "inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-mamba-memory-ratio "
                 "inference-cuda-graph-max-tokens inference-cuda-graph-scope "
                 "inference-dynamic-batching-unified-memory-level "
                 "inference-dynamic-batching-prefix-caching-eviction-policy "
                 "inference-dynamic-batching-prefix-caching-coordinator-policy "
                 "inference-dynamic-batching-prefix-caching-routing-alpha "
                 "inference-dynamic-batching-cuda-graph-mixed-prefill-count "
                 "inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-sampling-backend "
                 "inference-dynamic-batching-async-sched-mode inference-dynamic-batching-logprobs-mode "
                 "inference-logging-step-interval inference-coordinator-port inference-shards inference-grouped-gemm-backend "
                 "inference-moe-token-dispatcher-type mlp-chunks-for-prefill temperature top_k top_p out-seq-length "
                 "prompts num-tokens-to-generate model-provider"),
    *_flags("later", "multimodal models have one layout, and prompts come from the data",
          values="prompt-path llm-tp"),
    *_flags("refused", "a multimodal model's decoder has the shape that its flags say, or --use-checkpoint-args its checkpoint",
          values="language-model-type"),
    *_flags("ignored", "the state of a data loader is not saved: the number of consumed samples says what comes next",
          values="dataloader-save"),
    *_flags("later", "Retro is not built yet", values="retro-* retriever-seq-length=256"),
    *_flags("ignored", "train_rl.py trains by reinforcement learning, and no other script does", switches="perform-rl-step"),
    *_flags("later", "a flag of reinforcement learning; start train_rl.py, which takes it",
          switches="grpo-filter-groups-with-same-reward rl-inference-logprobs-is-correction rl-use-sequence-packing "
                   "rl-verify-model-weights-swap rl-partial-rollouts rl-offload-optimizer-during-inference "
                   "rl-offload-inference-model-weights-when-idle",
          values="grpo-prompts-per-step grpo-group-size grpo-iterations grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta "
                 "grpo-entropy-term-weight langrl-env-config rl-default-temperature rl-default-top-p rl-default-top-k "
                 "rl-importance-sampling-truncation-coef rl-rollout-bank-dir rl-prompts-per-eval rl-generation-lag "
                 "rl-max-inflight-requests rl-rollout-bank-max-bytes "
                 "rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size "
                 "rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size"),
    *_flags("ignored", "weights are copied to the network that generates by one all-to-all of the run's own transport", values="refit-method"),
    *_flags("ignored", "every round of rollouts is kept in --rl-rollout-bank-dir", switches="rl-durable-rollout-bank"),
    *_flags("refused", "weights change between rounds, so that keys and values of earlier rounds are never used again: every round has a cache of its "
              "own, which training does not hold; give recompute, or leave it out", values="rl-kv-cache-management-mode=recompute"),
    *_flags("refused", "rollouts are submitted and trained on in rounds: groups in the order in which they happen to end would make no two "
              "runs alike; give B, or leave it out",
          values="rl-submission-granularity=B rl-consumption-granularity=B"),
    *_flags("ignored", "rollouts are packed longest first into the first row with room; the result is the same",
          values="rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo"),
    *_flags("ignored", "a prompt begins with the tokens that its environment writes, and no other", switches="rl-skip-bos-token"),
    *_flags("refused", "captured graphs of generation end with its round, and training has --cuda-graph-impl; leave it out",
          switches="rl-persist-cuda-graphs rl-training-cuda-graphs"),
    *_flags("refused", "memory is not managed by the driver; --rl-offload-inference-model-weights-when-idle gives it back",
          values="rl-inference-model-unified-memory-level=0"),
    *_flags("refused", "use --profile, which covers generation too", switches="rl-profile", values="rl-profile-dir"),
    *_flags("refused", "an environment reads what an answer says itself", values="rl-inference-parsers"),
    *_flags("refused", "give the file of environments as --langrl-env-config", values="env-config"),
    *_flags("later", "quantisation, distillation and export after training are not built yet",
          switches="modelopt-enabled logits-load-ignore-errors",
          values="export-* logits-save-top-k logits-save-top-p logits-save-top-p-min-k logits-save-dir "
                 "logits-save-dtype logits-load-dir logits-load-decode-threads logits-load-prefetch-factor "
                 "logits-load-msc-prefetch-depth logits-load-kd-loss-alpha"),
    *_flags("later", "layers that differ by a description in a file are not built yet",
          values="heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json"),
)

REFUSED = (
    *_flags("refused", "nothing is downloaded; write the conversations to a JSONL file, and name it with --sft --data-path",
          values="finetune-hf-dataset"),
    *_flags("refused", "it is an option of the launcher: put it between torchrun and the name of the script",
          values="nproc_per_node nnodes node_rank master_addr master_port nproc-per-node node-rank master-addr master-port"),
    *_flags("refused", "a model is described by flags here, not by an import path; leave it out",
          values="spec=local|megatron.core.models.mamba.mamba_layer_specs|mamba_stack_spec|"
                 "megatron.core.models.hybrid.hybrid_layer_specs|hybrid_stack_spec"),
    *_flags("refused", "a checkpoint loads into any layout; give the parallel sizes of this run",
          switches="use-mp-args-from-checkpoint-args"),
    *_flags("refused", "the place of the embedding is part of --pipeline-model-parallel-layout, such as 'E|t*8|t*8|L'",
          switches="standalone-embedding-stage"),
    *_flags("refused", "--tokenizer-type names the kind, and --chat-template the template", values="tokenizer-metadata"),
    *_flags("refused", "white space is read as the model's own normalizer says; train a model with --keep-whitespace",
          switches="no-tokenizer-sentencepiece-ignore-extra-whitespaces"),
    *_flags("refused", "the vocabulary is always padded so that the tensor ranks divide it; see "
                     "--make-vocab-size-divisible-by and --padded-vocab-size", switches="no-pad-vocab-size"),
    *_flags("refused", "data is one pair of files, PREFIX.bin and PREFIX.idx; convert it with tools/preprocess_data.py",
          values="data-impl=mmap|infer"),
    *_flags("refused", "--log-straggler reports from the start to the end, and opens no port to switch it",
          switches="disable-straggler-on-startup", values="straggler-ctrlr-port=65535"),
    *_flags("refused", "steps are not run again in place; --on-bad-step keeps the evidence of a bad one, and megatron replay repeats it",
          values="gpu-sniff-test-interval=0"),
    *_flags("refused", "restarting is the launcher's work: torchrun --max-restarts, with --save and --load",
          switches="inprocess-restart inprocess-empty-cuda-cache",
          values="inprocess-max-iterations inprocess-monitor-thread-interval inprocess-monitor-process-interval "
                 "inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout "
                 "inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout "
                 "inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time "
                 "inprocess-granularity inprocess-active-world-size"),
    *_flags("refused", "faults are not injected into training runs",
          values="fault-injector-ranks fault-injector-num-ranks fault-injector-fault-types "
                 "fault-injector-fault-probabilities fault-injector-fault-delay fault-injector-delay-start-iteration "
                 "fault-injector-mtti-seconds fault-injector-offset-seconds fault-injector-seed"),
    *_flags("refused", "node-local and replicated checkpoints are out of scope; give --save a shared folder",
          switches="replication", values="non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication-jump "
                                         "replication-factor"),
    *_flags("refused", "retrieval encoders (ICT, REALM) are out of scope",
          switches="biencoder-shared-query-context-model use-one-sent-docs retriever-score-scaling",
          values="ict-head-size biencoder-projection-dim ict-load titles-data-path query-in-block-prob "
                 "evidence-data-path retriever-report-topk-accuracies block-data-path embedding-path "
                 "indexer-batch-size indexer-log-interval"),
    *_flags("refused", "image classification and its pretraining are out of scope",
          switches="vision-pretraining dino-freeze-last-layer dino-norm-last-layer",
          values="classes-fraction data-per-class-fraction head-lr-mult vision-pretraining-type "
                 "vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch dino-local-img-size "
                 "dino-local-crops-number dino-head-hidden-size dino-bottleneck-size dino-warmup-teacher-temp "
                 "dino-teacher-temp dino-warmup-teacher-temp-epochs"),
    *_flags("refused", "sparse attention with an indexer (DSA) is out of scope",
          switches="dsa-indexer-use-sparse-loss no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu",
          values="dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-topk-freq "
                 "dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-kernel-backend dsa-indexer-rope-interleaved "
                 "dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32"),
    *_flags("refused", "hyper-connections are out of scope", switches="enable-mhc-connections",
          values="mhc-num-residual-streams mhc-sinkhorn-iterations mhc-init-gating-factor mhc-recompute-layer-num"),
    *_flags("refused", "gathering and dropping weights again (GTP) is out of scope; see --recompute-granularity",
          switches="gtp-remat-reduce-scatter-with-fp32-accumulation gtp-remat-nccl-ub gtp-expert-remat-nccl-ub",
          values="gtp-remat-opt-in-modules"),
    *_flags("refused", "export through ONNX is out of scope", values="onnx-safe"),
    *_flags("refused", "samples are drawn by the blend's weights; give those with --data-path", values="sample-rate=1"),
    *_flags("refused", "it belongs to a removed kernel for experts; leave it out", switches="moe-use-legacy-grouped-gemm"),
)

ROWS = RENAMES + IGNORED + LATER + REFUSED
