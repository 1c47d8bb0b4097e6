"""The adapter for lm-evaluation-harness: its answers are those of the harness's own Hugging Face backend on the same weights.

lm-eval is an optional package; without it these tests are skipped (test_likelihood.py compares with transformers).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from tests.helpers.architecture import ROOT

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
published = pytest.importorskip("tests.unit.evaluation.published", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="lm_eval's Hugging Face backend needs accelerate")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from megatron.core.datasets.special_tokens import count_ids_around_text  # noqa: E402
from megatron.evaluation.harness import MegatronLM, sampling_from_gen_kwargs  # noqa: E402

TEXT = (
    "We hold that the Union is strong, and the whale is not. Call me what you will: the Congress of the United States "
    * 3
)
PAIRS = [
    ("The state of the", " Union"),
    ("", "The whale"),
    ("Call me ", "Ishmael"),
    (TEXT, " and so on"),
    ("a", TEXT[:40]),
    ("Who? A:", " yes"),
    ("Who? A:", " no"),
    ("The <|endoftext|> of", " days"),
    ("<s>begun", " already"),
    ("x", "<|endoftext|>"),
]


def asked(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    """Requests as lm_eval makes them."""
    return [Instance(request_type=kind, doc={}, arguments=given, idx=number) for number, given in enumerate(arguments)]


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, HFLM]:
    """A folder, and lm_eval's backend for it."""
    folder = tmp_path_factory.mktemp(request.param)
    published.write(request.param, folder)
    return str(folder), HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32")


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_loglikelihoods_are_those_of_the_hugging_face_backend(pair: tuple[str, HFLM], batch_size: int | str) -> None:
    ours = get_model("megatron").create_from_arg_string(f"load={pair[0]}", {"batch_size": batch_size, "device": "cpu"})
    found, expected = (one.loglikelihood(asked("loglikelihood", PAIRS)) for one in (ours, pair[1]))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=2e-5, abs=2e-5)


def test_rolling_loglikelihoods_are_those_of_the_hugging_face_backend(pair: tuple[str, HFLM]) -> None:
    texts = [(TEXT,), ("short",), (TEXT[5:90],)]
    backends = (MegatronLM(load=pair[0], batch_size=3), pair[1])
    found, expected = (one.loglikelihood_rolling(asked("loglikelihood_rolling", texts)) for one in backends)
    assert found == pytest.approx(expected, rel=2e-5)


def test_generated_texts_are_those_of_the_hugging_face_backend(pair: tuple[str, HFLM]) -> None:
    contexts = ["The state of the", "Call me", TEXT, "I"]
    free = pair[1].generate_until(
        asked("generate_until", [(text, {"until": [], "max_gen_toks": 8}) for text in contexts])
    )
    word = free[0][2:4]  # a text that the first of them will be ended by
    requests = [
        (text, {"until": until, "max_gen_toks": 8, "do_sample": False})
        for text in contexts
        for until in ([], [word], "e")
    ]
    backends = (MegatronLM(load=pair[0], batch_size=3), pair[1])
    found, expected = (one.generate_until(asked("generate_until", requests)) for one in backends)
    assert found == expected and len(set(found)) > 6
    assert word not in found[1] and len(found[1]) < len(found[0])


def test_draws_do_not_depend_on_the_batch(pair: tuple[str, HFLM]) -> None:
    requests = [
        (text, {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 0.9})
        for text in ("a", "The war", "a")
    ]
    alone, together = (
        MegatronLM(load=pair[0], batch_size=size).generate_until(asked("generate_until", requests)) for size in (1, 3)
    )
    assert alone == together and alone[0] != alone[2], "each request has draws of its own"


