"""Measures of the structure: circles of folders, what an entry reaches, which files know a feature, how the code is cut.

A measure takes the files of a tree and returns a number and the places that it was counted from. `tests/test_structure.py`
holds a limit for each, which later commits lower. Trees are read from syntax, as in `tests/helpers/architecture.py`; what is
counted while code runs is in `tests/helpers/entered.py`.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import PurePosixPath

from tests.helpers.architecture import Function, Source, Tree, dotted, imported, repository, target
from tests.helpers.limits import Measured

PRODUCT = ("megatron", "tasks", "tools")
CORE_AND_TRAINING = ("megatron/core/", "megatron/training/")
EXPLAINED = ("megatron/core/transformer/", "megatron/core/models/", "megatron/training/")

# A feature is known by the words of its paths, whether its files still lie among those of the core or beside it.
FEATURE_PATHS: Mapping[str, frozenset[str]] = {
    "adapters": frozenset({"adapter", "adapters", "peft"}),
    "vision": frozenset({"vision", "image", "images", "multimodal", "llava", "energon", "webdataset"}),
    "encoders": frozenset({"encoders", "bert", "t5"}),
    "others": frozenset({"preference", "rl", "megatron_lm"}),
}
FEATURE_WORDS = ("adapter", "bert", "t5", "vision")
# Names of others that hold a feature's word and do not mean the feature here.
NAMES_OF_OTHERS: Mapping[str, str] = {
    "BertWordPieceLowerCase": "a value of Megatron's --tokenizer-type",
    "BertWordPieceCase": "a value of Megatron's --tokenizer-type",
    "BertWordPieceTokenizer": "a class of the package tokenizers",
    "BertWordPiece": "the start of both values of --tokenizer-type",
    "BertTokenizer": "a class of transformers, named in tokenizer_config.json",
    "BertNormalizer": "a class of the package tokenizers",
    "BertPreTokenizer": "a class of the package tokenizers",
    "output-bert-embeddings": "a flag of Megatron that is refused",
}
MIXER_NAMES = frozenset({"mla", "mamba", "gated_delta_net"})
# Where names of mixers belong: published configs are translated in families, and each mixer says its own name.
PLACES_OF_MIXERS = ("*/families/*", "*/mixers/*")
SMALL = 120
# Files that are right to be small and to have one importer.
SMALL_FOR_A_REASON: Mapping[str, str] = {
    "megatron/core/config/rules/*": "one subject of rules a file",
    "megatron/core/config/settings/*": "one section of the settings a file",
    "megatron/core/families/gpt2.py": "one family a file",
    "megatron/core/kernels/external/*": "one optional package a file",
    "megatron/core/models/memory_layer.py": "layers of one network, which leave the core with it",
    "megatron/core/tokenizers/bpe.py": "one kind of tokenizer a file",
    "megatron/core/tokenizers/wordpiece.py": "one kind of tokenizer a file",
    "megatron/rl/environments/*": "one environment a file",
    "megatron/training/hooks/*": "one thing that a run does between two steps a file, as default.py lists them",
    "megatron/training/session.py": "hooks name its class as what they are given, and loop.py lists the hooks",
    "megatron/cli/commands/*": "one command a file",
    "megatron/cli/device_checks.py": "what needs torch, for which the other checks do not wait",
    "megatron/tasks/main.py": "the command of the tasks",
    "megatron/core/parallel_state.py": "a module that users' scripts import",
    "megatron/training/global_vars.py": "a module that users' scripts import",
}
# Names in docstrings that other packages, files of others or mathematics define.
KNOWN_ELSEWHERE = frozenset(
    {
        "lm_eval.simple_evaluate",
        "gen_kwargs",
        "extract_prompt",
        "nn.Linear",
        "SavePlanner",
        "SiLU",
        "concat",
        "rms",
        "dp_reshardable",
        "fully_sharded_model_space",
        "model0",
        "model1",
        "decoder.layers.3",
        "B0.3",  # actions of a schedule
        "F0.3",
        "R0",
        "Reverse",  # an example that the reader writes
        "so",  # a word between quotation marks
        "reverse.py",  # files that the reader writes
        "FILE.py",
        "my_task.py",
        "setup.py",  # ours, but not of the product
        "vqaEval.py",  # a file of the benchmark's authors
    }
)
NAME = re.compile(r"[A-Za-z_][\w.-]*")
MENTIONED = (
    re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\([^`]*\))?`"),
    re.compile(r"(?<![\w.])([A-Z][a-z]\w+|[a-z]+_[a-z_]+)\("),
)
PYTHON_FILE = re.compile(r"\b(\w+\.py)\b")
FILE_ENDINGS = frozenset(
    {"py", "md", "json", "jsonl", "txt", "sh", "yaml", "idx", "bin", "safetensors", "model", "pth"}
)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name. is_late: inside a function. is_for_types: under TYPE_CHECKING."""

    line: int
    name: str
    is_late: bool
    is_for_types: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What one walk over a file's syntax tree yields.

    names: identifiers, and strings that look like one. strings, comparisons: with their nodes.
    """

    imports: tuple[Import, ...]
    names: frozenset[str]
    strings: tuple[ast.Constant, ...]
    comparisons: tuple[ast.Compare, ...]
    docstrings: tuple[tuple[int, str], ...]
    classes: tuple[ast.ClassDef, ...]
    num_functions: int


def product() -> Tree:
    """The Python files that are installed or started: no tests, benchmarks, examples or documentation."""
    return {path: source for path, source in repository(PRODUCT).items() if source.is_python and path != "setup.py"}


@cache
def facts(source: Source) -> Facts:
    """Walk the tree once."""
    found_imports: list[Import] = []
    names: set[str] = set()
    by_kind: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    docstrings: list[tuple[int, str]] = []
    open_nodes: list[tuple[ast.AST, bool, bool]] = [(source.syntax, False, False)]
    while open_nodes:
        node, late, for_types = open_nodes.pop()
        by_kind[type(node)].append(node)
        names.update(names_of(node))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found_imports += [Import(node.lineno, name, late, for_types) for name in imported(node)]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            docstrings.append((node.body[0].lineno, text))
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        guarded = node.body if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING") else []
        open_nodes += [(child, late, for_types or child in guarded) for child in ast.iter_child_nodes(node)]
    return Facts(
        imports=tuple(found_imports),
        names=frozenset(names),
        strings=tuple(by_kind[ast.Constant]),
        comparisons=tuple(by_kind[ast.Compare]),
        docstrings=tuple(docstrings),
        classes=tuple(by_kind[ast.ClassDef]),
        num_functions=len(by_kind[ast.FunctionDef]) + len(by_kind[ast.AsyncFunctionDef]),
    )


def names_of(node: ast.AST) -> Iterable[str]:
    """The identifiers that a node itself holds, and a string that could be one."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        return (node.attr,)
    if isinstance(node, (ast.arg, ast.keyword)):
        return (node.arg,) if node.arg else ()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (node.name,)
    if isinstance(node, ast.alias):
        return (*node.name.split("."), node.asname or "")
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
        return (node.value,)
    return ()


