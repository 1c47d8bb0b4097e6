"""What is written for Megatron: the real Megatron Core builds the same network of it, loads it strictly, and has the same loss."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.cli.commands.checkpoint import convert
from megatron.core.config.flags.declare import ConfigError
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import read_torch_file
from megatron.megatron_lm.checkpoint.export import (
    extra_flags_for_megatron,
    write_legacy_checkpoint,
    write_torch_dist_checkpoint,
)
from megatron.megatron_lm.checkpoint.open import open_megatron_checkpoint
from megatron.megatron_lm.checkpoint.torch_dist import _parse_torch_dist_index, _read_torch_dist_index
from tests.peers.cases import CASES, RUN
from tests.peers.make_fixtures import HERE, VERSION, install, newest_version, started_together, unpack
from tests.peers.ours import logged_steps

WRITTEN_ALIKE = ["dense-torch", "gqa-torch", "latent-torch", "experts-torch", "tp2-torch"]
# A layer's names under Transformer Engine, where they are not those of local layers: of a dense MLP and one of experts.
ENGINE = {
    "gqa": {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"},
    "experts": {"self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"},
    "deepseek": {
        "input_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}


@pytest.mark.parametrize("name", WRITTEN_ALIKE)
def test_files_of_ranks_are_those_that_megatron_wrote(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    theirs = open_megatron_checkpoint(folder / "checkpoints")
    written = write_legacy_checkpoint(
        theirs, tmp_path / "out", iteration=3, tensor_size=CASES[name].ranks, fused_norms=False
    )
    for file in written.glob("*/*.pt"):
        ours, given = (
            read_torch_file(place)["model"]
            for place in (file, folder / "checkpoints" / file.relative_to(tmp_path / "out"))
        )
        assert ours.keys() == given.keys()
        assert not [key for key in ours if ours[key] is not given[key] and not torch.equal(ours[key], given[key])]


@pytest.mark.parametrize("name", ["deepseek", "experts", "gqa"])
def test_a_distributed_checkpoint_has_the_keys_and_shapes_that_megatron_asks_for(name: str, tmp_path: Path) -> None:
    folder = unpack(name, tmp_path)
    written = write_torch_dist_checkpoint(
        open_megatron_checkpoint(folder / "checkpoints"), tmp_path / "out", fused_norms=False
    )
    (ours, _), (theirs, _) = (
        _parse_torch_dist_index(_read_torch_dist_index(place / ".metadata"), place)
        for place in (written, folder / "checkpoints/iter_0000003")
    )
    shapes = {key: stored.shape for key, stored in theirs.items() if not key.startswith("optimizer.")}
    stacked = [key for key in shapes if key.startswith("decoder.layers.") and not key[len("decoder.layers.")].isdigit()]
    for key in stacked:
        layers, *shape = shapes.pop(key)
        shapes |= {key.replace("layers.", f"layers.{layer}.", 1): tuple(shape) for layer in range(layers)}
    assert {key: stored.shape for key, stored in ours.items()} == shapes


@pytest.mark.parametrize("name", ENGINE)
def test_norms_have_the_names_of_transformer_engines_layers(name: str, tmp_path: Path) -> None:
    written = write_torch_dist_checkpoint(
        open_megatron_checkpoint(unpack(name, tmp_path) / "checkpoints"), tmp_path / "out"
    )
    keys = {
        key.removeprefix("decoder.layers.1.")
        for key in _parse_torch_dist_index(_read_torch_dist_index(written / ".metadata"), written)[0]
    }
    assert {key for key in keys if "norm" in key and not key.startswith(("decoder.", "mtp."))} == ENGINE[name]


def test_flags_are_named_that_megatron_does_not_take_from_a_checkpoint(tmp_path: Path) -> None:
    assert extra_flags_for_megatron(open_megatron_checkpoint(unpack("gqa", tmp_path) / "checkpoints")) == ""
    assert extra_flags_for_megatron(open_megatron_checkpoint(unpack("deepseek", tmp_path / "d") / "checkpoints")).split(
        " --"
    )[:3] == ["--qk-layernorm", "rope-type rope", "multi-latent-attention"]


def test_layers_that_predict_ahead_are_not_written_into_files_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        write_legacy_checkpoint(open_megatron_checkpoint(unpack("mtp", tmp_path) / "checkpoints"), tmp_path / "out")
    assert "write torch_dist" in caught.value.problems[0]


# The real Megatron Core, nightly: a run of ours of two iterations is saved after the first and written for Megatron, which then
# must have our second iteration's loss and gradient norm.

COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 32 --max-position-embeddings 16 --seq-length 16 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --split 100,0,0 "
    "--init-method-std 0.2 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 32 "
    "--make-vocab-size-divisible-by 16 --eval-iters 0 --log-interval 1 --num-workers 0 --save-interval 1"
).split()
LLAMA = (
    "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 4 --qk-head-dim 4 --qk-pos-emb-head-dim 2 --v-head-dim 3 "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --swiglu --untie-embeddings-and-output-weights"
)
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8"
SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 "
    "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 12 --moe-layer-freq [0]*1+[1]*1"
)
NETWORKS = {
    "gpt": "--openai-gelu",
    "erf": "",
    "llama": LLAMA,
    "biases": f"{LLAMA} --add-qkv-bias --kv-channels 6 --qk-layernorm --norm-epsilon 1e-3",
    "experts": EXPERTS,
    "grouped": f"{EXPERTS} --moe-grouped-gemm",
    "sigmoid": f"{EXPERTS} {SIGMOID}",
    "latent": LATENT,
    "latent-normed": f"{LATENT} --qk-layernorm --q-lora-rank 6 --rope-type rope",
    "mtp": f"{LLAMA} --mtp-num-layers 2",
    "deepseek": f"{LATENT} --q-lora-rank 6 --qk-layernorm --num-experts 4 --moe-ffn-hidden-size 8 "
    f"{SIGMOID} --mtp-num-layers 1",
    "repeated": f"{EXPERTS} --mtp-num-layers 2 --mtp-use-repeated-layer",
}
NETWORKS_DRAWN = 80
NEWER = {"repeated"}  # not in Megatron Core 0.16


def trained(flags: str, folder: Path, tokens: Path) -> dict[str, Any]:
    """A run of ours, saved after each iteration. Returns its last step's line of the log, or raises what refused it."""
    places = ["--data-path", str(tokens), "--save", str(folder / "ours")]
    return logged_steps([*COMMON, *flags.split(), *places], folder / "ours.jsonl")[-1]


