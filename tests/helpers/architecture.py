"""The rules of the code base, read from the syntax trees: layers, imports, state, sizes, signatures. Nothing is imported.

A rule is a function from the files of a tree to its offences: path, line, what is wrong and what to do. The table RULES
at the end names them all; `tests/test_architecture.py` runs them over the repository.

    layer 15  tools/  examples/
    layer 14  megatron/cli/commands/  megatron/__main__.py
    layer 13  megatron/verify/
    layer 12  megatron/plan/
    layer 11  pretrain_*.py  finetune.py  train_rl.py  tasks/
    layer 10  megatron/rl/  megatron/preference/
    layer 9   megatron/evaluation/
    layer 8   megatron/cli/
    layer 7   megatron/training/  megatron/inference/
    layer 6   megatron/adapters/  megatron/megatron_lm/checkpoint/
    layer 5   core/models/, and above it core/families/
    layer 4   core/transformer/  core/optimizer/
    layer 3   core/{tensor,context,pipeline}_parallel/  core/distributed/  core/dist_checkpointing/  core/datasets/
    layer 2   core/parallel/  core/kernels/  core/tokenizers/
    layer 1   core/config/
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron", "tasks", "tools", "examples", "tests", "benchmarks", "docs", ".ci")
SUFFIXES = (".py", ".sh", ".sbatch", ".md", ".txt", ".ini", ".cfg", ".toml", ".yaml", ".yml")

LAYERS = (
    ("megatron", "megatron/core"),
    ("core/config",),
    ("core/parallel", "core/kernels", "core/tokenizers"),
    (
        "core/tensor_parallel",
        "core/context_parallel",
        "core/pipeline_parallel",
        "core/distributed",
        "core/dist_checkpointing",
        "core/datasets",
        "core/parallel_state",
    ),
    ("core/transformer", "core/optimizer"),
    ("core/models",),
    ("core/families",),
    ("adapters", "megatron_lm", "megatron_lm/checkpoint"),
    ("training", "inference"),
    ("cli",),
    ("evaluation",),
    ("rl", "preference"),  # reward models score answers
    ("entries", "tasks"),
    ("plan",),  # simulates what the entries train
    ("verify",),
    ("cli/commands", "__main__"),
    ("tools", "examples"),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
SEPARATE = (
    ("core/models", "core/optimizer"),
    ("core/optimizer", "core/models"),
    ("training", "inference"),
    ("inference", "training"),
)

# What a network's optimizer state weighs, its update rules say.
KNOWN_TO = (
    ("megatron/core/models/flops.py", "megatron/core/optimizer/optimizer.py"),
    ("megatron/core/models/flops.py", "megatron/core/optimizer/rule.py"),
)

SHIMS = ("megatron/core/parallel_state.py", "megatron/training/global_vars.py")
LATE_IMPORTS = (
    "megatron/core/kernels/",
    "megatron/core/tokenizers/",
    "megatron/training/hooks/writers.py",
    "megatron/core/families/hf.py",
    "megatron/core/datasets/samplers.py",
    "megatron/core/datasets/storage.py",
    "megatron/cli/commands/inspect_dataset.py",
    "megatron/rl/environments/math_problems.py",
    "megatron/rl/ray_ranks.py",
    "megatron/cli/verbs.py",  # one command of many, by its name
    *(f"megatron/core/datasets/ingest/{name}.py" for name in ("columns", "lines", "sentences")),
)
# Parts of ours that may come late: the command line is read before torch is imported, DTensor only with FSDP2, and what reads or
# writes checkpoints of others, the engine and trials of kernels only in a run that needs them.
LATE_OWN = (
    ("megatron/training/state/trainer.py", "megatron.core.distributed.fsdp.FullySharded"),
    ("megatron/cli/arguments.py", "megatron.training.checkpoint.foreign_settings.foreign_checkpoint_settings"),
    ("megatron/cli/arguments.py", "megatron.training.checkpoint.adapters.adapter_config_of"),
    ("megatron/cli/arguments.py", "megatron.megatron_lm.checkpoint.open.read_megatron_arguments"),
    ("megatron/cli/preflight.py", "megatron.cli.device_checks.unsupported_by_machine"),
    ("megatron/cli/preflight.py", "megatron.cli.device_checks.device_type"),
    ("megatron/cli/arguments.py", "megatron.cli.preflight.check_arguments"),
    ("megatron/core/models/flops.py", "megatron.core.optimizer.optimizer.update_rule_named"),
    ("megatron/training/checkpoint/formats.py", "megatron.core.dist_checkpointing.saved.open_native_checkpoint"),
    ("megatron/training/checkpoint/formats.py", "megatron.core.families.hf"),
    ("megatron/training/checkpoint/formats.py", "megatron.megatron_lm.checkpoint.open.open_megatron_checkpoint"),
    ("megatron/megatron_lm/checkpoint/folders.py", "megatron.megatron_lm.checkpoint.torch_dist.is_fsdp_index"),
    ("megatron/training/checkpoint/checkpointing.py", "megatron.training.checkpoint.export.export_hf_with_tokenizer"),
    ("megatron/core/kernels/choice/startup_check.py", "megatron.core.kernels.choice.kernel_check"),
    ("megatron/training/checkpoint/checkpointing.py", "megatron.training.checkpoint.adapters.open_adapters"),
    ("megatron/adapters/saved.py", "megatron.core.families.hf.hf_vocabulary_rows"),
    ("pretrain_gpt.py", "megatron.inference.eval_generate"),
    ("megatron/core/models/describe.py", "megatron.core.models.on_meta.rank_parameter_sizes"),
    ("megatron/tasks/main.py", "megatron.tasks.run.run_task"),
    (
        "megatron/cli/commands/checkpoint/inspect.py",
        "megatron.verify.compare.foreign_contents.foreign_checkpoint_contents",
    ),
    ("megatron/cli/commands/check_config.py", "megatron.plan.simulate.layout_build_check.check_layout_parameters"),
    ("megatron/cli/commands/check_parity.py", "megatron.verify.parity.serial_comparison.run_layout_parity_check"),
    ("megatron/cli/commands/plan.py", "megatron.plan.simulate.dry_run.dry_run"),
    ("megatron/cli/commands/plan.py", "megatron.plan.simulate.one_microbatch.layer_runner"),
    ("megatron/cli/commands/plan.py", "megatron.plan.measure.measure_hardware"),
)
FLAG_READERS = (
    "megatron/core/config/flags/declare.py",
    "megatron/cli/arguments.py",
    "megatron/cli/help.py",
    "megatron/cli/verbs.py",
    "megatron/cli/former_names.py",
    "megatron/cli/preflight.py",
    "megatron/training/global_vars.py",
    "megatron/rl/arguments.py",
    "megatron/preference/arguments.py",
    "megatron/cli/tool_parser.py",
)
CUDA_CALLERS = ("megatron/core/parallel/device.py", "megatron/core/kernels/")
ENVIRONMENT_READERS = (
    "megatron/core/parallel/device.py",
    "megatron/training/initialize.py",
    "megatron/training/launch/launch_info.py",
    "megatron/core/datasets/template_sandbox.py",  # to start a process that sees as little as possible of it
)
MAX_COMPLEXITY, HIGH_COMPLEXITY, MANY = 20, 15, 10
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 720, 80, 8
CHANGING = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "clear",
    "remove",
    "discard",
    "sort",
    "reverse",
    "appendleft",
    "popleft",
    "__setitem__",
}
TENSOR = re.compile(r"\b(Tensor|ndarray)\b")
SHAPE = re.compile(r"\[[^\])]*[\])]|[Aa]ny shape|same shape|[Ss]calar|See `")
MACHINE_PATH = re.compile(r"(?<![\w.$}>])/(?:work|tmp|home|root|Users)/\w")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Offences = Iterator[tuple[str, int, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """One text file of the tree. syntax: the nodes of a Python file; of other files nothing."""

    path: str
    text: str
    syntax: ast.Module

    @property
    def is_python(self) -> bool:
        """Whether the syntax tree says anything."""
        return self.path.endswith(".py")

    @property
    def is_test(self) -> bool:
        """Whether the file belongs to the tests or benchmarks, which may do more than the product."""
        return self.path.startswith(("tests/", "benchmarks/"))

    @property
    def package(self) -> str | None:
        """The package the file belongs to, as LAYERS names it; None for tests and setup.py."""
        parts = self.path.removesuffix(".py").split("/")
        if parts[0] == "megatron":
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            if len(parts) < 3 and "/".join(parts) in LAYER_OF:
                return "/".join(parts)
            if parts[1:3] == ["cli", "commands"] or parts[1:2] in (["core"], ["megatron_lm"]):
                return "/".join(parts[1:3])
            return "".join(parts[1:2])
        if len(parts) == 1:
            return "entries" if parts[0].startswith(("pretrain_", "train_", "finetune")) else None
        return parts[0] if parts[0] in LAYER_OF else None

    def at(self, *places: str) -> bool:
        """Whether the file is one of these, or lies in one of these folders."""
        return any(self.path == place or (place.endswith("/") and self.path.startswith(place)) for place in places)

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """All nodes of these kinds."""
        return (node for node in ast.walk(self.syntax) if isinstance(node, kinds))


Tree = Mapping[str, Source]


def tree_of(texts: Mapping[str, str]) -> Tree:
    """The sources of a tree given as path -> text."""
    return {path: Source(path, text, ast.parse(text if path.endswith(".py") else "")) for path, text in texts.items()}


def repository(folders: Iterable[str] = FOLDERS) -> Tree:
    """Every text file of these folders and beside them that people write; data and what runs left behind are not."""
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in folders:
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return tree_of(
        {
            name: path.read_text(encoding="utf-8")
            for name, path in sorted(found.items())
            if (path.suffix in SUFFIXES or name.startswith(".ci/")) and not name.startswith("examples/data/")
        }
    )


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; an empty string for anything else."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> list[str]:
    """The dotted names that an import statement asks for: `from a import b` gives a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return []


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports."""
    for node in source.nodes(ast.Import, ast.ImportFrom):
        for name in imported(node):
            yield node.lineno, name


def target(tree: Tree, name: str) -> str | None:
    """The file of ours that an imported name leads to; None for the packages of others."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:length])
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in tree:
                return path
    return None


