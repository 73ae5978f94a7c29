"""The house rules: imports run one way, the generations mirror each other, and everything stays readable."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATIONS = ("fa1", "fa2", "fa3")

# tests, benchmarks -> fa -> fa1 | fa2 | fa3 -> fa_common
MAY_IMPORT = {
    "fa_common": set(),
    **{version: {"fa_common"} for version in GENERATIONS},
    "fa": {*GENERATIONS, "fa_common"},
    "benchmarks": {"fa", *GENERATIONS, "fa_common"},
    "tests": {"benchmarks", "fa", *GENERATIONS, "fa_common"},
}
LIBRARY = ("fa", *GENERATIONS, "fa_common")
DEPENDENCIES = {"torch", "cutlass", "tvm_ffi", "einops"}  # of the library; benchmarks and tests have extras

# A kernel class reads top to bottom in this order, the same in every generation, with other methods in between.
KERNEL_METHODS = ("__call__", "kernel", "load", "attend", "block", "store")
# A file an idea: warp roles and barriers, persistent tiles, loads, the two products, how O leaves; the merging of split
# keys; FP8: its operands on chip, its attention, its quantisation; FP8 and decoding with a cache on the host.
ONLY_FA2 = {"split_k.py"}  # what fa1's warps do, for the switch that goes back to it
HOSTS = {"fp8.py", "fp8_arguments.py", "fp8_launch.py", "quantize_launch.py", "kvcache.py"}  # have no kernel
ONLY_FA3 = {"sync.py", "scheduler.py", "loads.py", "products.py", "epilogue.py", "merge.py"}
ONLY_FA3 |= {"e4m3.py", "forward_fp8.py", "quantize.py"} | HOSTS
KERNEL_FILES = ONLY_FA2 | ONLY_FA3 - HOSTS | {"forward.py", "backward.py", "softmax.py", "tiles.py"}

MAX_FUNCTION_LINES = 80
MAX_METHOD_PARAMETERS = 8
MAX_KERNEL_FILE_LINES = 600
DRAWERS = {"utils", "util", "helpers", "helper", "misc", "common", "tools", "lib"}  # names that say nothing


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sources(*MAY_IMPORT)}


def imported_by(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too, but for annotations' sake alone."""
    found = set()
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            # `from package import name`: the name may be a module
            found |= {
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else node.module
                for alias in node.names
            }
    return found


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes outside `if TYPE_CHECKING:`."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _nodes(child)


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)]


def package_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", MODULES.values(), ids=MODULES.keys())
def test_imports_run_one_way(path: Path):
    package = path.relative_to(ROOT).parts[0]
    ours = {module for module in imported_by(path) if package_of(module) in MAY_IMPORT}
    wrong = {module for module in ours if package_of(module) not in MAY_IMPORT[package] | {package}}
    assert not wrong, f"{package} may import {MAY_IMPORT[package] or 'none of the other packages'}, not {wrong}"


def test_imports_make_no_circle():
    graph = {name: {module for module in imported_by(path) if module in MODULES} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", LIBRARY)
def test_the_library_needs_nothing_beyond_its_dependencies(package: str):
    imported = {package_of(module) for path in sources(package) for module in imported_by(path)}
    assert imported <= DEPENDENCIES | {*LIBRARY} | sys.stdlib_module_names


def test_importing_does_not_load_the_compiler():
    program = f"import sys, {', '.join(LIBRARY)}; sys.exit('cutlass' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_the_generations_have_the_same_files():
    fa1, fa2, fa3 = ({path.relative_to(ROOT / version) for path in sources(version)} for version in GENERATIONS)
    assert fa2 - fa1 == {Path(name) for name in ONLY_FA2}
    assert fa1 <= fa2
    assert fa3 - fa1 <= {Path(name) for name in ONLY_FA3}
    not_yet = set() if import_module("fa3").CAPABILITIES.backward else {Path("backward.py")}
    assert fa1 - not_yet <= fa3


@pytest.mark.parametrize("version", GENERATIONS)
def test_kernels_read_in_the_same_order(version: str):
    tree = ast.parse((ROOT / version / "forward.py").read_text(encoding="utf-8"))
    [kernel] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Forward"]
    methods = [node.name for node in kernel.body if isinstance(node, ast.FunctionDef)]
    # A step without a method of its own name is there once for each schedule.
    where = [
        [i for i, name in enumerate(methods) if name == step]
        or [i for i, name in enumerate(methods) if name.startswith(f"{step}_")]
        for step in KERNEL_METHODS
    ]
    assert all(where), f"{version}.forward.Forward needs {KERNEL_METHODS}, it has {methods}"
    found = [i for places in where for i in places]
    assert found == sorted(found), f"{version}.forward.Forward needs the order {KERNEL_METHODS}, it has {methods}"


@pytest.mark.parametrize("path", sources(*LIBRARY, "benchmarks"), ids=name_of)
def test_functions_fit_on_a_screen(path: Path):
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions_of(path)}
    assert not {name: lines for name, lines in long.items() if lines > MAX_FUNCTION_LINES}


@pytest.mark.parametrize("path", [p for p in sources(*GENERATIONS, "fa_common") if p.name in KERNEL_FILES], ids=name_of)
def test_kernel_files_stay_small(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_KERNEL_FILE_LINES
    for node in functions_of(path):
        parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
        # `__call__` takes each of the caller's tensors; from there on they travel in bundles.
        assert len(parameters) <= MAX_METHOD_PARAMETERS or node.name == "__call__", f"{node.name} has {parameters}"


def test_files_are_named_for_an_idea():
    assert not [path for path in MODULES.values() if path.stem in DRAWERS]
