"""Rooms are layers: imports inside of minitron/ point only downwards, and some rooms know no torch."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import minitron

# Top to bottom: commands, the three neighbours of the trainer, the trainer itself, a room a line. Within a layer any
# import is fine that closes no cycle, and what `if TYPE_CHECKING` guards counts like any other import: it is needed to
# understand the file. A command imports a neighbour inside of the function that needs it.
LAYERS = [
    ("pretrain", "finetune", "testing"),
    ("planner", "supervise", "interop"),
    ("train",),
    ("checkpoint",),
    ("model",),
    ("data",),
    ("optim",),
    ("parallel",),
    ("pipeline",),
    ("kernels",),
    ("runtime",),
    ("config",),
    ("comm",),
]
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
NEIGHBOURS = ("planner", "supervise", "interop")
TORCH = {"torch", "triton", "transformer_engine", "flash_attn", "amp_C", "fused_weight_gradient_mlp_cuda"}
# Tools read configurations, datasets and schedules, and plan a job, without torch, whose import takes seconds. So does
# the supervisor.
NO_TORCH = {"config", "data", "planner", "supervise"}
RUNTIME = {f"runtime.{name}" for name in ("environment", "signals", "sinks", "status")}
AND = {"comm.layout", "pipeline.schedule", *RUNTIME}
BUT = {
    "data.batch",
    "data.evaluation",
    "data.loader",
    "planner.dryrun.dryrun",
    "planner.dryrun.kernels",
    "planner.dryrun.memory_walk",
    "planner.dryrun.trace",
}


def layer_of(module):
    """Return the entry of LAYERS that a module (named without "minitron.") belongs to; None if there is none."""
    room = module.split(".")[0]
    return room if room in DEPTH else None


def knows_no_torch(module):
    return module in AND or layer_of(module) in NO_TORCH and module not in BUT


def imports_of(tree, modules):
    """(imports of minitron's modules, named without "minitron.", imports of other top-level packages), at any depth."""
    inside, outside = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("minitron.") in modules else node.module for name in whole]
        else:
            continue
        for name in names:
            if name.startswith("minitron."):
                inside.add(name.removeprefix("minitron."))
            elif name != "minitron":
                outside.add(name.split(".")[0])
    return inside, outside


def violations(sources):
    """One line per broken rule. sources: module name without "minitron." -> source text."""
    found, graph = [], {}
    for module, source in sources.items():
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module} is in no layer; add it to LAYERS")
            continue
        inside, outside = imports_of(ast.parse(source), sources)
        graph[module] = inside
        for other in inside:
            below = layer_of(other)
            if below is None or DEPTH[below] < DEPTH[layer]:
                found.append(f"{module} imports {other}, which is not below it")
            elif knows_no_torch(module) and not knows_no_torch(other):
                found.append(f"{module} imports {other}, which may import torch")
        if knows_no_torch(module) and outside & TORCH:
            found.append(f"{module} imports {', '.join(sorted(outside & TORCH))}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("cycle: " + " -> ".join(error.args[1]))
    return found


def test_imports_point_downwards():
    root = Path(minitron.__file__).parent
    paths = root.rglob("*.py")
    sources = {".".join(path.relative_to(root).with_suffix("").parts): path.read_text() for path in paths}
    modules = {name: text for name, text in sources.items() if not name.endswith("__init__")}
    assert not violations(modules)
    # Importing a package runs its __init__, so nothing stands in one but its docstring.
    for name in sources.keys() - modules.keys():
        assert [type(node) for node in ast.parse(sources[name]).body] == [ast.Expr], name


@pytest.mark.parametrize(
    "module, without",
    [
        ("minitron.train", NEIGHBOURS),
        ("minitron.pretrain", NEIGHBOURS),
        ("minitron.planner.command", ("torch",)),
        ("minitron.planner.draw", ("torch",)),
        ("minitron.supervise.supervisor", ("torch",)),
    ],
)
def test_an_import_loads_no(module, without):
    names = tuple(name if name == "torch" else f"minitron.{name}" for name in without)
    code = f"import sys, {module}; print([m for m in sys.modules if m.startswith({names})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_at_the_top_stand_the_entry_points_alone():
    assert {path.stem for path in Path(minitron.__file__).parent.glob("*.py")} == {
        "__init__",
        "pretrain",
        "finetune",
        "train",
        "testing",
    }


@pytest.mark.parametrize(
    "module, source, expected",
    [
        ("comm.collectives", "from minitron.comm.mesh import Axis", []),
        ("train", "import numpy, torch\nfrom minitron.config import schema\nimport minitron.optim.zero1", []),
        ("model.gpt", "from minitron.data.batch import Batch", []),
        ("data.gpt", "from minitron.data import indexed", []),
        ("comm.mesh", "import minitron.model.gpt as gpt", ["comm.mesh imports model.gpt, which is not below it"]),
        ("comm.mesh", "from minitron.model import gpt", ["comm.mesh imports model.gpt, which is not below it"]),
        (
            "comm.mesh",
            "def f():\n    if x:\n        from minitron import train",
            ["comm.mesh imports train, which is not below it"],
        ),
        ("data.loader", "from minitron.model.gpt import GPT", ["data.loader imports model.gpt, which is not below it"]),
        ("pipeline.executor", "from minitron.pipeline.schedule import Action", []),
        (
            "pipeline.schedule",
            "import minitron.pipeline.executor",
            ["pipeline.schedule imports pipeline.executor, which may import torch"],
        ),
        ("config.schema", "def f():\n    import torch.distributed", ["config.schema imports torch"]),
        ("data.indexed", "import torch", ["data.indexed imports torch"]),
        (
            "data.gpt",
            "from minitron.data.loader import Loader",
            ["data.gpt imports data.loader, which may import torch"],
        ),
        ("data.gpt", "from minitron.comm.mesh import Mesh", ["data.gpt imports comm.mesh, which may import torch"]),
        ("helpers", "", ["helpers is in no layer; add it to LAYERS"]),
        (
            "comm.mesh",
            "if TYPE_CHECKING:\n    from minitron import train",
            ["comm.mesh imports train, which is not below it"],
        ),
        ("model.gpt", "from minitron.model.layers import rope", ["cycle: model.gpt -> model.layers -> model.gpt"]),
        (
            "model.gpt",
            "if TYPE_CHECKING:\n    from minitron.model.layers import rope",
            ["cycle: model.gpt -> model.layers -> model.gpt"],
        ),
    ],
)
def test_the_checker_finds_planted_violations(module, source, expected):
    names = [
        "comm.collectives",
        "comm.mesh",
        "train",
        "config.schema",
        "optim.zero1",
        "data.loader",
        "data.gpt",
        "data.batch",
        "data.indexed",
        "model.gpt",
        "pipeline.executor",
        "pipeline.schedule",
    ]
    sources = dict.fromkeys(names, "") | {"model.layers": "from minitron.model import gpt"} | {module: source}
    found = violations(sources)
    if expected and expected[0].startswith("cycle"):  # a cycle may be told from any of its members
        assert len(found) == 1 and set(found[0].split(": ")[1].split(" -> ")) == {"model.gpt", "model.layers"}
    else:
        assert found == expected


def test_the_checker_refuses_relative_imports():
    with pytest.raises(AssertionError, match="line 1: relative import; write the whole name"):
        violations({"comm.mesh": "from . import rng"})
