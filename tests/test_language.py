"""Docstrings of functions open with a verb in the imperative: "Gather x", not "Gathers x" or "The gathered x"."""

import ast
from pathlib import Path

import pytest

import minitron

# A list of what is allowed: a list of what is not would never be complete. Another verb is welcome to be added.
VERBS = set(
    """
    Accumulate Adapt Add Adopt Allocate Append Apply Ask Assert Assign Attach Attend Average Begin Bound Bring
    Broadcast Build Call Cast Check Choose Clear Close Collect Come Compare Compile Complete Compute Concatenate
    Convert Copy Count Create Cut Decide Declare Decode Delete Describe Divide Do Download Draw Drop Encode End
    Estimate Exchange Expand Fill Find Finish Fit Follow Forget Format Freeze Gather Give Group Hand Hash Hide Hold
    Initialise Join Keep Label Launch Lay Let List Load Log Look Make Map Mark Match Measure Merge Mix Move Multiply
    Name Note Open Order Overwrite Pack Pad Pair Parse Plan Post Predict Prepare Print Publish Put Queue Raise Read
    Receive Record Reduce Refuse Release Remember Remove Rename Replace Report Reset Resolve Restore Return Reuse
    Round Run Sample Save Say Scale Search Send Serve Set Shard Show Shuffle Simulate Skip Sort Split Stack Start Stop
    Store Sum Take Tell Test Time Tokenize Trace Train Translate Transpose Turn Undo Update Use Validate Verify View
    Wait Walk Warn Watch Wrap Write Yield Zero
    """.split()
)
NOUN_PHRASES = {"property", "cached_property"}  # read like attributes


def violations(source: str) -> list[tuple[int, str]]:
    """Return (line, first word) of each function's docstring that does not open with one of VERBS."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            word = text.split()[0].rstrip(".,:;") if text else None
            if text is not None and word not in VERBS and not NOUN_PHRASES & set(map(decorator, node.decorator_list)):
                found.append((node.lineno, word))
    return found


def decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def test_docstrings_open_with_a_verb():
    root = Path(minitron.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        found += [f"{path.relative_to(root)}:{line}: {word!r}" for line, word in violations(path.read_text())]
    assert not found, "not a verb of this test's list: " + ", ".join(found)


@pytest.mark.parametrize(
    "head, docstring, clean",
    [
        ("def f():", "Gather x along the sequence.", True),
        ("def f():", "Wait, and return nothing.", True),
        ("def f():", "Gathers x along the sequence.", False),
        ("def f():", "The gathered x.", False),
        ("def f():", "x [s, b, h] -> [s/tp, b, h].", False),
        ("async def f():", "Whose turn it is.", False),
        ("@property\n    def f(self):", "The ranks of the axis.", True),
        ("@functools.cached_property\n    def f(self):", "Sizes, in bytes.", True),
        ("@functools.lru_cache(4)\n    def f(self):", "Sizes, in bytes.", False),
    ],
)
def test_the_checker(head, docstring, clean):
    source = f'class A:\n    """Anything."""\n\n    {head}\n        """{docstring}"""\n'
    assert bool(violations(source)) != clean