def arrows(tree: Tree) -> Iterator[tuple[Source, int, Source]]:
    """(importing file, line, imported file) for every import between files of ours."""
    for source in tree.values():
        for line, name in imports(source):
            path = target(tree, name)
            if path is not None and path != source.path:
                yield source, line, tree[path]


def imports_go_down(tree: Tree) -> Offences:
    """A package imports only from the layers below it."""
    for source, line, other in arrows(tree):
        if source.package is None or source.package == other.package:
            continue
        if other.package is None:
            yield source.path, line, f"the product does not import {other.path}"
        elif LAYER_OF[source.package] <= LAYER_OF[other.package]:
            yield (
                source.path,
                line,
                (
                    f"{source.package} (layer {LAYER_OF[source.package]}) imports {other.path} "
                    f"(layer {LAYER_OF[other.package]}); only lower layers are open to it"
                ),
            )


def every_file_has_a_layer(tree: Tree) -> Offences:
    """A file of the product stands in a package that LAYERS knows; setup.py and what builds the documentation need none."""
    for source in tree.values():
        if (
            source.is_python
            and not source.is_test
            and not source.at("setup.py", "docs/")
            and source.package not in LAYER_OF
        ):
            yield source.path, 1, f"no layer is known for {source.package or 'this place'}; see the table of layers"


