"""Multi-token prediction against the same sums written with plain torch, one sample and one depth at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt import GPTModel
from megatron.core.models.mtp import MTPInputs, MTPLosses
from megatron.training.state.batch import Batch, language_loss_with_mtp
from tests.helpers import tiny

S = 16
PACKED = {"reset_position_ids": True, "reset_attention_mask": True}
DOCUMENTS = [[0] * 6 + [1] * 10, [0] * 3 + [1] * 1 + [2] * 12]


def model_of(**changes: Any) -> tuple[GPTModel, tiny.RunContext]:
    run = tiny.run_of(tiny.config(**{"fp64": True, **changes}))
    (stage,) = tiny.trainer_of(run).stages
    with torch.no_grad():
        for name, param in stage.named_parameters():
            if "norm" in name:
                param.uniform_(-0.5, 1.5)
    return stage, run


def batch_of(run: tiny.RunContext, *, packed: bool, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, tiny.VOCABULARY, (2, S + 1), generator=generator)
    mask = (torch.rand((2, S), generator=generator) < 0.7).double()
    documents = torch.tensor(DOCUMENTS) if packed else None
    positions = torch.tensor([[*range(6), *range(10)], [*range(3), 0, *range(12)]]) if packed else None
    batch = Batch(tokens=window[:, :-1], labels=window[:, 1:], loss_mask=mask, documents=documents, positions=positions)
    return batch.with_future_tokens(
        run.config.model.mtp.mtp_num_layers or 0, per_token=run.config.train.calculate_per_token_loss
    )


def told(stage: GPTModel, batch: Batch) -> MTPLosses:
    """The losses of all tokens, counted or not."""
    return stage(
        ids=batch.tokens,
        labels=batch.labels,
        documents=batch.documents,
        positions=batch.positions,
        ahead=MTPInputs(batch.mtp_inputs.ids, all_labels(batch)),
    )


def all_labels(batch: Batch) -> tuple[torch.Tensor, ...]:
    """What stands ahead of every label, whether its loss counts or not."""
    return tuple(batch.extras[f"mtp_{depth}_labels"] for depth in range(1, len(batch.mtp_inputs.labels) + 1))


def by_hand(
    stage: GPTModel, run: tiny.RunContext, batch: Batch, depths: int
) -> tuple[Tensor, list[tuple[Tensor, int, Tensor]]]:
    """The main loss summed over its tokens; and of every depth the sum and the number of its tokens, and what it adds to the
    main loss: as much as if every sequence had its mean at all tokens of the main loss. For tied GPT-2 layers.
    """
    weights, model = dict(stage.named_parameters()), run.config.model
    words, places = (
        weights["embedding.word_embeddings.weight"][: tiny.VOCABULARY],
        weights["embedding.position_embeddings.weight"],
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def layer(x: Tensor, name: str, hidden: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (model.num_attention_heads, -1)).transpose(0, 1)
            for part in linear(norm(x, f"{name}.input_layernorm"), f"{name}.self_attention.linear_qkv").chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(1, 2)) / model.kv_channels**0.5
        mixed = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + linear(mixed, f"{name}.self_attention.linear_proj")
        return x + linear(
            F.gelu(linear(norm(x, f"{name}.pre_mlp_layernorm"), f"{name}.mlp.linear_fc1")), f"{name}.mlp.linear_fc2"
        )

    nothing = torch.zeros((), dtype=torch.float64)
    total, further = nothing, [(nothing, 0, nothing)] * depths
    for row in range(len(batch.tokens)):
        tokens, labels, mask = batch.tokens[row], batch.labels[row], batch.loss_mask[row]
        document = torch.zeros(S, dtype=torch.long) if batch.documents is None else batch.documents[row]
        place = torch.arange(S) if batch.positions is None else batch.positions[row]
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1) | (document[:, None] != document[None])
        x = words[tokens] + places[place]
        for index in range(model.num_layers):
            x = layer(x, f"decoder.layers.{index}", hidden)
        x = norm(x, "decoder.final_layernorm")
        total = total + (F.cross_entropy(x @ words.t(), labels, reduction="none") * mask).sum()
        for depth in range(1, depths + 1):
            name = f"mtp.layers.{0 if model.mtp.mtp_use_repeated_layer else depth - 1}"
            last = S - depth  # places whose token and label ahead are known
            vectors = words[tokens[depth:]] + places[place[:last] + depth]
            if model.mtp.mtp_detach_heads:
                vectors, x = vectors.detach(), x.detach() if depth == 1 else x
            both = torch.cat((norm(vectors, f"{name}.enorm"), norm(x[:last], f"{name}.hnorm")), dim=-1)
            x = norm(
                layer(linear(both, f"{name}.eh_proj"), f"{name}.mtp_model_layer", hidden[:last, :last]),
                f"{name}.final_layernorm",
            )
            head = words.detach() if model.mtp.mtp_detach_heads else words
            losses = F.cross_entropy(x @ head.t(), labels[depth:], reduction="none")
            # The last label stands behind the window, where a document is taken to go on.
            same = torch.tensor([document[i] == document[min(i + depth + 1, S - 1)] for i in range(last)])
            counts = mask[depth:] * same
            own, number, before = (losses * counts).sum(), int(counts.sum()), further[depth - 1]
            weighed = own / max(number, 1) * mask.sum()
            further[depth - 1] = (before[0] + own, before[1] + number, before[2] + weighed)
    return total, further


@pytest.mark.parametrize(
    "changes",
    [
        {"mtp_num_layers": 1},
        {"mtp_num_layers": 1, "calculate_per_token_loss": False},
        {"mtp_num_layers": 2, "calculate_per_token_loss": False, **PACKED},
        {"mtp_num_layers": 3},
        {"mtp_num_layers": 2, **PACKED},
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
        {"mtp_num_layers": 2, "mtp_detach_heads": True},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_the_plain_sums(changes: dict[str, Any]) -> None:
    stage, run = model_of(mtp_loss_scaling_factor=0.3, **changes)
    depths, batch = changes["mtp_num_layers"], batch_of(run, packed="reset_attention_mask" in changes)
    total, count, report = language_loss_with_mtp(told(stage, batch), batch, run.config.model.mtp)
    main, further = by_hand(stage, run, batch, depths)
    assert int(count) == int(batch.loss_mask.sum())
    torch.testing.assert_close(report["lm loss"], torch.stack((main.detach(), count)), rtol=1e-12, atol=0.0)
    for depth, (summed, number, _) in enumerate(further, start=1):
        expected = torch.tensor([summed.item(), number], dtype=torch.float64)
        torch.testing.assert_close(report[f"mtp_{depth} loss"], expected, rtol=1e-12, atol=0.0)
    added = sum(
        weighed if run.config.train.calculate_per_token_loss else summed * int(count) / number
        for summed, number, weighed in further
    )
    expected = main + added * 0.3 / depths
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0.0)
    params = dict(stage.named_parameters())
    ours, theirs = (torch.autograd.grad(value, list(params.values())) for value in (total, expected))
    for name, own, other in zip(params, ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_the_network_itself_is_the_same_with_and_without_layers_behind_it() -> None:
    stage, run = model_of(mtp_num_layers=2)
    batch = batch_of(run, packed=False)
    assert torch.equal(told(stage, batch).next, stage(ids=batch.tokens, labels=batch.labels)), "without anything ahead"
    (plain,) = tiny.trainer_of(tiny.run_of(tiny.config(fp64=True))).stages
    (fresh,) = tiny.trainer_of(tiny.run_of(tiny.config(fp64=True, mtp_num_layers=2))).stages
    held = dict(fresh.named_parameters())
    assert all(torch.equal(param, held.pop(name)) for name, param in plain.named_parameters()), (
        "initial values go by name"
    )
    assert all(name.startswith(("mtp.layers.0.", "mtp.layers.1.")) for name in held)


def test_no_depth_sees_a_token_behind_the_one_it_reads_and_none_of_another_document() -> None:
    stage, run = model_of(mtp_num_layers=2, **PACKED)
    batch, changed, place = batch_of(run, packed=True), batch_of(run, packed=True), 9
    changed.tokens[0, place] = changed.labels[0, place - 1] = (batch.tokens[0, place] + 1) % tiny.VOCABULARY
    changed = Batch(
        tokens=changed.tokens,
        labels=changed.labels,
        loss_mask=changed.loss_mask,
        documents=changed.documents,
        positions=changed.positions,
    ).with_future_tokens(2)
    before, after = told(stage, batch), told(stage, changed)
    for depth, (a, b) in enumerate(zip(before.ahead, after.ahead, strict=True), start=1):
        moved = (a != b)[0].tolist()
        label = place - depth - 1  # the one that has the changed token to predict
        assert moved[label] and all(moved[label + 1 : S - depth]) and not any(moved[6:label])
        counted = batch.extras[f"mtp_{depth}_loss_mask"][0] > 0
        assert not any(m for m, c in zip(moved[:6], counted[:6], strict=True) if c), (
            "the first document does not change"
        )


@pytest.mark.parametrize(
    "documents, mask, counts",
    [
        (None, [1, 1, 1, 1, 1], {1: [1, 1, 1, 1, 0], 2: [1, 1, 1, 0, 0]}),
        (None, [1, 0, 1, 1, 0], {1: [0, 1, 1, 0, 0], 2: [1, 1, 0, 0, 0]}),
        ([0, 0, 0, 1, 1], [1, 1, 1, 1, 1], {1: [1, 0, 0, 1, 0], 2: [0, 0, 0, 0, 0]}),
        ([0, 1, 1, 1, 1], [1, 1, 1, 1, 1], {1: [0, 1, 1, 1, 0], 2: [0, 1, 1, 0, 0]}),
    ],
    ids=str,
)
def test_tokens_labels_and_masks_ahead(
    documents: list[int] | None, mask: list[int], counts: dict[int, list[int]]
) -> None:
    batch = Batch(
        tokens=torch.tensor([[10, 11, 12, 13, 14]]),
        labels=torch.tensor([[11, 12, 13, 14, 15]]),
        loss_mask=torch.tensor([mask]),
        documents=None if documents is None else torch.tensor([documents]),
    ).with_future_tokens(2)
    assert [row[0].tolist() for row in batch.mtp_inputs.ids] == [[11, 12, 13, 14, 0], [12, 13, 14, 0, 0]]
    expected = {1: [12, 13, 14, 15, 0], 2: [13, 14, 15, 0, 0]}
    assert [row[0].tolist() for row in batch.mtp_inputs.labels] == [
        [label if counted else -1 for label, counted in zip(expected[depth], counts[depth], strict=True)]
        for depth in (1, 2)
    ]
    assert {depth: batch.extras[f"mtp_{depth}_loss_mask"][0].tolist() for depth in (1, 2)} == counts
    assert batch.loss_mask[0].tolist() == mask, "the main mask is left alone"


@pytest.mark.parametrize("masked", [False, True])
def test_a_depth_weighs_as_much_as_the_next_token_however_short_documents_are(masked: bool) -> None:
    """In Megatron a depth's tokens weigh the number of tokens of the main loss over their own, by microbatch."""
    ends = torch.arange(24) % 3 == 2  # documents of three tokens; with --eod-mask-loss their last one has no loss
    documents = (ends.cumsum(0) - ends.long())[None].expand(2, -1)
    mask = (~ends if masked else torch.ones(24)).double()[None].expand(2, -1).clone()
    mask[1, 12:] = 0
    ids = torch.ones((2, 24), dtype=torch.int64)
    extras = Batch(tokens=ids, labels=ids, loss_mask=mask, documents=documents).with_future_tokens(1).extras
    for row in range(2):
        counted = int(extras["mtp_1_loss_mask"][row].sum())
        assert counted < 0.7 * int(mask[row].sum())
        weights = extras["mtp_1_weights"][row]
        assert weights.unique().tolist() == [0.0, pytest.approx(int(mask[row].sum()) / counted)]


