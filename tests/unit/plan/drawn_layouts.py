"""Draws of (ranks, flags): a network of one of the families, small in depth and of usual widths, under a layout that the rules accept."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.settings.run import RunConfig
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import parse_training_command

VOCABULARY = 32000
COMMON = "--train-iters 10 --lr 1e-3 --mock-data --init-method-std 0.02 --attention-dropout 0 --hidden-dropout 0"
LLAMA = (
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16"
)
GQA = f"{LLAMA} --group-query-attention --num-query-groups 8"
EXPERTS = "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
MLA = "--multi-latent-attention --q-lora-rank 768 --kv-lora-rank 256 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --qk-layernorm"
DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 8 --linear-num-value-heads 16 "
    "--linear-key-head-dim 128 --linear-value-head-dim 128 --attention-output-gate --qk-layernorm"
)
# family -> (entry, flags of the network, numbers of layers, lengths of a sequence)
FAMILIES: dict[str, tuple[str, str, tuple[int, ...], tuple[int, ...]]] = {
    "gpt": ("pretrain_gpt.py", "--hidden-size 1536 --num-attention-heads 16", (4, 8), (1024, 2048)),
    "dropout": (
        "pretrain_gpt.py",
        "--hidden-size 1536 --num-attention-heads 16 --hidden-dropout 0.1 --attention-dropout 0.1",
        (4, 8),
        (1024,),
    ),
    "gqa": ("pretrain_gpt.py", GQA, (4, 8, 12), (2048, 4096)),
    "moe": (
        "pretrain_gpt.py",
        f"{GQA} --num-experts 8 --moe-ffn-hidden-size 1408 --moe-layer-freq [0]+[1]*LESS {EXPERTS}",
        (4, 8),
        (2048,),
    ),
    "shared-experts": (
        "pretrain_gpt.py",
        f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024 {EXPERTS} "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        (4, 8),
        (2048,),
    ),
    "mla": ("pretrain_gpt.py", f"{LLAMA} {MLA} --mtp-num-layers 1", (4, 8), (2048, 4096)),
    "mamba": (
        "pretrain_hybrid.py",
        "--hybrid-layer-pattern M-M*M-M- --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 "
        "--group-query-attention --num-query-groups 8 --mamba-num-heads 64 --mamba-head-dim 64 --mamba-num-groups 8 "
        "--mamba-state-dim 128 --position-embedding-type none --squared-relu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --normalization RMSNorm",
        (0,),
        (2048, 4096),
    ),
    "delta": ("pretrain_gpt.py", f"{GQA} {DELTA}", (4, 8), (2048,)),
    "lora": (
        "pretrain_gpt.py",
        f"{GQA} --lora-rank 16 --lora-targets linear_qkv linear_proj linear_fc1 linear_fc2",
        (4, 8),
        (2048,),
    ),
    "windows": (
        "pretrain_gpt.py",
        f"{GQA} --window-size 127,0 --window-attn-skip-freq 2 --qk-layernorm",
        (4, 8),
        (2048,),
    ),
    "vlm": (
        "pretrain_vlm.py",
        f"{GQA} --vision-model-type clip --img-h 336 --img-w 336 --patch-dim 14 --sft",
        (4, 8),
        (2048,),
    ),
    "t5": (
        "pretrain_t5.py",
        "--hidden-size 1024 --num-attention-heads 16 --decoder-seq-length 256 --vocab-extra-ids 100",
        (4, 8),
        (512, 1024),
    ),
    "bert": ("pretrain_bert.py", "--hidden-size 1024 --num-attention-heads 16", (4, 8), (512,)),
}
ROUGH = {"fp8": ("pretrain_gpt.py", f"{GQA} --fp8-format hybrid", (4, 8), (2048,))}  # estimated less closely
RECOMPUTE = (
    "",
    "",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "--recompute-activations",
    "--recompute-granularity selective --recompute-modules layernorm mlp",
)
DATA = (
    "",
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--overlap-grad-reduce",
    "--use-torch-fsdp2",
)
NUMBERS = ("--bf16", "--bf16", "--bf16", "--fp16", "")


def drawn_flags(chance: random.Random, family: str) -> tuple[int, str, str]:
    """A draw of (ranks, entry, flags), which may break rules."""
    entry, network, depths, lengths = (FAMILIES | ROUGH)[family]
    layers, length, micro = chance.choice(depths), chance.choice(lengths), chance.choice((1, 1, 2, 4))
    tp, pp, cp, dp = (chance.choice(sizes) for sizes in ((1, 2, 4), (1, 1, 2, 4), (1, 1, 1, 2), (1, 2, 4)))
    words = [
        COMMON,
        network.replace("LESS", str(layers - 1)),
        f"--seq-length {length} --max-position-embeddings {length}",
        f"--micro-batch-size {micro} --global-batch-size {micro * dp * chance.choice((2, 4, 8, 16))}",
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}",
        chance.choice(RECOMPUTE),
        chance.choice(DATA if pp == 1 and "experts" not in network else DATA[:-1]),  # FSDP2: see `can_profile`
        chance.choice(NUMBERS) if family != "fp8" else "--bf16",
    ]
    if layers:
        words.append(f"--num-layers {layers}")
    if tp > 1 and chance.random() < 0.8 or "experts" in network:
        words.append("--sequence-parallel" * (tp > 1))
    if "experts" in network:
        words.append(
            f"--expert-model-parallel-size {chance.choice((1, 2, 4))} --expert-tensor-parallel-size {chance.choice((1, tp))}"
        )
    if pp > 1:
        words.append(chance.choice(("", "", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zb-h1")))
    return tp * pp * cp * dp, entry, " ".join(words)


def drawn_layouts(seed: int, families: tuple[str, ...] = tuple(FAMILIES)) -> Iterator[tuple[str, int, RunConfig, str]]:
    """Yield (family, ranks, resolved config with its vocabulary, flags) of the families in turn, for ever."""
    chance = random.Random(seed)
    while True:
        for family in families:
            for _ in range(200):
                ranks, entry, flags = drawn_flags(chance, family)
                command = parse_training_command(flags.split(), ranks=ranks, entry=entry)
                assert command.setting is not None and not command.unread, (command.unread, flags)
                config, problems = resolve_and_examine(command.setting.config, ranks)
                if not problems:
                    yield family, ranks, with_padded_vocabulary(config, VOCABULARY), flags
                    break
            else:
                raise AssertionError(f"no layout of {family} keeps the rules: {problems}")