def separate_packages_stay_separate(tree: Tree) -> Offences:
    """Models and optimizer, but for the bytes of its state, training and inference do not know each other; families
    know configs, boxes, checkpoints and what describes a network."""
    for source, line, other in arrows(tree):
        if (source.package, other.package) in SEPARATE and (source.path, other.path) not in KNOWN_TO:
            yield (
                source.path,
                line,
                f"{source.package} and {other.package} do not know each other, but this imports {other.path}",
            )
        if (
            source.package == "core/families"
            and other.package not in ("core/families", "core/config", "core/dist_checkpointing")
            and (
                other.path
                not in (
                    "megatron/core/parallel/boxes.py",
                    "megatron/core/models/describe.py",
                    "megatron/core/models/parameter_names.py",
                )
            )
        ):
            yield (
                source.path,
                line,
                f"families know configs, boxes, checkpoints and what describes a network, not {other.path}",
            )


def files_form_no_cycle(tree: Tree) -> Offences:
    """No file imports itself by way of others."""
    next_files: dict[str, dict[str, int]] = {path: {} for path in tree}
    for source, line, other in arrows(tree):
        next_files[source.path].setdefault(other.path, line)
    done: set[str] = set()
    for start in tree:
        flight_recorder: list[tuple[str, Iterator[str]]] = (
            [(start, iter(next_files[start]))] if start not in done else []
        )
        while flight_recorder:
            path, rest = flight_recorder[-1]
            on_trail = [step for step, _ in flight_recorder]
            following = next(rest, None)
            if following is None:
                done.add(path)
                flight_recorder.pop()
            elif following in on_trail:
                circle = [*on_trail[on_trail.index(following) :], following]
                yield path, next_files[path][following], f"a circle of imports: {' -> '.join(circle)}"
            elif following not in done:
                flight_recorder.append((following, iter(next_files[following])))