def test_ids_are_those_of_the_hugging_face_backend(pair: tuple[str, HFLM]) -> None:
    ours = MegatronLM(load=pair[0])
    for name in ("prefix_token_id", "eot_token_id", "max_length"):
        assert getattr(ours, name) == getattr(pair[1], name)
    for text in (TEXT, "<s> begun", "with </s> in it", "caf\u00e9 \u4e2d\u6587"):
        for special in (None, True, False):
            assert ours.tok_encode(text, add_special_tokens=special) == pair[1].tok_encode(
                text, add_special_tokens=special
            ), (text, special)
    assert bool(count_ids_around_text(ours.megatron_tokenizer)[0]) == (pair[1].tokenizer.bos_token == "<s>")


def test_a_conversation_is_written_by_the_tokenizers_template(pair: tuple[str, HFLM]) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ours = MegatronLM(load=pair[0], chat_template=template)
    messages = [{"role": "user", "content": "Who?"}]
    for opens in (True, False):
        expected = pair[1].tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=opens
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=opens) == expected
    with pytest.raises(ConfigError, match="no chat template"):
        MegatronLM(load=pair[0]).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loda": "x"}, "--model_args has loda; the model megatron takes"),
        ({}, "no load=FOLDER"),
        ({"batch_size": "many"}, "batch_size many is neither auto"),
        ({"data_parallel_size": 3}, "leave 1; start 3 ranks"),
        ({"max_length": 0}, "max_length 0 is not between 1 and"),
    ],
)
def test_settings_that_cannot_be_used_are_named(pair: tuple[str, HFLM], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MegatronLM(**({"load": pair[0]} if given and "loda" not in given else {}), **given)


def test_only_rotary_positions_go_on_beyond_what_was_trained(pair: tuple[str, HFLM]) -> None:
    if pair[1].config.model_type == "gpt2":
        with pytest.raises(ConfigError, match="max_length 30 is not between 1 and the network's 24 positions"):
            MegatronLM(load=pair[0], max_length=30)
    else:
        assert MegatronLM(load=pair[0], max_length=30).max_length == 30


def test_ways_to_generate_that_are_not_known_are_refused() -> None:
    assert sampling_from_gen_kwargs({"until": "x", "num_beams": 1, "max_tokens": 7, "temperature": 0.7}, 9)[:2] == (
        ["x"],
        7,
    )
    with pytest.raises(ConfigError, match="generation asks for num_beams=4"):
        sampling_from_gen_kwargs({"num_beams": 4}, 9)


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""


def table(folder: Path, output: Path, launcher: list[str], arguments: str) -> tuple[dict[str, Any], str]:
    """Run lm_eval on a small task; its results and what it printed."""
    command = [
        *launcher,
        "--tasks",
        "tiny_choice",
        "--include_path",
        str(folder),
        "--output_path",
        str(output),
        "--log_samples",
        "--device",
        "cpu",
        "--model_args",
        arguments,
    ]
    environment = os.environ | {
        "MEGATRON_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = output.rglob("samples_*.jsonl")
    rows = sorted(
        (json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"]
    )
    return {"answers": [[float(answer[0][0]) for answer in row["resps"]] for row in rows]}, done.stdout


def test_the_command_line_of_lm_eval_scores_a_checkpoint_under_a_layout(tmp_path: Path) -> None:
    published.write("gpt2", tmp_path / "model")
    data = tmp_path / "choices.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"Number {i} is", "options": [" odd", " even and", " war"], "answer": i % 3}) + "\n"
            for i in range(5)
        ),
        encoding="utf-8",
    )
    (tmp_path / "tiny_choice.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    place = f"load={tmp_path / 'model'}"
    theirs = [sys.executable, "-m", "lm_eval", "--model", "hf"]
    expected, _ = table(tmp_path, tmp_path / "theirs", theirs, f"pretrained={tmp_path / 'model'},dtype=float32")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    found, printed = table(
        tmp_path,
        tmp_path / "ours",
        [*torchrun, "tasks/harness.py", "--model", "megatron"],
        f"{place},tensor_model_parallel_size=2",
    )
    assert torch.allclose(torch.tensor(found["answers"]), torch.tensor(expected["answers"]), rtol=2e-5, atol=2e-5)
    assert printed.count("|tiny_choice|") == 1, "one rank reports"
