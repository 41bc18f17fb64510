"""The walk in minitron/README.md shows the code as it is, and the table in configs/README.md the names as they are."""

import re
from dataclasses import fields

import walk


def test_the_pictures_and_excerpts_are_those_of_the_code():
    page = walk.PAGE.read_text()
    assert walk.rendered(page) == page, "run PYTHONPATH=. python tests/walk.py"


def test_the_table_of_names_is_that_of_the_data():
    [table] = walk.TABLE.findall(walk.KEYS_PAGE.read_text())
    assert table == walk.names(), "run PYTHONPATH=. python tests/walk.py"


def test_each_step_has_a_picture_and_a_short_excerpt():
    blocks = [(kind, name, text.splitlines()) for kind, name, text in walk.BLOCK.findall(walk.PAGE.read_text())]
    excerpts = {name: lines for kind, name, lines in blocks if kind == "code"}
    assert len(blocks) == 16 and len(excerpts) == 8
    assert all(lines for _, _, lines in blocks)
    assert {name: len(lines) for name, lines in excerpts.items() if len(lines) > 25} == {}


def test_names_in_backquotes_are_in_the_code():
    """A name such as `run_queue`, or `Bucket.report`: the second part is in the file of the class or module."""
    code = [(file.stem, file.read_text()) for file in (walk.ROOT / "minitron").rglob("*.py")]
    words = [set(re.findall(r"\w+", text)) for _, text in code]
    everywhere = set().union(*words) | {stem for stem, _ in code}
    quoted = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*?\))?`", walk.BLOCK.sub("", walk.PAGE.read_text()))
    names = {name for name in quoted if re.search(r"[a-z][A-Z]|_|\.[a-z]", name) and not name.endswith((".py", ".md"))}
    assert len(names) > 40
    sections = {field.name for field in fields(walk.CFG)}  # whose keys tests/test_readme.py checks
    for name in names - {"NAME_forward", "NAME_backward"}:
        first, *others = name.split(".")
        if first in sections:
            continue
        here = [stem == first or re.search(rf"class {first}\b", text) for stem, text in code]
        homes = [known for known, is_here in zip(words, here) if is_here]
        assert {first, *others} <= everywhere | {"jsonl", "log"}, name
        assert not homes or any(set(others) <= home for home in homes), name
