"""What would be started: the words of a run's command, as a setting that rules can look at.

--num-layers 12 ...                                                          flags alone, on one rank
torchrun --nproc_per_node 8 --nnodes 2 pretrain_bert.py --num-layers 12 ...  a BERT on 16 ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.cli.arguments import missing_hybrid_pattern_problems, parse_args_unchecked
from megatron.core.config.flags.declare import ConfigError, config_from_namespace
from megatron.core.config.plan.stages import stage_specs_of_run
from megatron.core.config.settings.data import DataFiles
from megatron.core.config.settings.run import RequestedRun, RunConfig
from megatron.core.models.flops import estimate_memory_by_pipeline_rank
from megatron.plan.analytic_estimate import num_microbatches
from megatron.plan.setup import BrokenRule, RunSetup
from megatron.preference.arguments import preference_flag_defaults as preference_defaults
from megatron.preference.arguments import preference_flag_problems
from megatron.preference.planned_memory import reference_network_memory as preference_memory
from megatron.preference.settings import PreferenceConfig
from megatron.rl.arguments import no_training_ranks_message, num_training_ranks, rl_flag_problems
from megatron.rl.arguments import rl_flag_defaults as rl_defaults
from megatron.rl.planned_memory import (
    generation_rank_memory,
    memory_beside_policy,
    memory_problem,
    run_does_not_fit_message,
)
from megatron.rl.settings import RLConfig

MemoryBeside = Callable[[RunConfig, int], Mapping[str, float]]
MemoryProblem = Callable[[RunConfig, int, float], str]


def _no_extra_rank_memory(config: RunConfig, world_size: int) -> Mapping[str, float]:
    """Return nothing: most scripts hold nothing beside the network in training."""
    return {}


def _training_memory_problem(config: RunConfig, world_size: int, memory: float) -> str:
    """Return why the network in training cannot fit into `memory` bytes a rank, or ""."""
    ranks = estimate_memory_by_pipeline_rank(
        config,
        stage_specs_of_run(config),
        data_parallel_size=config.parallel.data_parallel_size(world_size),
        num_microbatches=num_microbatches(config, world_size),
    )
    needs = max(rank.total for rank in ranks)
    return run_does_not_fit_message({"network in training": needs}, memory) if needs > memory else ""


@dataclass(frozen=True, slots=True)
class EntryScript:
    """What is known of an entry script. defaults: values of flags that are not given, from the words of a command line;
    extra: its own config classes. problems: (namespace, ranks) -> what is wrong with its own flags, a line each.
    beside: namespace -> function of (config, ranks) that gives the bytes that a rank holds beside the network in
    training. apart: the same for a rank that does not train. memory: namespace -> function of (config, ranks, device
    bytes) that says why it cannot fit. ranks: (words, ranks of the job) -> ranks that train. reads_data: how it reads
    the data that the flags name. passes: namespace -> forward passes without gradients over each step's samples.
    """

    defaults: Callable[[Sequence[str]], Mapping[str, Any]]
    extra: tuple[type, ...] = ()
    problems: Callable[[Any, int], Sequence[str]] = lambda args, ranks: ()
    beside: Callable[[Any], MemoryBeside] = lambda args: _no_extra_rank_memory
    apart: Callable[[Any], MemoryBeside] = lambda args: _no_extra_rank_memory
    memory: Callable[[Any], MemoryProblem] = lambda args: _training_memory_problem
    ranks: Callable[[Sequence[str], int], int] = lambda words, ranks: ranks
    reads_data: DataFiles = "datasets"
    passes: Callable[[Any], int] = lambda args: 0


ENTRIES: Mapping[str, EntryScript] = {
    "pretrain_gpt.py": EntryScript(lambda words: {"tokenizer_type": "GPT2BPETokenizer"}),
    "pretrain_hybrid.py": EntryScript(
        lambda words: {"tokenizer_type": "GPT2BPETokenizer"}, problems=missing_hybrid_pattern_problems
    ),
    "pretrain_mamba.py": EntryScript(
        lambda words: {"tokenizer_type": "GPT2BPETokenizer"}, problems=missing_hybrid_pattern_problems
    ),
    "pretrain_bert.py": EntryScript(lambda words: {"architecture": "bert", "tokenizer_type": "BertWordPieceLowerCase"}),
    "pretrain_t5.py": EntryScript(lambda words: {"architecture": "t5", "tokenizer_type": "BertWordPieceLowerCase"}),
    "pretrain_vlm.py": EntryScript(
        lambda words: {"tokenizer_type": "HuggingFaceTokenizer", "vision_model_type": "clip", "sft": True}
    ),
    "pretrain_vision_classify.py": EntryScript(
        lambda words: {"tokenizer_type": "NullTokenizer", "vocab_size": 2, "architecture": "vit", "seq_length": 1}
    ),
    "finetune.py": EntryScript(
        preference_defaults,
        (PreferenceConfig,),
        preference_flag_problems,
        lambda args: partial(preference_memory, config_from_namespace(PreferenceConfig, args)),
        reads_data="lines",
        passes=lambda args: config_from_namespace(PreferenceConfig, args).num_scoring_passes,
    ),
    "train_rl.py": EntryScript(
        rl_defaults,
        (RLConfig,),
        rl_flag_problems,
        lambda args: partial(memory_beside_policy, config_from_namespace(RLConfig, args)),
        lambda args: partial(generation_rank_memory, config_from_namespace(RLConfig, args)),
        lambda args: partial(memory_problem, config_from_namespace(RLConfig, args)),
        num_training_ranks,
    ),
}
# Scripts of Megatron, and what does their work here.
ELSEWHERE: Mapping[str, str] = {
    "gpt_static_inference.py": "megatron generate continues texts",
    "gpt_dynamic_inference.py": "megatron generate continues texts",
    "gpt_dynamic_inference_with_coordinator.py": "tools/run_text_generation_server.py serves a network on many ranks",
    "run_text_generation_server.py": "its own --help lists the flags of the server",
    "pretrain_hybrid_flex.py": "pretrain_hybrid.py trains networks of a --hybrid-layer-pattern",
    "main.py": "flags of tasks are looked at when tasks/main.py starts",
}


@dataclass(frozen=True, slots=True)
class ParsedTrainingCommand:
    """A parsed run command. setting: None if nothing could be read. unread: problems with flags, which are left out of
    the setting.
    messages: flags understood in another way, or accepted although they change nothing. finetuning: of finetune.py.
    """

    setting: RunSetup | None
    unread: tuple[BrokenRule, ...]
    messages: tuple[str, ...] = ()
    beside: MemoryBeside = _no_extra_rank_memory
    apart: MemoryBeside = _no_extra_rank_memory
    memory: MemoryProblem = _training_memory_problem
    finetuning: PreferenceConfig | None = None

    @property
    def broken_rules(self) -> tuple[BrokenRule, ...]:
        """Problems with its flags, and every rule that the setting breaks."""
        return (*self.unread, *(self.setting.find_broken_rules() if self.setting else ()))


def split_launch_command(words: Sequence[str], entry: str = "pretrain_gpt.py") -> tuple[list[str], str, list[str]]:
    """Return (the launcher's words, the entry script, its flags) of a command; flags alone are those of `entry`."""
    if (named := _find_entry_script(words)) is None:
        return [], entry, list(words)
    start, end, script = named
    return list(words[:start]), script, list(words[end:])


def _find_entry_script(words: Sequence[str]) -> tuple[int, int, str] | None:
    """Return (start, end, script) of the words that name an entry script, by its file or by its verb (megatron pretrain-gpt)."""
    for start, word in enumerate(words):
        name, end = Path(word).name, start + 1
        if name == "megatron" and words[end:]:
            name, end = f"megatron-{words[end]}", end + 1
        script = f"{name.removeprefix('megatron-').replace('-', '_')}.py" if name.startswith("megatron-") else name
        if script in ENTRIES:
            return start, end, script
    return None


def parse_training_command(
    words: Sequence[str], *, ranks: int | None = None, entry: str = "pretrain_gpt.py"
) -> ParsedTrainingCommand:
    """Parse a command, or flags alone, which are those of `entry`. ranks: instead of what the launcher's words say.
    Raises nothing for what is wrong with it.
    """
    if (stranger := _name_of_unknown_script(words)) is not None:
        other = ELSEWHERE.get(stranger, f"the scripts that train are {', '.join(ENTRIES)}")
        return ParsedTrainingCommand(
            None, (BrokenRule("command-line", f"{stranger} is not a script whose flags are known here: {other}"),)
        )
    launcher, entry, flags = split_launch_command(words, entry)
    script = ENTRIES[entry]
    job = _num_ranks_from_torchrun_flags(launcher) if ranks is None else ranks
    ranks = script.ranks(flags, job)
    if ranks < 1:
        return ParsedTrainingCommand(None, (BrokenRule(entry, no_training_ranks_message(job)),))
    try:
        args = parse_args_unchecked(flags, defaults=script.defaults(flags), extra=script.extra)
    except ConfigError as error:
        return ParsedTrainingCommand(
            None, tuple(BrokenRule("command-line", line.strip()) for line in str(error).splitlines())
        )
    own = [] if args.problems else script.problems(args, ranks)
    return ParsedTrainingCommand(
        RunSetup(
            config_from_namespace(RequestedRun, args),
            ranks,
            reads_data=script.reads_data,
            passes=script.passes(args),
            origins=args.origins,
        ),
        (
            *(BrokenRule("command-line", problem) for problem in dict.fromkeys(args.problems)),
            *(BrokenRule(entry, problem) for problem in own),
        ),
        tuple(args.messages),
        script.beside(args),
        script.apart(args),
        script.memory(args),
        config_from_namespace(PreferenceConfig, args) if PreferenceConfig in script.extra else None,
    )


def _name_of_unknown_script(words: Sequence[str]) -> str | None:
    """Return the script that a whole command starts if it is none of `ENTRIES`, else None."""
    script = next((word for word in words if word.endswith(".py")), None)
    whole = bool(words) and not words[0].startswith("-")
    return Path(script).name if script and whole and _find_entry_script(words) is None else None


def _num_ranks_from_torchrun_flags(launcher: Sequence[str]) -> int:
    """Return the number of ranks that torchrun's words ask for; 1 for what they leave open, such as `gpu`."""
    words = [part for word in launcher for part in word.replace("_", "-").split("=", 1)]
    given = {name: value for name, value in zip(words, words[1:]) if name in ("--nproc-per-node", "--nnodes")}
    counts = [value.rpartition(":")[2] for value in given.values()]  # 2:4 machines are at most 4
    return math.prod(int(count) for count in counts if count.isdecimal())
