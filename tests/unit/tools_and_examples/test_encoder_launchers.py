"""Launchers of BERT and T5: their flags fit together, and the models have the sizes in their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.config.settings.run import RunConfig
from megatron.core.models.describe import count_parameters
from tests.helpers.architecture import ROOT
from tests.helpers.flags import parse_args_or_raise, run_config_of_args
from tests.unit.tools_and_examples.test_launchers import Command, bash, launch

LAUNCHERS = {
    "bert": "examples/bert/pretrain_bert_340m_distributed.sh",
    "t5": "examples/t5/pretrain_t5_220m_distributed.sh",
}
SMALL = {"bert": "examples/bert/pretrain_bert_small.sh", "t5": "examples/t5/pretrain_t5_small.sh"}
PATHS = ("checkpoints", "tensorboard", "vocab.txt", "corpus_text_sentence")


def read(command: Command, entry: str) -> RunConfig:
    """The checked config of the run."""
    assert command.entry == f"pretrain_{entry}.py" and (ROOT / command.entry).is_file()
    return run_config_of_args(
        parse_args_or_raise(command.flags, defaults={"architecture": entry}, world_size=command.ranks), command.ranks
    )


@pytest.mark.parametrize("machines", [1, 4])
@pytest.mark.parametrize("entry", LAUNCHERS)
def test_a_launchers_flags_fit_together_and_its_model_has_its_size(entry: str, machines: int, tmp_path: Path) -> None:
    more = ("--global-batch-size", str(1024 * machines)) if machines > 1 else ()
    command = launch(
        LAUNCHERS[entry], *PATHS, *more, "--seed", "7", folder=tmp_path, GPUS_PER_NODE="8", NUM_NODES=str(machines)
    )
    config = read(command, entry)
    assert command.ranks == 8 * machines and config.train.seed == 7
    assert (config.checkpoint.save, config.checkpoint.load, config.log.tensorboard_dir) == (
        PATHS[0],
        PATHS[0],
        PATHS[1],
    )
    assert (config.tokenizer.vocab_file, config.data.data_path) == (PATHS[2], (PATHS[3],))
    count = count_parameters(config.model.with_vocabulary(30522 if entry == "bert" else 28996 + 102, 1)).total
    assert count == pytest.approx({"bert": 340e6, "t5": 220e6}[entry], rel=0.025)


@pytest.mark.parametrize("entry", LAUNCHERS)
def test_a_launcher_without_its_arguments_says_what_it_needs(entry: str, tmp_path: Path) -> None:
    done = bash([str(ROOT / LAUNCHERS[entry])], tmp_path)
    assert done.returncode == 2
    assert f"bash {LAUNCHERS[entry]} CHECKPOINTS" in done.stderr and "LAUNCH=echo" in done.stderr


@pytest.mark.parametrize("entry", SMALL)
def test_the_small_runs_need_nothing_but_the_repository(entry: str, tmp_path: Path) -> None:
    config = read(launch(SMALL[entry], folder=tmp_path), entry)
    assert (
        Path(config.tokenizer.vocab_file).is_file() and config.model.num_layers <= 4 and config.model.hidden_size <= 256
    )