def lines_of(source: Source) -> int:
    """The number of lines of a file."""
    return source.text.count("\n")


def parents(tree: Tree, path: str) -> Iterator[str]:
    """The `__init__.py` of every package that a file lies in: Python runs them first."""
    for folder in PurePosixPath(path).parents:
        if (init := f"{folder}/__init__.py") in tree and init != path:
            yield init


def imported_files(tree: Tree, source: Source, *, late: bool) -> set[str]:
    """Files of ours that a file imports when it runs. late: those that functions import, too."""
    paths = {
        target(tree, one.name) for one in facts(source).imports if (late or not one.is_late) and not one.is_for_types
    }
    return {path for path in paths if path is not None and path != source.path}


def reached(tree: Tree, start: str) -> set[str]:
    """The file and all that importing it runs; what functions import late is not among them."""
    seen, open_paths = {start}, [start]
    while open_paths:
        path = open_paths.pop()
        files = imported_files(tree, tree[path], late=False)
        following = files.union(*(parents(tree, file) for file in files)) - seen
        seen |= following
        open_paths += following
    return seen


def file_with(tree: Tree, name: str) -> str:
    """The file that has this function or class, wherever it was moved to; a path stands for itself."""
    if name in tree:
        return name
    kinds = (ast.FunctionDef, ast.ClassDef)
    files = [
        path for path, file in tree.items() if any(isinstance(x, kinds) and x.name == name for x in file.syntax.body)
    ]
    files = [path for path in files if path.startswith("megatron/")]
    assert len(files) == 1, f"{name} is to be defined once: {files}"
    return files[0]


def files_behind(name: str) -> Callable[[Tree], Measured]:
    """Measure: how many files importing the one of this name runs."""

    def measure(tree: Tree) -> Measured:
        """Count them, but for a package's `__init__.py` that is a docstring alone: it adds nothing that runs."""
        paths = sorted(reached(tree, file_with(tree, name)))
        paths = [path for path in paths if not path.endswith("/__init__.py") or len(tree[path].syntax.body) > 1]
        return Measured(len(paths), tuple(paths))

    return measure


