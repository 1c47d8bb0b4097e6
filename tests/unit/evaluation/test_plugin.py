"""lm-evaluation-harness's own command line with our model, on a stand-in for it (test_harness.py has the real one)."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron.core.config.flags.declare import ConfigError
from megatron.training.checkpoint.checkpointing import Checkpointer
from tests.helpers import lm_eval_stand_in, tiny
from tests.helpers.architecture import ROOT


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter over the stand-in."""
    lm_eval_stand_in.write(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "megatron.evaluation.harness", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("megatron.evaluation.harness")
    for name in [
        name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "megatron.evaluation.harness"
    ]:
        del sys.modules[name]


def test_each_rank_takes_a_device_of_its_own_where_lm_eval_names_its_default(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(device: str | None, ranks: int) -> torch.device | None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return harness.LmEvalModelArgs("folder", device=device).explicit_device

    for ranks in (1, 4):
        assert [place(device, ranks) for device in (None, "cuda", "cuda:0")] == [None] * 3, (
            "which pick_device() then chooses"
        )
        assert place("cpu", ranks) == torch.device("cpu")
    assert place("cuda:3", 1) == torch.device("cuda:3")
    with pytest.raises(ConfigError, match="device cuda:3: 4 ranks would share it"):
        place("cuda:3", 4)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment in which the package is installed, a checkpoint, and lm_eval's script."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [
            sys.executable,
            "setup.py",
            "-q",
            "build",
            "--build-base",
            str(folder / "base"),
            "--build-lib",
            str(folder / "lib"),
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    lm_eval_stand_in.write(site)
    others = [path for path in sys.path if path.endswith("-packages")]
    (site / "a_others.pth").write_text("\n".join([*others, str(folder / "lib")]), encoding="utf-8")
    (folder / "lib/megatron_lm_eval.pth").rename(site / "megatron_lm_eval.pth")
    (folder / "venv/bin/lm_eval").write_text(
        "from lm_eval.__main__ import cli_evaluate\ncli_evaluate()\n", encoding="utf-8"
    )
    config = tiny.config(
        1, num_layers=2, save=str(folder / "model"), tokenizer_type="NullTokenizer", vocab_size=tiny.VOCABULARY - 1
    )
    Checkpointer(tiny.trainer_of(tiny.run_of(config))).save()
    return folder


def said(folder: Path, *words: str) -> str:
    """What a command of the environment prints; `python` and `lm_eval` are its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGATRON_DEVICE")}
    done = subprocess.run(
        [str(folder / "venv/bin/python"), *words],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=240,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default is the GPU here")
def test_lm_evals_own_command_line_knows_the_model_once_the_package_is_installed(installed: Path) -> None:
    """Without a device: lm_eval then names a GPU, and this machine has none."""
    words = ("--model", "megatron", "--model_args", f"load={installed / 'model'}")
    found = json.loads(said(installed, str(installed / "venv/bin/lm_eval"), *words).splitlines()[-1])
    assert found["device"] == "cpu" and len(found["answers"]) == 3
    assert all(score < 0 for score, _ in found["answers"])


def test_no_other_programme_notices(installed: Path) -> None:
    assert (
        said(
            installed,
            "-c",
            "import sys; print(sorted(name for name in sys.modules if name[:8] in ('megatron', 'lm_eval')))",
        )
        == "[]\n"
    )
    assert said(installed, "-m", "lm_eval", "--help").startswith("usage: ")