def request(
    folder: Path, tokens: Path, ckpt_format: str, capsys: pytest.CaptureFixture, tensor_size: int = 1
) -> dict[str, Any]:
    """Write the first iteration's checkpoint for Megatron, and what to ask of it, with the flags that the tool names."""
    target = folder / ckpt_format
    convert.main(
        [
            "--load",
            str(folder / "ours"),
            "--ckpt-step",
            "1",
            "--saver",
            "megatron",
            "--save",
            str(target),
            "--ckpt-format",
            ckpt_format,
            "--saver-transformer-impl",
            "local",
            "--verify",
            "--target-tensor-parallel-size",
            str(tensor_size),
        ]
    )
    named = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("in Megatron: "))
    network = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings")
    given = {name: value for name, value in RUN.items() if name not in (*network, "save")}
    return {
        "folder": str(target),
        "flags": named.split(" --finetune", 1)[1].removesuffix("--transformer-impl local").strip(),
        "given": {**given, "data_path": [str(tokens)], "tensor_model_parallel_size": tensor_size},
    }


def answers(requests: Sequence[Mapping[str, Any]], package: Path, folder: Path, ranks: int = 1) -> list[dict[str, Any]]:
    """What the real Megatron Core says to requests of one tensor size."""
    (folder / "requests.json").write_text(json.dumps(requests))
    started_together(
        [str(HERE / "load_export.py"), str(folder / "requests.json")],
        ranks,
        package,
        folder,
        seconds=120 + 30 * len(requests),
    )
    return [json.loads((Path(one["folder"]) / "answer.json").read_text()) for one in requests]