def imports_stand_at_the_top(tree: Tree) -> Offences:
    """Imports stand at module level and name whole paths; optional packages of others may come late in a few files."""
    for source in tree.values():
        ours_are_late = not source.at(*LATE_IMPORTS)
        for function in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            for node in ast.walk(function):
                for name in imported(node):
                    if (
                        not source.is_test
                        and (ours_are_late or name.startswith("megatron"))
                        and (source.path, name) not in LATE_OWN
                    ):
                        yield source.path, node.lineno, f"the import of {name} belongs to the top of the file"
        for line, name in imports(source):
            if name.startswith("."):
                yield source.path, line, f"write the whole path instead of {name}"
        for node in source.nodes(ast.Call):
            if (
                dotted(node.func) in ("importlib.import_module", "import_module", "__import__")
                and ours_are_late
                and not source.is_test
            ):
                yield source.path, node.lineno, "an import by string hides an arrow; use an import statement"


def flags_are_read_where_they_may_be(tree: Tree) -> Offences:
    """argparse, sys.argv and Namespace are for the parser, the handle of a run, and scripts with a main of their own."""
    for source in tree.values():
        has_main = source.package in ("entries", "tasks", "cli/commands", "tools", "examples") and any(
            isinstance(node, ast.FunctionDef) and node.name == "main" for node in source.syntax.body
        )
        if source.is_test or has_main or source.at(*FLAG_READERS):
            continue
        for line, name in imports(source):
            if name.split(".")[0] == "argparse" or name == "sys.argv":
                yield source.path, line, f"{name} belongs to the parser or a script's own main"
        for node in source.nodes(ast.Attribute, ast.Name):
            if dotted(node) in ("sys.argv", "Namespace"):
                yield source.path, node.lineno, f"{dotted(node)} belongs to the parser or a script's own main"


def global_state_stays_in_the_shims(tree: Tree) -> Offences:
    """The statement `global` stands in the two shims only, and only initialize.py imports those."""
    for source in tree.values():
        if not source.at(*SHIMS):
            for node in source.nodes(ast.Global):
                yield source.path, node.lineno, f"global {', '.join(node.names)}: pass the value instead"
    for source, line, other in arrows(tree):
        if other.path in SHIMS and not source.is_test and source.path != "megatron/training/initialize.py":
            yield source.path, line, f"{other.path} is for users' scripts; take what you need from the run or the mesh"


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names that these nodes give a value to, inside functions too."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                yield inner.id
            elif isinstance(inner, ast.arg):
                yield inner.arg
            elif isinstance(inner, (ast.Import, ast.ImportFrom)):
                yield from (alias.asname or alias.name.split(".")[0] for alias in inner.names)


def module_names(source: Source) -> set[str]:
    """Names that belong to the module: its variables, functions, classes, and what it took from our other files."""
    names: set[str] = set()
    for node in source.syntax.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names.update(bound_names(node.targets if isinstance(node, ast.Assign) else [node.target]))
    return names


def changed_names(node: ast.AST) -> Iterator[str]:
    """Names whose value a statement changes in place: an item or attribute set or deleted, a changing method called."""
    if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
        inner: ast.AST = node.value
        while isinstance(inner, (ast.Attribute, ast.Subscript)):
            inner = inner.value
        yield dotted(inner)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        yield dotted(node.func.value)


def module_names_keep_their_values(tree: Tree) -> Offences:
    """Nothing at module level is bound twice, and nothing bound there is changed by a function."""
    for source in tree.values():
        if source.at(*SHIMS):
            continue
        seen: set[str] = set()
        for node in source.syntax.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                again = seen.intersection(
                    name
                    for part in targets
                    if not isinstance(part, (ast.Attribute, ast.Subscript))
                    for name in bound_names([part])
                )
                for name in sorted(again):
                    yield source.path, node.lineno, f"{name} is bound a second time at module level"
                seen.update(bound_names(targets))
        owned = module_names(source)
        for function in outer_functions(source.syntax):
            local = set(bound_names([function]))
            for node in ast.walk(function):
                for name in changed_names(node):
                    if name in owned - local:
                        yield (
                            source.path,
                            node.lineno,
                            f"{name} belongs to the module and is changed here; pass or return it",
                        )