def thousand_lines_behind(name: str) -> Callable[[Tree], Measured]:
    """Measure: how many lines these files have."""

    def measure(tree: Tree) -> Measured:
        """Count them."""
        paths = reached(tree, file_with(tree, name))
        places = sorted(((lines_of(tree[path]), path) for path in paths), reverse=True)
        return Measured(sum(lines for lines, _ in places) / 1000, tuple(f"{lines:5} {path}" for lines, path in places))

    return measure


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node: each node of one reaches all others."""
    reach = {node: _reach(graph, node) for node in graph}
    components = {frozenset(other for other in reach[node] if node in reach.get(other, ())) for node in graph}
    return sorted(sorted(one) for one in components if len(one) > 1)


def _reach(graph: Mapping[str, Collection[str]], start: str) -> set[str]:
    seen: set[str] = set()
    open_nodes = [start]
    while open_nodes:
        following = set(graph.get(open_nodes.pop(), ())) - seen
        seen |= following
        open_nodes += following
    return seen


@cache
def _folder_circles(sources: tuple[Source, ...]) -> list[list[str]]:
    tree = {source.path: source for source in sources}
    graph: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        folder = str(PurePosixPath(source.path).parent)
        graph[folder].update(str(PurePosixPath(path).parent) for path in imported_files(tree, source, late=True))
        graph[folder].discard(folder)
    return circles(graph)


def folder_circles(tree: Tree) -> Measured:
    """Groups of folders that import each other; a folder and the one that it lies in count, late imports too."""
    found = _folder_circles(tuple(tree.values()))
    return Measured(len(found), tuple(" <-> ".join(circle) for circle in found))


def folders_in_circles(tree: Tree) -> Measured:
    """Folders that stand in such a group."""
    found = _folder_circles(tuple(tree.values()))
    return Measured(sum(map(len, found)), tuple(" <-> ".join(circle) for circle in found))


def feature_of(path: str) -> str | None:
    """The feature that a file belongs to, by the words of its path; None for the core."""
    words = {*re.split(r"[/_.]", path), *path.split("/")}
    return next((name for name, own in FEATURE_PATHS.items() if words & own), None)


def imports_of_features(tree: Tree) -> Measured:
    """Imports of a feature's file by one of core and training that is of no feature, or of another."""
    places = [
        f"{source.path} imports {path}"
        for source in tree.values()
        if source.path.startswith(CORE_AND_TRAINING)
        for path in sorted(imported_files(tree, source, late=True))
        if feature_of(path) not in (None, feature_of(source.path))
    ]
    return Measured(len(places), tuple(places))


def parts_of(name: str) -> set[str]:
    """The words of an identifier in lower case: BERTModel gives bert and model; a plural counts as one, too."""
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name))
    parts = re.split(r"[\W_]+", spaced.lower())
    return {*parts, *(part.removesuffix("s") for part in parts)}


def files_naming(word: str) -> Callable[[Tree], Measured]:
    """Measure: files of core and training with a feature's word in an identifier, or in a string that looks like one."""

    def measure(tree: Tree) -> Measured:
        """Count the files."""
        places = []
        for source in tree.values():
            if not source.path.startswith(CORE_AND_TRAINING) or word not in source.text.lower():
                continue
            names = sorted(name for name in facts(source).names - NAMES_OF_OTHERS.keys() if word in parts_of(name))
            if names:
                places.append(f"{source.path}: {', '.join(names[:5])}")
        return Measured(len(places), tuple(places))

    return measure


def imports_of_loop(tree: Tree) -> Measured:
    """Files of ours that the one with `pretrain` imports itself."""
    paths = sorted(imported_files(tree, tree[file_with(tree, "pretrain")], late=True))
    return Measured(len(paths), tuple(paths))


def lines_of_loop(tree: Tree) -> Measured:
    """Lines of the file with `pretrain`."""
    path = file_with(tree, "pretrain")
    return Measured(lines_of(tree[path]), (path,))


def late_imports(tree: Tree) -> Measured:
    """Names of ours that a file's functions import."""
    places = {
        f"{source.path}: {one.name}"
        for source in tree.values()
        for one in facts(source).imports
        if one.is_late and target(tree, one.name) is not None
    }
    return Measured(len(places), tuple(sorted(places)))


def small_files_with_one_importer(tree: Tree) -> Measured:
    """Files under 120 lines that one file imports, where no reason is written down."""
    importers: dict[str, list[str]] = defaultdict(list)
    for source in tree.values():
        for path in imported_files(tree, source, late=True):
            importers[path].append(source.path)
    places = [
        f"{path} ({lines_of(tree[path])} lines) <- {paths[0]}"
        for path, paths in sorted(importers.items())
        if len(paths) == 1
        and path.startswith("megatron/")
        and not path.endswith("__init__.py")
        and lines_of(tree[path]) < SMALL
        and not any(fnmatch(path, pattern) for pattern in SMALL_FOR_A_REASON)
    ]
    return Measured(len(places), tuple(places))


