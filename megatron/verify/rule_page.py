"""The page of all rules, made from their rows: an id, a sentence, an example, and what is said to it.

The examples stand here, a row each; what is said is what the rule says when the page is made, so the page cannot be behind
the rules. An example breaks its own rule and no other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron.core.config.rules.engine import ALWAYS, NEEDS, RULES
from megatron.plan.command import parse_training_command
from megatron.plan.setup import BrokenRule

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --global-batch-size 16 "
    "--train-iters 10 --lr 1e-3 --mock-data"
)
# What is looked at beside the rows of core/config/rules/engine.py.
OTHERS: Mapping[str, str] = {
    "batch-over-time": "every size that the global batch takes on is a whole number of microbatches on every data-parallel rank",
    "learning-rate-over-time": "warm-up and decay are measured in one unit, and the warm-up ends before the decay",
    "trained-parameters": "every pattern of names matches a parameter, and some parameters are trained",
    "tokenizer": "the tokenizer's type is known, and it has the files and settings that the type needs",
    "files": "the files that the flags name exist, and --save can be written",
    "machine": "requested kernels can compute what the run needs, and the machine has the devices that it needs",
    "command-line": "every word is a known flag or its value",
}


@dataclass(frozen=True, slots=True)
class BrokenRuleExample:
    """Flags that break a rule when they are added to BASE. ranks: number of ranks. without: a flag of BASE that is left
    out. whole: check all that a run checks on a CPU, not only rules between settings.
    """

    flags: str = ""
    ranks: int = 1
    without: str = ""
    entry: str = "pretrain_gpt.py"
    whole: bool = False

    def find_broken_rules(self) -> tuple[BrokenRule, ...]:
        """Return the rules that the example breaks, with their messages."""
        words, base = self.flags.split(), BASE.split()
        if self.without:
            place = base.index(self.without)
            del base[place : place + 2]
        command = parse_training_command([*base, *words], ranks=self.ranks, entry=self.entry)
        setting = command.setting and replace(command.setting, whole=self.whole, device="cpu", files=True)
        return (*command.unread, *(setting.find_broken_rules() if setting else ()))


_IMAGES = "--vision-model-type clip --img-h 32 --img-w 32"
_MOE, _MLA = "--num-experts 8", "--multi-latent-attention --position-embedding-type rope"
EXAMPLES: Mapping[str, BrokenRuleExample] = {
    "required": BrokenRuleExample(without="--num-layers"),
    "no-effect": BrokenRuleExample("--moe-router-topk 4 --mscale 0.7"),
    "positive": BrokenRuleExample("--pipeline-model-parallel-size 0"),
    "world-size": BrokenRuleExample("--tensor-model-parallel-size 4", ranks=6),
    "heads-over-tensor": BrokenRuleExample(
        "--num-attention-heads 6 --hidden-size 96 --tensor-model-parallel-size 4 --group-query-attention", ranks=4
    ),
    "query-groups": BrokenRuleExample("--group-query-attention --num-query-groups 3"),
    "ffn-over-tensor": BrokenRuleExample("--tensor-model-parallel-size 4 --ffn-hidden-size 90", ranks=4),
    "head-size": BrokenRuleExample("--hidden-size 60"),
    "positions": BrokenRuleExample("--max-position-embeddings 16"),
    "sequence-parallel": BrokenRuleExample(
        "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30", ranks=4
    ),
    "pipeline-split": BrokenRuleExample("--pipeline-model-parallel-size 2 --num-layers 9", ranks=2),
    "global-batch": BrokenRuleExample("--global-batch-size 20", ranks=4),
    "interleaved-groups": BrokenRuleExample(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 8 "
        "--global-batch-size 6 --micro-batch-size 2",
        ranks=2,
    ),
    "vocabulary": BrokenRuleExample("--tensor-model-parallel-size 4 --padded-vocab-size 1001", ranks=4),
    "encoder-and-decoder": BrokenRuleExample(
        "--decoder-seq-length 64 --max-position-embeddings 32", entry="pretrain_t5.py"
    ),
    "layer-patterns": BrokenRuleExample("--window-size 4,0 --window-attn-skip-freq [1,0]"),
    "attention": BrokenRuleExample("--qk-clip --qk-layernorm"),
    "rotations": BrokenRuleExample("--position-embedding-type yarn --yarn-beta-slow 64"),
    "choice-of-experts": BrokenRuleExample(f"{_MOE} --moe-router-topk 9"),
    "balance-of-experts": BrokenRuleExample(f"{_MOE} --moe-router-load-balancing-type sinkhorn aux_loss"),
    "experts-over-ranks": BrokenRuleExample(f"{_MOE} --expert-model-parallel-size 3 --global-batch-size 6", ranks=3),
    "upcycling": BrokenRuleExample(f"{_MOE} --moe-use-upcycling"),
    "low-precision": BrokenRuleExample("--fp8-format hybrid --fp16"),
    "low-precision-sizes": BrokenRuleExample("--fp8-format e4m3 --tensor-model-parallel-size 8", ranks=8),
    "context": BrokenRuleExample("--context-parallel-size 2 --seq-length 30", ranks=2),
    "hybrid-context": BrokenRuleExample("--hybrid-context-parallel --reset-attention-mask", ranks=2),
    "duration": BrokenRuleExample("--train-samples 100"),
    "learning-rate": BrokenRuleExample(without="--lr"),
    "number-formats": BrokenRuleExample("--fp16 --bf16"),
    "update-rule": BrokenRuleExample("--optimizer muon --muon-num-ns-steps 0"),
    "low-precision-state": BrokenRuleExample("--use-precision-aware-optimizer --optimizer lion"),
    "activation-offloading": BrokenRuleExample("--fine-grained-activation-offloading"),
    "activation": BrokenRuleExample("--swiglu --squared-relu"),
    "recompute": BrokenRuleExample("--recompute-granularity full"),
    "cuda-graphs": BrokenRuleExample("--cuda-graph-impl local --hidden-dropout 0"),
    "fully-sharded": BrokenRuleExample("--use-torch-fsdp2 --use-distributed-optimizer", ranks=2),
    "overlap": BrokenRuleExample("--ddp-bucket-size 1000 --ddp-num-buckets 4", ranks=2),
    "data": BrokenRuleExample("--data-path corpus_text_document"),
    "fill-in-the-middle": BrokenRuleExample("--fim-data --fim-rate 1.5"),
    "conversations": BrokenRuleExample("--sft --eod-mask-loss"),
    "masked-text": BrokenRuleExample("--mask-prob 0", entry="pretrain_bert.py"),
    "relative-positions": BrokenRuleExample("--position-embedding-type relative"),
    "kernels": BrokenRuleExample("--kernel rms_norm=fast"),
    "norms": BrokenRuleExample("--sandwich-norm --apply-residual-connection-post-layernorm"),
    "dropout": BrokenRuleExample("--hidden-dropout 1"),
    "samples-in-training": BrokenRuleExample("--eval-generate prompts.txt --eval-generate-tokens 0"),
    "checkpoints": BrokenRuleExample("--use-checkpoint-args"),
    "faults": BrokenRuleExample("--on-bad-step rollback"),
    "elastic": BrokenRuleExample("--elastic"),
    "experts": BrokenRuleExample(
        f"{_MOE} --moe-token-dispatcher-type flex --moe-enable-deepep --moe-flex-dispatcher-backend alltoall"
    ),
    "hybrid-pattern": BrokenRuleExample("--hybrid-layer-pattern *X"),
    "multipliers": BrokenRuleExample("--key-multiplier 0.5"),
    "states": BrokenRuleExample("--experimental-attention-variant gdn --linear-num-key-heads 7"),
    "latent-attention": BrokenRuleExample(f"{_MLA} --v-head-dim 0"),
    "multi-token-prediction": BrokenRuleExample("--mtp-num-layers 32"),
    "batch-over-time": BrokenRuleExample("--rampup-batch-size 3 4 1000"),
    "learning-rate-over-time": BrokenRuleExample("--lr-warmup-iters 20"),
    "trained-parameters": BrokenRuleExample("--freeze embeddings.*"),
    "tokenizer": BrokenRuleExample("--tokenizer-type HuggingFaceTokenizer", whole=True),
    "files": BrokenRuleExample("--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json", whole=True),
    "machine": BrokenRuleExample(
        "--attention-backend flash --attention-logit-softcap 50 --tokenizer-type ByteTokenizer", whole=True
    ),
    "command-line": BrokenRuleExample("--num-leyers 8"),
    "adapter-targets": BrokenRuleExample("--lora-rank 8 --lora-targets q_porj"),
    "adapter-fit": BrokenRuleExample("--lora-rank 8 --optimizer muon"),
    "adapter-numbers": BrokenRuleExample("--lora-rank 8 --lora-dropout 1"),
    "adapter-start": BrokenRuleExample("--adapter my_adapter"),
    "image-sizes": BrokenRuleExample(f"{_IMAGES} --img-h 100"),
    "images-in-text": BrokenRuleExample(f"{_IMAGES} --img-h 112 --img-w 112"),
    "image-tiles": BrokenRuleExample(f"{_IMAGES} --use-tiling --image-aspect-ratio pad"),
    "image-classifier": BrokenRuleExample(
        "--tensor-model-parallel-size 2 --sequence-parallel", ranks=2, entry="pretrain_vision_classify.py"
    ),
}


def rules_page_markdown() -> str:
    """Return the page of all rules, with examples and messages, as Markdown."""
    rows = [(rule.name, rule.sentence) for rule in (*NEEDS, *RULES, *ALWAYS)] + list(OTHERS.items())
    lines = [
        "# Rules between settings",
        "",
        *textwrap.wrap(
            "Every rule that a run's flags must keep, in the order in which they are looked at. All that are broken are "
            "said at once, before anything starts. `megatron check-config FLAGS --world-size N` says which ones, "
            "and which change of one flag would keep each; `--why-not tensor-model-parallel-size=8` says what a change "
            "would break.",
            120,
        ),
        "",
        "The page is made by `megatron check-config --write-rules docs/rules.md`. Its examples stand behind these flags:",
        "",
        "```text",
        *textwrap.wrap(BASE, 120, break_on_hyphens=False),
        "```",
    ]
    for name, sentence in rows:
        example = EXAMPLES[name]
        where = f" of {example.entry}" if example.entry != "pretrain_gpt.py" else ""
        flags = f"`{example.flags}`{where}" if example.flags else f"without `{example.without}`"
        on = f" on {example.ranks} ranks" if example.ranks > 1 else ""
        messages = [
            line
            for one in example.find_broken_rules()
            for line in textwrap.wrap(one.says, 120, break_on_hyphens=False, break_long_words=False)
        ]
        lines += [
            "",
            f"## {name}",
            "",
            f"{sentence[0].upper()}{sentence[1:]}. For example {flags}{on}:",
            "",
            "```text",
            *messages,
            "```",
        ]
    return "\n".join(lines) + "\n"