@pytest.fixture(scope="module", params=[VERSION, "newest"])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A version of Megatron Core, and where it is installed."""
    version = newest_version() if request.param == "newest" else request.param
    return version, install(tmp_path_factory.getbasetemp(), version)


def unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """What Megatron has otherwise, or nothing."""
    if "error" in theirs:
        return theirs["error"]
    pairs = {"loss": (ours["losses"]["lm loss"], theirs["loss"])}
    if ours["grad_norm"] is not None:
        pairs["grad norm"] = ours["grad_norm"], theirs["grad_norm"]
    return ", ".join(
        f"{name}: {a} here, {b} there"
        for name, (a, b) in pairs.items()
        if abs(a - b) > (1e-6 if name == "loss" else 1e-5) * abs(a)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_megatron_core_loads_what_is_written_for_it_and_has_the_same_loss(
    tensor_size: int, package: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    version, place = package
    tokens = unpack("dense", tmp_path) / "tokens"
    ours, requests = [], []
    for name, flags in NETWORKS.items():
        if (name in NEWER and version == VERSION) or (tensor_size > 1 and "--num-experts" in flags):
            continue  # experts on tensor ranks train with sequence parallelism only, and that with Transformer Engine only
        (tmp_path / name).mkdir()
        line = trained(flags, tmp_path / name, tokens)
        if tensor_size > 1 and "latent" in flags:
            line["grad_norm"] = None  # Megatron's own is another one on two ranks than on one, of local layers
        for ckpt_format in ("torch_dist",) if "mtp" in flags else ("torch_dist", "torch"):
            ours.append((f"{name} as {ckpt_format}", line))
            requests.append(request(tmp_path / name, tokens, ckpt_format, capsys, tensor_size))
    found = zip(ours, answers(requests, place, tmp_path, tensor_size), strict=True)
    assert not [f"{name}: {wrong}" for (name, line), theirs in found if (wrong := unlike(line, theirs))]


# Each is left out, or one of its words is taken; what does not fit together is refused here, and drawn again.
POSITIONS = [
    "--position-embedding-type rope",
    "--position-embedding-type rope --rotary-percent 0.5",
    "--position-embedding-type none",
    "--position-embedding-type rope --rotary-interleaved --rotary-base 500",
    "--position-embedding-type rope --no-rope-freq 2",
    "--position-embedding-type rope --rotary-seq-len-interpolation-factor 2",
    "--position-embedding-type yarn --rotary-scaling-factor 4",
    "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4",
    "--position-embedding-type relative",
]
DENSE = [
    ["--normalization RMSNorm"],
    ["--norm-epsilon 1e-3"],
    ["--disable-bias-linear"],
    ["--add-qkv-bias"],
    [
        "--swiglu",
        "--quick-geglu",
        "--geglu",
        "--squared-relu",
        "--relu",
        "--openai-gelu",
        "--swiglu --glu-linear-offset 1.0",
        "--quick-geglu --activation-func-clamp-value 0.5",
        "--swiglu --activation-func-clamp-value 0.5",
    ],
    ["--untie-embeddings-and-output-weights"],
]
ATTENTION = [
    ["--group-query-attention --num-query-groups 2"],
    ["--kv-channels 6"],
    ["--qk-layernorm", "--qk-l2-norm"],
    ["--window-size 3,0", "--window-size 3,0 --window-attn-skip-freq 2"],
    ["--softmax-type off-by-one", "--softmax-type learnable"],
    ["--softmax-scale 0.3"],
    POSITIONS,
    POSITIONS,
]
RARE = [
    [
        "--apply-layernorm-1p",
        "--attention-logit-softcap 5",
        "--final-logit-softcap 5",
        "--attention-output-gate",
        "--sandwich-norm",
        "--scale-embeddings",
        "--apply-residual-connection-post-layernorm",
        "--embedding-layernorm",
    ]
]
LATENTS = [
    ["--q-lora-rank 6"],
    ["--qk-layernorm"],
    ["--rope-type rope", "--rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.7"],
]
ROUTED = [
    ["--moe-router-topk 1", "--moe-router-topk 3"],
    ["--moe-router-score-function sigmoid", "--moe-router-pre-softmax"],
    ["--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"],
    ["--moe-router-topk-scaling-factor 2.5"],
    ["--moe-router-num-groups 2 --moe-router-group-topk 1"],
    ["--moe-router-group-score max"],
    ["--moe-grouped-gemm"],
    ["--moe-shared-expert-intermediate-size 12", "--moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate"],
    ["--moe-layer-freq 2", "--moe-layer-freq [0]*1+[1]*1"],
]
# Where a network is Transformer Engine's alone, local layers say so; experts with biases fail there in the backward pass.
ENGINES_ALONE = (
    "but `q_lora_rank is None`",
    "Output 0 of _ReduceFromModelParallelRegion is a view",
    "zero_centered_gamma not supported",
    "Transformer Engine",
    "TransformerEngine",
    "TEDotProductAttention",
)


def network(draw: random.Random) -> str:
    """Flags of a network."""
    latent = draw.random() < 0.25
    options = [*DENSE, *([] if latent else ATTENTION), *(RARE if draw.random() < 0.15 else [])]
    words = [LATENT.split(" --normalization")[0]] if latent else []
    options += LATENTS if latent else []
    if draw.random() < 0.35:
        words.append("--num-experts 4 --moe-ffn-hidden-size 8")
        options += ROUTED
    if draw.random() < 0.2:
        words.append("--mtp-num-layers 2")
    return " ".join(words + [draw.choice(option) for option in options if draw.random() < 0.35])


@pytest.mark.nightly
def test_a_random_network_is_refused_or_is_the_same_in_megatron(
    package: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, place = package
    tokens, draw = unpack("dense", tmp_path) / "tokens", random.Random(13)
    ours, requests, refused = [], [], []
    while len(requests) < NETWORKS_DRAWN:
        flags, folder = network(draw), tmp_path / str(len(requests) + len(refused))
        folder.mkdir(exist_ok=True)
        try:
            line = trained(flags, folder, tokens)
        except (ConfigError, SystemExit):
            continue
        try:
            requests.append(request(folder, tokens, "torch_dist", capsys))
        except SystemExit as error:
            assert "Megatron" in str(error), flags
            refused.append(flags)
        else:
            ours.append((flags, line))
    found = zip(ours, answers(requests, place, tmp_path), strict=True)
    wrong = [
        f"{flags}: {one}"
        for (flags, line), theirs in found
        if (one := unlike(line, theirs)) and not any(word in one for word in ENGINES_ALONE)
    ]
    assert not wrong, "\n".join(wrong)
    assert refused
