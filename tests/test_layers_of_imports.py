"""Folders are layers: imports inside of minitron/ point only downwards, and the lower layers know no torch."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import minitron

# Top to bottom. A module belongs to the longest name that it starts with. Within a layer anything may be imported that
# closes no cycle; only what `if TYPE_CHECKING` guards may, since it never runs.
LAYERS = [
    ("pretrain", "finetune"),
    ("dryrun",),
    ("train",),
    ("meter",),
    ("checkpoint",),
    ("optim",),
    ("pipeline.executor",),
    ("data",),
    ("model",),
    ("parallel",),
    ("attention", "precision", "fp8", "fp8_te", "fp8_torch", "fused_apex"),
    ("memory",),
    ("fused", "meta", "plain"),
    ("overlap",),
    ("collectives",),
    ("mesh", "rng", "log", "profiling", "rendezvous", "testing", "watch", "stop", "lines", "errors"),
    ("planner",),
    ("cli",),
    ("config", "rules"),
    ("pipeline.simulate", "pipeline.check", "pipeline.schedule"),
    ("flops", "files", "signals"),
]
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
TORCH = {"torch", "triton", "transformer_engine", "flash_attn", "amp_C", "fused_weight_gradient_mlp_cuda"}


def layer_of(module):
    """The entry of LAYERS that a module (named without "minitron.") belongs to; None if there is none."""
    parts = module.split(".")
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in DEPTH), None)


def knows_no_torch(module):
    """From the planner down, and in `data` everything but the loader: tools read datasets without torch."""
    return DEPTH[layer_of(module)] >= DEPTH["planner"] or (module.startswith("data.") and module != "data.loader")


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


def without_type_checking(tree):
    return ast.Module([node for node in tree.body
                       if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")], [])


def violations(sources):
    """One line per broken rule. sources: module name without "minitron." -> source text."""
    found, graph = [], {}
    for module, source in sources.items():
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module} is in no layer; add it to LAYERS")
            continue
        tree = ast.parse(source)
        inside, outside = imports_of(tree, sources)
        graph[module], _ = imports_of(without_type_checking(tree), sources)
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


@pytest.mark.parametrize("module, source, expected", [
    ("collectives", "from minitron.mesh import Axis", []),
    ("train", "import numpy, torch\nfrom minitron import mesh, config\nimport minitron.optim.zero1", []),
    ("data.loader", "import torch\nfrom minitron.model.gpt import GPT", []),
    ("data.gpt", "from minitron.data import indexed", []),
    ("mesh", "from minitron.collectives import all_reduce", ["mesh imports collectives, which is not below it"]),
    ("mesh", "import minitron.model.gpt as gpt", ["mesh imports model.gpt, which is not below it"]),
    ("mesh", "from minitron.model import gpt", ["mesh imports model.gpt, which is not below it"]),
    ("mesh", "from minitron import collectives", ["mesh imports collectives, which is not below it"]),
    ("mesh", "def f():\n    if x:\n        from minitron import train", ["mesh imports train, which is not below it"]),
    ("pipeline.executor", "from minitron.pipeline.schedule import Action", []),
    ("pipeline.schedule", "import minitron.pipeline.executor",
     ["pipeline.schedule imports pipeline.executor, which is not below it"]),
    ("config", "def f():\n    import torch.distributed", ["config imports torch"]),
    ("flops", "from torch import nn", ["flops imports torch"]),
    ("data.indexed", "import torch", ["data.indexed imports torch"]),
    ("data.gpt", "from minitron.data.loader import Loader", ["data.gpt imports data.loader, which may import torch"]),
    ("data.gpt", "from minitron.mesh import Mesh", ["data.gpt imports mesh, which may import torch"]),
    ("helpers", "", ["helpers is in no layer; add it to LAYERS"]),
    ("model.gpt", "if TYPE_CHECKING:\n    from minitron.model.layers import rope", []),
    ("mesh", "if TYPE_CHECKING:\n    from minitron import train", ["mesh imports train, which is not below it"]),
    ("model.gpt", "from minitron.model.layers import rope", ["cycle: model.gpt -> model.layers -> model.gpt"]),
])
def test_the_checker_finds_planted_violations(module, source, expected):
    names = ["collectives", "mesh", "train", "config", "flops", "optim.zero1", "data.loader", "data.gpt",
             "data.indexed", "model.gpt", "pipeline.executor", "pipeline.schedule"]
    sources = dict.fromkeys(names, "") | {"model.layers": "from minitron.model import gpt"} | {module: source}
    found = violations(sources)
    if expected and expected[0].startswith("cycle"):  # a cycle may be told from any of its members
        assert len(found) == 1 and set(found[0].split(": ")[1].split(" -> ")) == {"model.gpt", "model.layers"}
    else:
        assert found == expected


def test_the_checker_refuses_relative_imports():
    with pytest.raises(AssertionError, match="line 1: relative import; write the whole name"):
        violations({"mesh": "from . import rng"})
