"""Command lines of Megatron-LM's own programs, whose checkpoints hold the complete namespace of its parser. Plain data, for both sides.

A case is trained for 8 iterations and saved after 3, by the program of the releases that it names; `make_fixtures.py --sources`
runs them. Rows of no vocabulary are padding, which a softmax of Megatron's counts and ours leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass

SAVED, LAST = 3, 8
NEWEST = "0.19.0"
TRAINING = (
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --lr-decay-iters 8 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 1 --split 100,0,0 --eval-iters 0 --log-interval 1 --num-workers 0"
)
RUN = (
    f"{TRAINING} --hidden-size 8 --num-attention-heads 4 --ffn-hidden-size 16 --max-position-embeddings 16 --seq-length 16 "
    "--init-method-std 0.2 --tokenizer-type NullTokenizer --data-path tokens --save checkpoints --save-interval 3 "
    "--eval-interval 100 --transformer-impl local --no-gradient-accumulation-fusion --distributed-backend gloo "
    "--use-cpu-initialization --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
# With local layers Megatron's T5 lacks its final norms, so that a run cannot be compared; its optimizer's state is.
T5 = (
    RUN.replace(
        "--max-position-embeddings 16 --seq-length 16", "--max-position-embeddings 16 --encoder-seq-length 16"
    ).replace("--tokenizer-type NullTokenizer", "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt")
    + " --decoder-seq-length 12 --vocab-extra-ids 10 --legacy-tokenizer --encoder-num-layers 2 --decoder-num-layers 2 "
    "--kv-channels 2 --no-bias-gelu-fusion"
)
GQA = (
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)
TIED = GQA.replace(" --untie-embeddings-and-output-weights", "")
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --swiglu "
    "--untie-embeddings-and-output-weights"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 6 --kv-lora-rank 4 --qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 3 "
    "--position-embedding-type rope --rope-type rope --normalization RMSNorm --disable-bias-linear --swiglu "
    "--untie-embeddings-and-output-weights"
)
DEEPSEEK = (
    f"{LATENT} --num-experts 4 --moe-ffn-hidden-size 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 8 --qk-layernorm --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --mtp-num-layers 1"
)
DISTRIBUTED, RESHARDABLE = (
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable",
)
BUCKETS = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 600"
PP2, TP2, EP2 = (f"--{axis}-model-parallel-size 2" for axis in ("pipeline", "tensor", "expert"))
VPP = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
GROWING = "--fp16 --initial-loss-scale 4096 --loss-scale-window 2 --hysteresis 1"  # without overflow
FP16 = "--fp16 --initial-loss-scale 524288 --loss-scale-window 2 --hysteresis 1"
TORCH = "--ckpt-format torch"


@dataclass(frozen=True)
class Program:
    """A run of one of Megatron-LM's programs. flags: beside `RUN`. releases: whose fixtures are kept."""

    name: str
    flags: str
    ranks: int = 1
    layers: int = 2
    program: str = "pretrain_gpt.py"
    releases: tuple[str, ...] = ("0.16.1",)

    @property
    def training_flags(self) -> str:
        """What a run that goes on gives again of `flags`: precision and optimizer."""
        words = self.flags.split()
        kept = ("--loss-scale-window", "--hysteresis", "--optimizer")
        pairs = [f"{word} {words[place + 1]}" for place, word in enumerate(words) if word in kept]
        return " ".join([*(["--fp16"] if "--fp16" in words else []), *pairs])

    @property
    def moments(self) -> tuple[str, ...]:
        """What its optimizer keeps of each parameter."""
        return ("momentum_buffer",) if "sgd" in self.flags else ("exp_avg", "exp_avg_sq")

    def command_line(self, release: str) -> list[str]:
        """All arguments. Until 0.17 a NullTokenizer has an id more than --vocab-size."""
        if self.program == "pretrain_t5.py":
            return f"{T5} {self.flags}".split()
        ids = 32 if tuple(map(int, release.split(".")[:2])) >= (0, 18) else 31
        return f"{RUN} --vocab-size {ids} --num-layers {self.layers} {self.flags}".split()