def outer_functions(node: ast.AST) -> Iterator[Function]:
    """Functions of a module and methods of its classes, without those inside other functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        else:
            yield from outer_functions(child)


def cuda_is_behind_the_device(tree: Tree) -> Offences:
    """torch.cuda and .cuda( appear in parallel/device.py and kernels/ only."""
    for source in tree.values():
        if source.is_test or source.at(*CUDA_CALLERS):
            continue
        for line, name in imports(source):
            if name.startswith("torch.cuda"):
                yield source.path, line, f"{name}: ask core/parallel/device.py"
        for node in source.nodes(ast.Attribute):
            if dotted(node) == "torch.cuda":
                yield source.path, node.lineno, "torch.cuda: ask core/parallel/device.py"
        for node in source.nodes(ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                yield source.path, node.lineno, ".cuda(): use .to(device)"


def environment_is_read_once(tree: Tree) -> Offences:
    """Environment variables are read in training/launch/launch_info.py, training/initialize.py and parallel/device.py only."""
    for source in tree.values():
        if source.is_test or source.at(*ENVIRONMENT_READERS):
            continue
        found = [(node.lineno, dotted(node)) for node in source.nodes(ast.Attribute)]
        for line, name in [*found, *imports(source)]:
            if name in ("os.environ", "os.getenv", "os.putenv", "os.environb"):
                yield source.path, line, f"{name}: take the value from the run or the device"


def files_and_functions_fit_a_reader(tree: Tree) -> Offences:
    """At most 720 lines a file, 80 a function, 8 parameters beside self."""
    for source in tree.values():
        lines = source.text.count("\n")
        if source.is_python and lines > MAX_FILE_LINES:
            yield source.path, lines, f"{lines} lines; at most {MAX_FILE_LINES}"
        for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            # A kernel of Triton is given every pointer, stride and size by itself, one a line.
            is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            first = node.body[0].lineno if is_kernel else first
            if node.end_lineno - first + 1 > MAX_FUNCTION_LINES:
                yield (
                    source.path,
                    node.lineno,
                    f"{node.name} has {node.end_lineno - first + 1} lines; at most {MAX_FUNCTION_LINES}",
                )
            count = len([name for name in parameters(node) if name.arg not in ("self", "cls")])
            if count > MAX_PARAMETERS and not is_kernel:
                yield source.path, node.lineno, f"{node.name} takes {count} parameters; at most {MAX_PARAMETERS}"


def few_functions_branch_much(tree: Tree) -> Offences:
    """Cyclomatic complexity of the product's functions: none above 20, at most ten above 15."""
    high = []
    for source in tree.values():
        if not source.is_python or source.is_test:
            continue
        for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            if (branches := complexity(node)) > HIGH_COMPLEXITY:
                high.append((source.path, node.lineno, f"{node.name} has a complexity of {branches}"))
            if branches > MAX_COMPLEXITY:
                yield source.path, node.lineno, f"{node.name} has a complexity of {branches}; at most {MAX_COMPLEXITY}"
    if len(high) > MANY:
        for path, line, says in high:
            yield path, line, f"{says}; at most {MANY} functions may be above {HIGH_COMPLEXITY}, and {len(high)} are"


def complexity(function: Function) -> int:
    """McCabe's number: one, and one for each branch, loop, handler, condition of a comprehension and operand that is left out early.

    Functions inside are counted for themselves.
    """
    count, open_nodes = 1, list(ast.iter_child_nodes(function))
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        open_nodes += ast.iter_child_nodes(node)
        if isinstance(node, (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def parameters(function: Function) -> list[ast.arg]:
    """All parameters of a function, of every kind."""
    kinds = function.args
    starred = [argument for argument in (kinds.vararg, kinds.kwarg) if argument]
    return [*kinds.posonlyargs, *kinds.args, *kinds.kwonlyargs, *starred]


def asserts_say_what_we_believed(tree: Tree) -> Offences:
    """An assert outside the tests carries a message."""
    for source in tree.values():
        for node in source.nodes(ast.Assert):
            if node.msg is None and not source.is_test:
                yield source.path, node.lineno, "an assert without a message; say what we believed"


def signatures_are_annotated(tree: Tree) -> Offences:
    """Every parameter and every result has a type."""
    for source in tree.values():
        for node in source.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
            bare = [
                name.arg for name in parameters(node) if name.annotation is None and name.arg not in ("self", "cls")
            ]
            if node.returns is None:
                bare.append("its result")
            if bare and not source.is_test:
                yield source.path, node.lineno, f"{node.name} has no type for {', '.join(bare)}"


def public_things_have_a_docstring(tree: Tree) -> Offences:
    """Every file of the product, and every public class, function and method of megatron/, says what it is for."""
    for source in tree.values():
        if source.is_python and not source.is_test and ast.get_docstring(source.syntax) is None:
            yield source.path, 1, "the file does not say what it is for"
        if not source.path.startswith("megatron/"):
            continue
        public = list(public_definitions(source.syntax))
        for node in public:
            if ast.get_docstring(node) is None:
                yield source.path, node.lineno, f"{node.name} has no docstring"


def tensors_have_shapes(tree: Tree) -> Offences:
    """Public functions of megatron/ that take or return tensors name their shapes: `[s, b, h]`, "any shape", or "scalar"."""
    for source in tree.values():
        if not source.path.startswith("megatron/"):
            continue
        for node in public_definitions(source.syntax):
            if isinstance(node, ast.ClassDef):
                continue
            signature = f"{ast.unparse(node.args)} {ast.unparse(node.returns) if node.returns else ''}"
            text = ast.get_docstring(node) or ""
            if TENSOR.search(signature) and not SHAPE.search(text):
                yield source.path, node.lineno, f"{node.name}: the docstring names no shape of its tensors"


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public classes, functions and methods; a special method such as __init__ explains itself."""
    for child in node.body:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


def paths_of_one_machine_stay_out(tree: Tree) -> Offences:
    """No file names a folder that exists on one machine only."""
    for source in tree.values():
        for number, line in enumerate(source.text.splitlines(), start=1):
            found = MACHINE_PATH.search(line)
            if found:
                yield source.path, number, f"a path of one machine: {line.strip()[:80]}"


def text_is_ascii(tree: Tree) -> Offences:
    """Files hold ASCII only; write other characters as escapes."""
    for source in tree.values():
        for number, line in enumerate(source.text.splitlines(), start=1):
            if not line.isascii():
                yield source.path, number, f"not ASCII: {ascii(line.strip()[:80])}"


def files_are_loaded_as_data(tree: Tree) -> Offences:
    """torch.load says weights_only=True: a checkpoint must not be able to run code."""
    for source in tree.values():
        for node in source.nodes(ast.Call):
            safe = any(
                word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
                for word in node.keywords
            )
            if dotted(node.func) == "torch.load" and not safe:
                yield source.path, node.lineno, "torch.load without weights_only=True can run code from the file"


def errors_are_caught_by_name(tree: Tree) -> Offences:
    """No `except:` without a kind of error."""
    for source in tree.values():
        for node in source.nodes(ast.ExceptHandler):
            if node.type is None:
                yield source.path, node.lineno, "a bare except hides what happened; name the error"


PYPI_NAME = re.compile(r"pip install (?:-\S+ )*['\"]?megatron(?![-\w])")


def the_package_is_installed_from_its_checkout(tree: Tree) -> Offences:
    """The name megatron belongs to a stranger on PyPI: docs and errors say pip install '.[extra]', or name the package that is missing."""
    for source in tree.values():
        for number, line in enumerate(source.text.splitlines(), start=1):
            if PYPI_NAME.search(line) and not source.is_test:
                yield source.path, number, f"this installs a stranger's package: {line.strip()[:80]}"


RULES: tuple[Callable[[Tree], Offences], ...] = (
    imports_go_down,
    every_file_has_a_layer,
    separate_packages_stay_separate,
    files_form_no_cycle,
    imports_stand_at_the_top,
    flags_are_read_where_they_may_be,
    global_state_stays_in_the_shims,
    module_names_keep_their_values,
    cuda_is_behind_the_device,
    environment_is_read_once,
    few_functions_branch_much,
    files_and_functions_fit_a_reader,
    asserts_say_what_we_believed,
    signatures_are_annotated,
    public_things_have_a_docstring,
    tensors_have_shapes,
    paths_of_one_machine_stay_out,
    text_is_ascii,
    files_are_loaded_as_data,
    errors_are_caught_by_name,
    the_package_is_installed_from_its_checkout,
)