def missing_names(tree: Tree) -> Measured:
    """Names that a docstring of megatron/ has in backticks or calls, and that neither the code nor Python defines; and missing files.

    Of `Class.member` the member must be a name in a file that defines the class.
    """
    known, members, files = (
        set(dir(builtins)) | FILE_ENDINGS,
        defaultdict(set),
        {path.rpartition("/")[2] for path in tree},
    )
    for source in tree.values():
        known.update(re.split(r"[/.]", source.path))
        known.update(part for name in facts(source).names for part in re.split(r"\W+", name))
        for node in facts(source).classes:
            members[node.name] |= facts(source).names
    places = set()
    for source in tree.values():
        for line, text in facts(source).docstrings if source.path.startswith("megatron/") else ():
            for name in {name for pattern in MENTIONED for name in pattern.findall(text)} - KNOWN_ELSEWHERE:
                owner, _, last = name.rpartition(".")
                if last not in members.get(owner.rpartition(".")[2], known):
                    places.add(f"{source.path}:{line} {name}")
            for name in set(PYTHON_FILE.findall(text)) - files - KNOWN_ELSEWHERE:
                places.add(f"{source.path}:{line} {name}")
    return Measured(len(places), tuple(sorted(places)))


def files_missing_in_maps(tree: Tree) -> Measured:
    """Files that lie beside an `__init__.py` whose docstring lists files, and does not name them."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in tree:
        if path.startswith("megatron/") and not path.endswith("/__init__.py"):
            files[path.rpartition("/")[0]].append(path)
    places = []
    for folder, paths in files.items():
        init = tree.get(f"{folder}/__init__.py")
        text = (ast.get_docstring(init.syntax) or "") if init else ""
        if any(path.rpartition("/")[2] in text for path in paths):
            places += [path for path in paths if not re.search(rf"\b{PurePosixPath(path).stem}\b", text)]
    return Measured(len(places), tuple(places))


def functions_per_thousand_lines(tree: Tree) -> Measured:
    """How finely megatron/ is cut."""
    sources = [source for source in tree.values() if source.path.startswith("megatron/")]
    count, lines = sum(facts(source).num_functions for source in sources), sum(map(lines_of, sources))
    return Measured(1000 * count / max(1, lines), (f"{count} functions in {lines} lines",))


def comments_per_hundred_lines(tree: Tree) -> Measured:
    """How much the files that readers open first say inside of functions and beside them."""
    sources = [source for source in tree.values() if source.path.startswith(EXPLAINED)]
    comments = lines = 0
    for source in sources:
        tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
        comments += sum(token.type == tokenize.COMMENT and not token.string.startswith("#!") for token in tokens)
        lines += lines_of(source)
    return Measured(100 * comments / max(1, lines), (f"{comments} comments in {lines} lines",))


def architecture_comparisons(tree: Tree) -> Measured:
    """Comparisons of an `architecture` with a name."""
    places = [
        f"{source.path}:{node.lineno} {ast.unparse(node)}"
        for source in tree.values()
        for node in facts(source).comparisons
        if any(dotted(side).split(".")[-1] == "architecture" for side in (node.left, *node.comparators))
    ]
    return Measured(len(places), tuple(places))


def mixer_names(tree: Tree) -> Measured:
    """Strings that name a mixer outside of families and of the mixers themselves, and comparisons of one with attention."""
    places = []
    for source in tree.values():
        if any(fnmatch(f"/{source.path}", pattern) for pattern in PLACES_OF_MIXERS):
            continue
        places += [
            f"{source.path}:{node.lineno} {node.value}" for node in facts(source).strings if node.value in MIXER_NAMES
        ]
        places += [
            f"{source.path}:{node.lineno} {ast.unparse(node)}"
            for node in facts(source).comparisons
            if "mixer" in (text := ast.unparse(node))
            and "'attention'" in text
            and not MIXER_NAMES & set(re.findall(r"'(\w+)'", text))
        ]
    return Measured(len(places), tuple(places))


def files_of(measure: Callable[[Tree], Measured]) -> Callable[[Tree], Measured]:
    """Measure: how many files another measure's places lie in."""

    def count(tree: Tree) -> Measured:
        """Count the files."""
        files = Counter(place.split(":")[0] for place in measure(tree).places)
        return Measured(len(files), tuple(f"{count:3} {path}" for path, count in files.most_common()))

    return count


def feature_methods_with_one_user(tree: Tree) -> Measured:
    """Methods of FeatureConfig that fewer than two features define: such a one is a direct call written long."""
    classes = [node for source in tree.values() for node in facts(source).classes]
    bases = [node for node in classes if node.name == "FeatureConfig"]
    users = [node for node in classes if any(dotted(base).split(".")[-1] == "FeatureConfig" for base in node.bases)]
    methods = [child.name for base in bases for child in base.body if isinstance(child, Function)]
    uses = Counter(child.name for user in users for child in user.body if isinstance(child, Function))
    places = [f"{method}: {uses[method]} features define it" for method in methods if uses[method] < 2]
    return Measured(len(places), tuple(places))