PROGRAMS = {
    case.name: case
    for case in (
        # Pipelines: the default form of the distributed optimizer, the other two, interleaved, rank files, layouts of layers.
        Program("pp2", f"{GQA} {PP2}", 2),
        Program("pp2-distributed", f"{GQA} {PP2} {DISTRIBUTED}", 2, releases=("0.12.3", "0.14.0", "0.16.1", NEWEST)),
        Program("pp2-reshardable", f"{GQA} {PP2} {RESHARDABLE}", 2, releases=("0.16.1", NEWEST)),
        Program("pp2-distributed-torch", f"{GQA} {PP2} {DISTRIBUTED} {TORCH}", 2),
        Program("pp2-tied-distributed", f"{PP2} {DISTRIBUTED} --no-bias-gelu-fusion", 2),
        Program("vpp2-distributed", f"{GQA} {VPP} {DISTRIBUTED}", 2, 4, releases=("0.16.1", NEWEST)),
        Program("vpp2-distributed-torch", f"{GQA} {VPP} {DISTRIBUTED} {TORCH}", 2, 4),
        Program(
            "pp2-layout-distributed", f"{GQA} {PP2} {DISTRIBUTED} --pipeline-model-parallel-layout Et|tt*1,L", 2, 3
        ),
        Program("pp2-first-distributed", f"{GQA} {PP2} {DISTRIBUTED} --decoder-first-pipeline-num-layers 1", 2, 3),
        Program(
            "pp2-accounted-distributed",
            f"{GQA} {PP2} {DISTRIBUTED} --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            2,
            4,
        ),
        # Buffers that are cut into buckets, since gradients are reduced while others are computed.
        Program("pp2-buckets-distributed", f"{GQA} {PP2} {BUCKETS}", 2),
        Program("buckets-distributed-torch", f"{GQA} {BUCKETS} {TORCH}"),
        # Experts, latent attention, tokens further ahead.
        Program("experts", EXPERTS, releases=("0.12.3", "0.16.1", NEWEST)),
        Program("ep2-distributed", f"{DEEPSEEK} {EP2} {DISTRIBUTED}", 2, releases=("0.16.1", NEWEST)),
        Program("ep2-reshardable", f"{DEEPSEEK} {EP2} {RESHARDABLE}", 2),
        Program("ep2pp2-distributed", f"{EXPERTS} {EP2} {PP2} {DISTRIBUTED}", 4),
        Program("tp2pp2-distributed", f"{GQA} {TP2} {PP2} {DISTRIBUTED}", 4),
        Program("deepseek-torch", f"{DEEPSEEK} {TORCH}"),
        Program("mtp", f"{GQA} --mtp-num-layers 1"),
        # fp16 with its loss scale, in every format.
        Program("fp16", f"{GQA} {FP16}", releases=("0.12.3", "0.16.1", NEWEST)),
        Program("fp16-torch", f"{GQA} {FP16} {TORCH}"),
        Program(
            "fp16-distributed", f"{GQA} {GROWING} {DISTRIBUTED}", 2, releases=("0.12.3", "0.14.0", "0.16.1", NEWEST)
        ),
        Program("fp16-reshardable", f"{GQA} {GROWING} {RESHARDABLE}", 2),
        Program("fp16-distributed-torch", f"{GQA} {FP16} {DISTRIBUTED} {TORCH}"),
        Program("fp16-overflowed", f"{GQA} --fp16 --hysteresis 1"),
        # Other optimizers and networks.
        Program("sgd", f"{GQA} --optimizer sgd", releases=("0.12.3", "0.16.1", NEWEST)),
        Program("sgd-torch", f"{GQA} --optimizer sgd {TORCH}"),
        # In the distributed forms Megatron itself fails on saving it.
        Program("pp2-mtp-distributed-torch", f"{TIED} --mtp-num-layers 1 {PP2} {DISTRIBUTED} {TORCH}", 2),
        *(
            Program(f"t5{name}", flags, program="pretrain_t5.py")
            for name, flags in (
                ("", ""),
                ("-distributed", DISTRIBUTED),
                ("-torch", TORCH),
                ("-distributed-torch", f"{DISTRIBUTED} {TORCH}"),
            )
        ),
        Program("deepseek-distributed", f"{DEEPSEEK} {DISTRIBUTED}", 2, releases=("0.14.0", "0.16.1", NEWEST)),
    )
}
