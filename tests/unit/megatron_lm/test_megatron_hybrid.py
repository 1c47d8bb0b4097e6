"""Megatron's checkpoints of networks with states: the pieces of fused matrices by their names there, in both formats and both ways."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.config.plan.network import model_config_from_settings, network_setting_differences
from megatron.core.dist_checkpointing.checkpoint_folders import CheckpointError
from megatron.core.dist_checkpointing.pickles import attributes_of_inert, read_torch_file
from megatron.core.models.describe import global_parameter_shapes
from megatron.megatron_lm.checkpoint.export import write_legacy_checkpoint, write_torch_dist_checkpoint
from megatron.megatron_lm.checkpoint.hybrid import infer_layer_pattern
from megatron.megatron_lm.checkpoint.legacy import open_legacy_checkpoint
from megatron.megatron_lm.checkpoint.torch_dist import open_torch_dist_checkpoint
from tests.unit.megatron_lm.test_megatron_torch_dist import contents, write

RANKS = 2
IDS = {"true_vocab_size": 10}
H, WIDTH, HEADS, GROUPS, SIZE = 8, 12, 4, 2, 2  # hidden, MLP, attention
INNER, STATE, MIXER_HEADS = 16, 6, 4  # Mamba-2: two groups of states of three numbers, heads of four channels
KEYS, VALUES, VALUE_HEADS = 6, 20, 4  # delta net: two key heads of three, value heads of five
ARGUMENTS: dict[str, Any] = {
    "hidden_size": H,
    "ffn_hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": SIZE,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "none",
    "squared_relu": True,
    "untie_embeddings_and_output_weights": True,
    "mamba_state_dim": 3,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": MIXER_HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
PATTERN = "MG-*M"
GPT = {
    **{name: value for name, value in ARGUMENTS.items() if name != "squared_relu"},
    "swiglu": True,
    "num_layers": 2,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "attention_output_gate": True,
    "apply_layernorm_1p": True,
    "position_embedding_type": "rope",
}
Pieces = dict[str, dict[str, Tensor]]  # their parameter -> piece ("" for a whole one) -> all its rows


def mamba(at: str) -> Pieces:
    """A layer of Mamba-2 as Megatron names it."""
    shared = {"x": INNER, "B": STATE, "C": STATE}
    rows = {"in_proj.weight": {"z": INNER, **shared, "dt": MIXER_HEADS}}
    found = {
        f"{at}mixer.{name}": {piece: torch.randn(size, H) for piece, size in sizes.items()}
        for name, sizes in rows.items()
    }
    return {
        **found,
        f"{at}mixer.in_proj.layer_norm_weight": {"": torch.randn(H)},
        f"{at}mixer.conv1d.weight": {piece: torch.randn(size, 1, 4) for piece, size in shared.items()},
        f"{at}mixer.conv1d.bias": {piece: torch.randn(size) for piece, size in shared.items()},
        **{f"{at}mixer.{name}": {"": torch.randn(MIXER_HEADS)} for name in ("dt_bias", "A_log", "D")},
        f"{at}mixer.norm.weight": {"": torch.randn(INNER)},
        f"{at}mixer.out_proj.weight": {"": torch.randn(H, INNER)},
    }


def delta_net(at: str) -> Pieces:
    """A gated delta net as Megatron names it."""
    mixed = {"query": KEYS, "key": KEYS, "value": VALUES}
    sizes = {**mixed, "z": VALUES, "beta": VALUE_HEADS, "alpha": VALUE_HEADS}
    return {
        f"{at}self_attention.in_proj.layer_norm_weight": {"": torch.randn(H)},
        f"{at}self_attention.in_proj.weight": {piece: torch.randn(size, H) for piece, size in sizes.items()},
        f"{at}self_attention.conv1d.weight": {piece: torch.randn(size, 1, 4) for piece, size in mixed.items()},
        **{f"{at}self_attention.{name}": {"": torch.randn(VALUE_HEADS)} for name in ("dt_bias", "A_log")},
        f"{at}self_attention.out_norm.weight": {"": torch.randn(5)},
        f"{at}self_attention.out_proj.weight": {"": torch.randn(H, VALUES)},
    }


def attention(at: str, *, gate: bool = False) -> Pieces:
    """Attention; its rows are here still part by part, as ours are, under a piece for each."""
    parts = {"q": HEADS, **({"gate": HEADS} if gate else {}), "k": GROUPS, "v": GROUPS}
    return {
        f"{at}self_attention.linear_qkv.layer_norm_weight": {"": torch.randn(H)},
        f"{at}self_attention.linear_qkv.weight": {part: torch.randn(heads * SIZE, H) for part, heads in parts.items()},
        f"{at}self_attention.linear_proj.weight": {"": torch.randn(H, HEADS * SIZE)},
    }


def mlp(at: str, *, gated: bool = False) -> Pieces:
    """An MLP; of a gated one the rows are gate and up."""
    rows = ("gate", "up") if gated else ("",)
    return {
        f"{at}mlp.linear_fc1.layer_norm_weight": {"": torch.randn(H)},
        f"{at}mlp.linear_fc1.weight": {part: torch.randn(WIDTH, H) for part in rows},
        f"{at}mlp.linear_fc2.weight": {"": torch.randn(H, WIDTH)},
    }


def network(layers: list[Pieces], final: str) -> Pieces:
    """A network of these layers."""
    torch.manual_seed(7)
    words = {f"{name}.weight": {"": torch.randn(12, H)} for name in ("embedding.word_embeddings", "output_layer")}
    return {name: held for part in (words, *layers) for name, held in part.items()} | {
        f"decoder.{final}.weight": {"": torch.randn(H)}
    }


def hybrid() -> Pieces:
    """M, G, MLP, attention, M."""
    torch.manual_seed(5)
    makers = {"M": mamba, "G": delta_net, "-": mlp, "*": attention}
    return network([makers[symbol](f"decoder.layers.{i}.") for i, symbol in enumerate(PATTERN)], "final_norm")


def ahead() -> Pieces:
    """The same with two depths of multi-token prediction, each of attention and M."""
    whole = hybrid()
    for depth in range(2):
        at = f"mtp.layers.{depth}."
        inner = f"{at}mtp_model_layer.layers."
        own = {f"{at}{name}.weight": {"": torch.randn(H)} for name in ("enorm", "hnorm", "final_layernorm")}
        whole |= {
            **own,
            f"{at}eh_proj.weight": {"": torch.randn(H, 2 * H)},
            **attention(f"{inner}0."),
            **mamba(f"{inner}1."),
        }
    return whole


def gpt() -> Pieces:
    """A GPT whose first layer has a delta net, and whose attention has gates."""
    torch.manual_seed(6)
    first, second = "decoder.layers.0.", "decoder.layers.1."
    halves = [delta_net(first), mlp(first, gated=True), attention(second, gate=True), mlp(second, gated=True)]
    return network([{name: held for half in halves for name, held in half.items()}], "final_layernorm")


def ours(whole: Pieces) -> dict[str, Tensor]:
    """What a network is under our names: norms beside their layers, pieces end to end."""
    found = {}
    for name, pieces in whole.items():
        name = name.replace("mixer.in_proj.layer_norm_", "input_layernorm.")
        name = name.replace("self_attention.in_proj.layer_norm_", "input_layernorm.")
        name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.").replace("final_norm", "final_layernorm")
        found[name] = torch.cat(list(pieces.values()))
    words = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: tensor[:10] if name in words else tensor for name, tensor in found.items()}


def by_turns(parts: dict[str, Tensor], groups: range) -> Tensor:
    """Rows of attention: of each group its query heads, their gates, its key, its value."""
    rows = []
    for group in groups:
        for part in parts.values():
            each = len(part) // GROUPS
            rows.append(part[group * each : (group + 1) * each])
    return torch.cat(rows)


def rank_rows(name: str, pieces: dict[str, Tensor], rank: int, ranks: int) -> dict[str, tuple[int, Tensor]]:
    """Piece -> (axis, part) that a tensor rank holds; -1 for what all ranks hold."""
    if name.endswith("linear_qkv.weight"):
        each = GROUPS // ranks
        return {"": (0, by_turns(pieces, range(rank * each, (rank + 1) * each)))}
    if "norm" in name and not name.endswith("mixer.norm.weight"):
        return {piece: (-1, tensor) for piece, tensor in pieces.items()}
    axis = 1 if name.endswith(("_proj.weight", "fc2.weight")) and "in_proj" not in name and "eh_proj" not in name else 0
    return {piece: (axis, tensor.chunk(ranks, dim=axis)[rank].clone()) for piece, tensor in pieces.items()}


def saved_distributed(
    folder: Path, whole: Pieces, arguments: dict[str, Any], *, flat: Pieces | None = None, **more: Any
) -> Path:
    """As two tensor ranks save it: pieces under names of their own. flat: tensors that are saved as they are."""
    boxes: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {
        key: [((0,), one[""])] for key, one in (flat or {}).items()
    }
    for name, pieces in whole.items():
        for rank in range(RANKS):
            for piece, (axis, part) in rank_rows(name, pieces, rank, RANKS).items():
                if axis < 0 and rank:
                    continue
                key = f"{name}.{piece}" if piece and "linear_fc1" not in name else name
                start = rank * part.shape[axis] if axis >= 0 else 0
                start += len(pieces["gate"]) if piece == "up" else 0
                offset = tuple(start if dim == axis else 0 for dim in range(part.dim()))
                boxes.setdefault(key, []).append((offset, part))
    common = {"args": argparse.Namespace(**arguments), "iteration": 3, "checkpoint_version": 3.0, **more}
    return write(folder, boxes, common=common)


def saved_by_rank(folder: Path, whole: Pieces, arguments: dict[str, Any]) -> Path:
    """As files of two tensor ranks: each piece of a rank below the one before."""
    for rank in range(RANKS):
        state = {
            name: torch.cat([part for _, part in rank_rows(name, pieces, rank, RANKS).values()])
            for name, pieces in whole.items()
        }
        place = folder / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        args = argparse.Namespace(**arguments, tensor_model_parallel_size=RANKS)
        torch.save(
            {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": state}, place / "model_optim_rng.pt"
        )
    return folder


def check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit the same."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


CASES: dict[str, Any] = {
    "hybrid": (hybrid, {**ARGUMENTS, "num_layers": 5, "hybrid_override_pattern": PATTERN, "is_hybrid_model": True}),
    "stages": (hybrid, {**ARGUMENTS, "num_layers": 5, "hybrid_layer_pattern": "MG|-*|M", "hybrid_mlp_ratio": 0.2}),
    "gpt": (gpt, GPT),
    "ahead": (ahead, {**ARGUMENTS, "num_layers": 5, "hybrid_layer_pattern": f"{PATTERN}/*M/*M", "mtp_num_layers": 2}),
}


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_put_together_as_the_network_has_them(case: str, format: str, tmp_path: Path) -> None:
    make, arguments = CASES[case]
    whole = make()
    if format == "torch_dist":
        source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", whole, arguments), IDS)
    else:
        source = open_legacy_checkpoint(saved_by_rank(tmp_path / "saved", whole, arguments), IDS)
    expected = ours(whole)
    if case == "gpt":  # stored minus one there, as all weights of norms are
        expected["decoder.layers.0.self_attention.out_norm.weight"] += 1
    check(contents(source), expected)
    assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == global_parameter_shapes(
        model_config_from_settings(source.settings)
    )


@pytest.mark.parametrize("case", ["hybrid", "gpt", "ahead"])
def test_what_is_written_has_megatrons_names_and_comes_back(case: str, tmp_path: Path) -> None:
    make, arguments = CASES[case]
    whole = make()
    source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", whole, arguments), IDS)
    written = write_torch_dist_checkpoint(source, tmp_path / "dist", tensor_size=2)
    again = open_torch_dist_checkpoint(written, IDS)
    check(contents(again), contents(source))
    assert (
        network_setting_differences(
            model_config_from_settings(again.settings), model_config_from_settings(source.settings)
        )
        == []
    )
    reader = torch.distributed.checkpoint.FileSystemReader(written)
    keys = {name for name in reader.read_metadata().state_dict_metadata if "_extra_state" not in name}
    assert keys == {
        f"{name}.{piece}" if piece and "linear" not in name else name
        for name, pieces in whole.items()
        for piece in pieces
    }
    by_rank = write_legacy_checkpoint(source, tmp_path / "ranks", tensor_size=2)
    check(contents(open_legacy_checkpoint(by_rank, IDS)), contents(source))
    for rank in range(RANKS):
        content = read_torch_file(by_rank / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
        for name, pieces in whole.items():
            if "out_norm" in name:  # from which one was taken
                assert torch.allclose(content["model"][name], next(iter(pieces.values())))
            elif "embedding" not in name and "output_layer" not in name:  # whose padding is by Megatron's multiple
                rows = torch.cat([part for _, part in rank_rows(name, pieces, rank, RANKS).values()])
                assert torch.equal(content["model"][name], rows), name
        assert attributes_of_inert(content["args"])["hybrid_layer_pattern"] == CASES[case][1].get(
            "hybrid_layer_pattern", PATTERN if case == "hybrid" else None
        )


STAGES: dict[str, tuple[str, str, tuple[int, ...]]] = {  # case, pattern of the source, layers of each stage
    "as the pattern says": ("hybrid", "MG|-*M", (2, 3)),
    "evenly": ("hybrid", "MG|-*M", (1, 1, 1, 1, 1)),
    "ahead": ("ahead", "MG-|*M/*M/*M", (3, 2)),
}


@pytest.mark.parametrize("name", STAGES)
def test_files_of_pipeline_ranks_hold_what_megatrons_stages_hold(name: str, tmp_path: Path) -> None:
    case, pattern, sizes = STAGES[name]
    make, arguments = CASES[case]
    whole = make()
    source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", whole, arguments), IDS)
    source.settings = {**source.settings, "hybrid_layer_pattern": pattern}
    by_rank = write_legacy_checkpoint(source, tmp_path / "ranks", tensor_size=RANKS, pipeline_size=len(sizes))
    again = open_legacy_checkpoint(by_rank, IDS)
    check(contents(again), contents(source))
    unbroken = {**source.settings, "hybrid_layer_pattern": pattern.replace("|", "")}
    assert (
        network_setting_differences(model_config_from_settings(again.settings), model_config_from_settings(unbroken))
        == []
    )
    first = 0
    for stage, size in enumerate(sizes):
        last = stage == len(sizes) - 1
        expected = {}
        for full, pieces in whole.items():
            if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", full):
                if first <= int(match[1]) < first + size:
                    expected[f"decoder.layers.{int(match[1]) - first}.{match[2]}"] = full
            elif last if not full.startswith("embedding.") else stage == 0 or last and case == "ahead":
                expected[full] = full
        for rank in range(RANKS):
            content = read_torch_file(by_rank / f"mp_rank_{rank:02d}_{stage:03d}" / "model_optim_rng.pt")
            held = {key: tensor for key, tensor in content["model"].items() if tensor is not None}
            assert held.keys() == expected.keys()
            for key, full in expected.items():
                rows = torch.cat([part for _, part in rank_rows(full, whole[full], rank, RANKS).values()])
                if "embedding" not in full and "output_layer" not in full:  # whose padding is by Megatron's multiple
                    assert torch.equal(held[key], rows), key
            stated = attributes_of_inert(content["args"])
            by_pattern = len(sizes) == pattern.count("|") + 1
            assert stated["hybrid_layer_pattern"] == (pattern if by_pattern else pattern.replace("|", ""))
            assert stated["pipeline_model_parallel_size"] == len(sizes)
        first += size


def test_stages_that_divide_no_pattern_evenly_are_refused(tmp_path: Path) -> None:
    source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", hybrid(), CASES["hybrid"][1]), IDS)
    with pytest.raises(
        CheckpointError, match="5 layers cannot be divided over 2 pipeline ranks; give the pattern as many stages"
    ):
        write_legacy_checkpoint(source, tmp_path / "ranks", pipeline_size=2)
    assert not (tmp_path / "ranks").exists()


def test_a_pure_network_of_mamba_is_known_by_its_tensors(tmp_path: Path) -> None:
    """Releases before patterns say `is_hybrid_model`, and ratios of zero."""
    torch.manual_seed(5)
    whole = network([mamba(f"decoder.layers.{i}.") for i in range(2)], "final_norm")
    arguments = {
        **ARGUMENTS,
        "num_layers": 2,
        "is_hybrid_model": True,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
    }
    source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", whole, arguments), IDS)
    assert source.settings["hybrid_layer_pattern"] == "MM"
    check(contents(source), ours(whole))


def test_moments_of_the_optimizer_are_put_together_too(tmp_path: Path) -> None:
    whole = hybrid()
    state = {
        f"optimizer.state.{slot}.{name}": {piece: torch.rand_like(part) for piece, part in pieces.items()}
        for slot in ("exp_avg", "exp_avg_sq", "fp32_param")
        for name, pieces in whole.items()
        if "qkv" not in name
    }
    arguments = {**CASES["hybrid"][1], "consumed_train_samples": 24}
    steps = {"optimizer": {"param_groups": [{"step": 3}]}}
    folder = saved_distributed(tmp_path / "saved", {**whole, **state}, arguments, **steps)
    source = open_torch_dist_checkpoint(folder, IDS)
    found = contents(source, "optimizer.exp_avg.")
    name = "decoder.layers.0.mixer.in_proj.weight"
    assert torch.equal(found[name], torch.cat(list(state[f"optimizer.state.exp_avg.{name}"].values())))


IN_PROJ = ["in_proj.layer_norm_weight", "in_proj.weight"]
CONV = {"M": ["conv1d.weight", "conv1d.bias"], "G": ["conv1d.weight"]}
# What the constructors of Megatron Core's layers define, in their order, with the convolution as a child of the mixer or as its own parameters.
OWN = {"M": ["dt_bias", "A_log", "D"], "G": ["dt_bias", "A_log"]}
BEHIND = {"M": ["norm.weight", "out_proj.weight"], "G": ["out_norm.weight", "out_proj.weight"]}
OTHERS = {
    "-": ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"],
    "*": [f"self_attention.linear_{name}" for name in ("proj.weight", "qkv.layer_norm_weight", "qkv.weight")],
}


def definition_order(own_conv: bool) -> list[str]:
    """The parameters of `hybrid` as a module tree of Megatron lists them."""
    names = ["embedding.word_embeddings.weight"]
    for index, symbol in enumerate(PATTERN):
        inner = OTHERS.get(symbol, [])
        if symbol in OWN:
            mixer = "mixer" if symbol == "M" else "self_attention"
            first, last = (CONV[symbol], []) if own_conv else ([], CONV[symbol])
            inner = [f"{mixer}.{name}" for name in (*first, *OWN[symbol], *IN_PROJ, *last, *BEHIND[symbol])]
        names += [f"decoder.layers.{index}.{name}" for name in inner]
    return [*names, "decoder.final_norm.weight", "output_layer.weight"]


@pytest.mark.parametrize("own_conv", [False, True])
def test_flat_buckets_hold_the_state_of_layers_with_states_too(own_conv: bool, tmp_path: Path) -> None:
    """`dp_reshardable`: of each tensor rank its parameters end to end, the last defined first, each from a multiple of 64 elements on."""
    whole = hybrid()
    slots = {slot: {n: {p: torch.rand_like(t) for p, t in held.items()} for n, held in whole.items()} for slot in "mv"}
    named = {"param": whole, "exp_avg": slots["m"], "exp_avg_sq": slots["v"]}
    buckets: Pieces = {}
    for slot, network_ in named.items():
        for rank in range(RANKS):
            flat = torch.zeros(0)
            for name in reversed(definition_order(own_conv)):
                own = torch.cat([part for _, part in rank_rows(name, network_[name], rank, RANKS).values()]).flatten()
                flat = torch.cat((flat, torch.zeros(-len(flat) % 64), own))
            key = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.{slot}"
            buckets[key] = {"": flat}
    ranks = {"tensor_model_parallel_size": RANKS, "transformer_impl": "transformer_engine"}
    arguments = {**CASES["hybrid"][1], **ranks, "consumed_train_samples": 24}
    steps = {"optimizer": {"param_groups": [{"step": 3}]}}
    folder = saved_distributed(tmp_path / "saved", whole, arguments, flat=buckets, **steps)
    source = open_torch_dist_checkpoint(folder, IDS)
    assert not source.skipped, source.skipped
    for slot in ("m", "v"):
        kind = "exp_avg" if slot == "m" else "exp_avg_sq"
        check(contents(source, f"optimizer.{kind}."), ours(slots[slot]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hybrid_override_pattern": "MG-*D"}, "layers MG-.D; read are M G"),
        ({"hybrid_override_pattern": "MG-*M/M"}, "MG-.M/M in the settings, MG-.M in the tensors"),
        ({"hybrid_override_pattern": "MG-**"}, "MG-.. in the settings, MG-.M in the tensors"),
    ],
)
def test_patterns_that_are_not_the_networks_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = saved_distributed(tmp_path / "saved", hybrid(), {**CASES["hybrid"][1], **change})
    with pytest.raises(CheckpointError, match=message):
        open_torch_dist_checkpoint(folder, IDS)


def test_layers_ahead_that_older_releases_state_once_are_those_of_each_depth(tmp_path: Path) -> None:
    """`--mtp-hybrid-override-pattern`; and one layer for all depths has tensors once."""
    arguments = {**CASES["ahead"][1], "hybrid_layer_pattern": PATTERN, "mtp_hybrid_override_pattern": "*M"}
    source = open_torch_dist_checkpoint(saved_distributed(tmp_path / "each", ahead(), arguments), IDS)
    assert source.settings["hybrid_layer_pattern"] == f"{PATTERN}/*M/*M"
    once = {name: pieces for name, pieces in ahead().items() if "mtp.layers.1." not in name}
    folder = saved_distributed(tmp_path / "once", once, {**arguments, "mtp_use_repeated_layer": True})
    again = open_torch_dist_checkpoint(folder, IDS)
    assert again.settings["hybrid_layer_pattern"] == f"{PATTERN}/*M/*M"
    shapes = {name: tuple(tensor.shape) for name, tensor in ours(once).items()}
    assert shapes == global_parameter_shapes(model_config_from_settings(again.settings))


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    whole = hybrid()
    del whole["decoder.layers.0.mixer.in_proj.weight"]["B"]
    with pytest.raises(CheckpointError, match="lacks model.decoder.layers.0.mixer.in_proj.weight.B"):
        open_torch_dist_checkpoint(saved_distributed(tmp_path / "saved", whole, CASES["hybrid"][1]), IDS)


def test_symbols_are_told_only_by_layers_of_one_part() -> None:
    assert infer_layer_pattern(["decoder.layers.0.mixer.D", "decoder.layers.1.mlp.linear_fc1.weight"]) == "M-"
    both = ["decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"]
    assert infer_layer_pattern(both) == infer_layer_pattern([]) == ""
