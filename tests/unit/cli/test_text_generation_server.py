"""The server as a process, and the programme that asks it: loaded, asked, drained by SIGTERM, alone and over two ranks, of which one is
killed.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("fastapi", reason="fastapi is not installed; the extra `server` brings it")
pytest.importorskip("uvicorn", reason="uvicorn is not installed; the extra `server` brings it")

from megatron.core.config.settings.inference import InferenceConfig
from megatron.evaluation.reward_model import RewardModel
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationRequest
from megatron.inference.sampling import SamplingParams
from megatron.training.checkpoint.inference_model import GPT, load_network
from tests.helpers.architecture import ROOT
from tests.unit.cli.test_generate_text import trained
from tests.unit.evaluation.test_reward import saved
from tests.unit.inference.clients import until
from tests.unit.inference.serving import HYBRID

TOOL, CLI = ROOT / "tools" / "run_text_generation_server.py", ROOT / "tools" / "text_generation_cli.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trained network."""
    made = str(tmp_path_factory.mktemp("network"))
    trained({}, made)
    return made


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server process and its port."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", "0"], stdout=file, stderr=file, env={**ENVIRONMENT, **environment}, cwd=ROOT
        )
    try:
        until(lambda: "serving at" in log.read_text() or process.poll() is not None)
        found = re.search(r"serving at http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found, log.read_text()
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait(30)


def put(port: int, path: str = "/api", **body: Any) -> tuple[int, Any]:
    """PUT /api, or POST to another path."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(
        "PUT" if path == "/api" else "POST", path, json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def asked(port: int, lines: str, *options: str) -> str:
    """What the client prints."""
    done = subprocess.run(
        [sys.executable, str(CLI), f"127.0.0.1:{port}", *options],
        input=lines,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout


def test_the_example_opens_its_page_serves_the_client_and_drains_at_sigterm(folder: str, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {tmp_path}/opened\n")
    browser.chmod(0o755)
    with started(
        ["bash", "examples/serve.sh", folder], tmp_path / "log", BROWSER=f"{browser} %s", PYTHON=sys.executable
    ) as (process, port):
        until(
            lambda: (tmp_path / "opened").exists() and (tmp_path / "opened").read_text() == f"http://127.0.0.1:{port}\n"
        )
        said = asked(port, "3 1 4\n4\n3 1 4\nmany\n3 1 4\n9999\n")
        assert (
            "Megatron Response: \n3 1 4" in said
            and "'many' is no number of tokens" in said
            and "Error 400: " in said
            and "positions" in said
        )
        found: list[tuple[int, Any]] = []
        thread = threading.Thread(
            target=lambda: found.append(put(port, prompts=["3 1 4"] * 32, tokens_to_generate=8, top_k=1, stop_token=0))
        )
        thread.start()
        until(lambda: b"requests_total 33" in metrics(port))
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert found[0][0] == 200 and set(found[0][1]["reasons"]) <= {"length", "stop"} and process.wait(60) == 0
    assert "prompts" not in (tmp_path / "log").read_text() and "3 1 4" not in (tmp_path / "log").read_text()


def test_the_example_says_what_is_missing_before_there_is_anything_to_serve(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "serve.sh"), str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "examples/quickstart.sh" in done.stderr and str(tmp_path / "none") in done.stderr


def test_the_tool_serves_a_hybrid_though_room_is_short(tmp_path: Path) -> None:
    trained({**HYBRID, "seq_length": 64, "max_position_embeddings": 64}, str(tmp_path / "network"))
    loaded = load_network(str(tmp_path / "network"), GPT)
    engine = Engine(loaded.stages, loaded.tokenizer)
    texts = [tuple((7 * start + place) % 23 + 1 for place in range(30)) for start in range(5)]
    expected = [reply.ids for reply in engine.run([GenerationRequest(text, 20, SamplingParams(0.0)) for text in texts])]
    gigabytes = 100.5 * engine.metrics().bytes_per_token / 1e9  # two of the five
    tight = f"--inference-dynamic-batching-block-size 4 --inference-dynamic-batching-buffer-size-gb {gigabytes:.9f}"
    command = [sys.executable, str(TOOL), "--load", str(tmp_path / "network"), *tight.split()]
    with started(command, tmp_path / "log") as (_, port):
        words = [" ".join(map(str, text)) for text in texts]
        status, answer = put(port, prompts=words, tokens_to_generate=20, top_k=1)
        said = metrics(port).decode()
    assert status == 200 and [tuple(map(int, text.split()))[30:] for text in answer["text"]] == expected
    assert re.search(r"preemptions_total [1-9]", said) and re.search(r"state_bytes [1-9]", said), said


def test_the_tool_keeps_states_in_the_formats_that_it_is_told(tmp_path: Path) -> None:
    trained({**HYBRID, "seq_length": 64, "max_position_embeddings": 64}, str(tmp_path / "network"))
    loaded, text = load_network(str(tmp_path / "network"), GPT), tuple(range(1, 21))
    words = {"mamba_inference_conv_states_dtype": "bf16", "mamba_inference_ssm_states_dtype": "fp16"}
    whole, engine = (Engine(loaded.stages, loaded.tokenizer, InferenceConfig(**each)) for each in ({}, words))
    (expected,) = engine.run([GenerationRequest(text, 20, SamplingParams(0.0))])
    flags = [part for name, word in words.items() for part in (f"--{name.replace('_', '-')}", word)]
    command = [sys.executable, str(TOOL), "--load", str(tmp_path / "network"), *flags]
    with started(command, tmp_path / "log") as (_, port):
        status, answer = put(port, prompts=[" ".join(map(str, text))], tokens_to_generate=20, top_k=1)
        said = metrics(port).decode()
    assert status == 200 and tuple(map(int, answer["text"][0].split()))[20:] == expected.ids
    stored = engine.metrics().state_bytes
    assert stored == whole.metrics().state_bytes // 4 and re.search(rf"state_bytes {stored}\b", said), said


def metrics(port: int) -> bytes:
    """GET /metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    return connection.getresponse().read()


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_when_one_is_killed_their_launcher_starts_them_again(
    folder: str, tmp_path: Path
) -> None:
    loaded = load_network(folder, GPT)
    expected = [
        reply.ids
        for reply in Engine(loaded.stages, loaded.tokenizer).run(
            [GenerationRequest(prompt, 6, SamplingParams(0.0)) for prompt in ((3, 1, 4), (1,))]
        )
    ]
    launcher, log = (
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc_per_node", "2"],
        tmp_path / "two",
    )

    def answers(port: int) -> bool:
        status, answer = put(port, prompts=["3 1 4", "1"], tokens_to_generate=6, top_k=1)
        found = [
            tuple(map(int, text.removeprefix(prompt).split()))
            for text, prompt in zip(answer["text"], ("3 1 4", "1"), strict=True)
        ]
        return status == 200 and found == expected

    with started([*launcher, str(TOOL), "--load", folder, "--tensor-model-parallel-size", "2"], log) as (process, port):
        assert answers(port)
        ranks = [
            int(rank)
            for rank in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        ]
        follower = next(rank for rank in ranks if rank_of(rank) == "1")
        os.kill(follower, signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 10)
        said = log.read_text()
        assert (
            re.search(rf"RankLostError: rank 1 of 2 \(process {follower} on .*\) has ended", said)
            and "Traceback" not in said
        ), said
        until(lambda: log.read_text().count("serving at") == 2, 60)
        time.sleep(5)  # longer than a rank lives that is told of an old failure
        assert answers(int(re.findall(r"serving at http://127\.0\.0\.1:(\d+)", log.read_text())[1]))
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reward_model_is_served_with_its_scores_and_drained(tmp_path: Path, ranks: int) -> None:
    reward = saved(tmp_path / "reward", reward_head=True)
    model = RewardModel.load(reward, template="chatml")
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    expected = model.score(["2 + 2 = 4", "2 + 2 = 5", talk])
    launcher = [sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] * (ranks > 1)]
    command = [
        *launcher,
        str(TOOL),
        "--load",
        reward,
        "--chat-format",
        "chatml",
        "--tensor-model-parallel-size",
        str(ranks),
    ]
    with started(command, tmp_path / "log") as (process, port):
        found = [
            one
            for body in ({"input": ["2 + 2 = 4", "2 + 2 = 5"]}, {"messages": talk})
            for one in put(port, "/pooling", **body)[1]["data"]
        ]
        assert [one["data"][0] for one in found] == pytest.approx(expected, abs=1e-6)
        status, scored = put(port, "/v1/score", text_1="2?", text_2="4")
        assert status == 200 and scored["data"][0]["score"] == pytest.approx(expected[2], abs=1e-6)
        assert put(port, "/pooling", input="a" * 65)[0] == 400 and b"requests_total 4" in metrics(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 or ranks > 1, (tmp_path / "log").read_text()  # torchrun tells of its signal
    done = subprocess.run(
        [sys.executable, str(TOOL), "--load", reward, "--port", "0", "--draft", reward],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert (
        done.returncode != 0
        and "--draft: " in done.stderr
        and "holds a reward model, which writes no texts" in done.stderr
    )


def rank_of(process: int) -> str:
    """The rank that a launcher gave a process."""
    return dict(line.split("=", 1) for line in Path(f"/proc/{process}/environ").read_text().split("\0") if "=" in line)[
        "RANK"
    ]


@pytest.mark.nightly
def test_a_rank_that_is_killed_while_all_wait_is_named_though_no_launcher_ends_the_others(
    folder: str, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **ENVIRONMENT,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    command, logs = (
        [sys.executable, str(TOOL), "--load", folder, "--port", "0", "--tensor-model-parallel-size", "2"],
        [tmp_path / "0", tmp_path / "1"],
    )
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                ranks.append(
                    subprocess.Popen(
                        command,
                        stdout=file,
                        stderr=file,
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    )
                )
        until(lambda: "serving at" in logs[0].read_text() or ranks[0].poll() is not None, 90)
        ranks[1].kill()
        assert ranks[0].wait(10) != 0 and f"rank 1 of 2 (process {ranks[1].pid} on " in logs[0].read_text(), logs[
            0
        ].read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(30)


@pytest.mark.parametrize(
    "status, body, said",
    [
        (200, b'{"text": ["ab"]}', "Megatron Response: \nab"),
        (200, b"[]", "does not answer as"),
        (200, b"no", "does not answer as"),
        (400, b'{"message": "too long"}', "Error 400: too long"),
        (400, b'"too long"', "Error 400: too long"),
        (502, b"<html>", "Error 502: <html>"),
    ],
)
def test_the_client_reads_what_any_server_says(status: int, body: bytes, said: str, tmp_path: Path) -> None:
    heard: list[tuple[Any, str]] = []

    class Canned(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            heard.append(
                (json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.headers["Authorization"])
            )
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    (tmp_path / "token").write_text("secret\n")
    with HTTPServer(("127.0.0.1", 0), Canned) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert said in asked(server.server_port, "a\n2\n", "--token-file", str(tmp_path / "token"))
        thread.join(30)
    assert heard == [({"prompts": ["a"], "tokens_to_generate": 2}, "Bearer secret")]