def test_a_batch_without_depths_or_text_is_left_alone() -> None:
    batch = Batch(
        tokens=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long), loss_mask=torch.ones(1, 4)
    )
    assert batch.with_future_tokens(0).mtp_inputs is None and Batch().with_future_tokens(2).mtp_inputs is None


def test_heads_apart_train_their_own_layers_only() -> None:
    stage, run = model_of(mtp_num_layers=2, mtp_detach_heads=True)
    batch = batch_of(run, packed=False)
    further = sum(losses.sum() for losses in told(stage, batch).ahead)
    params = dict(stage.named_parameters())
    reached = dict(zip(params, torch.autograd.grad(further, list(params.values()), allow_unused=True), strict=True))
    assert {name for name, gradient in reached.items() if gradient is not None} == {
        name for name in params if name.startswith("mtp.")
    }


def test_ids_ahead_may_be_anything_where_nothing_counts() -> None:
    stage, run = model_of(mtp_num_layers=2)
    batch = batch_of(run, packed=False)
    filled = tuple(
        torch.cat((ids[:, :-depth], torch.full((2, depth), 7)), dim=1)
        for depth, ids in enumerate(batch.mtp_inputs.ids, start=1)
    )
    others = MTPInputs(filled, all_labels(batch))
    found = stage(ids=batch.tokens, labels=batch.labels, ahead=others)
    (total, *_), (expected, *_) = (
        language_loss_with_mtp(output, batch, run.config.model.mtp) for output in (found, told(stage, batch))
    )
    assert all(not torch.equal(a, b) for a, b in zip(found.ahead, told(stage, batch).ahead, strict=True))
    assert torch.equal(total, expected)
