"""The walk in minitron/README.md shows the code as it is."""

import walk


def test_the_pictures_and_excerpts_are_those_of_the_code():
    page = walk.PAGE.read_text()
    assert walk.rendered(page) == page, "run PYTHONPATH=. python tests/walk.py"


def test_each_step_has_a_picture_and_a_short_excerpt():
    blocks = [(kind, name, text.splitlines()) for kind, name, text in walk.BLOCK.findall(walk.PAGE.read_text())]
    excerpts = {name: lines for kind, name, lines in blocks if kind == "code"}
    assert len(blocks) == 15 and len(excerpts) == 8
    assert all(lines for _, _, lines in blocks)
    assert {name: len(lines) for name, lines in excerpts.items() if len(lines) > 25} == {}
