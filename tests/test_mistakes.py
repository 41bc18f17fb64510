"""The form of mistakes.toml, how an entry finds its place, and (-m slow) that the tests catch every mistake."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

import plant
from definitions import Sources, tokens

MISTAKES = plant.read(plant.LIST)
CODE = """
LIMIT = 3  # of tries
class Loop:
    rate: float = 0.1

    @property
    def next(self):
        return self.step + 1  # + 1, since it has been done

    def run(self, step):
        def once(x):
            return step(
                x,  # twice
                self.next,
            )

        if self.next != 1:
            return once(self.next)
"""


def run_plant(*argv: str) -> subprocess.CompletedProcess:
    """A process of its own: this one's fork server has imported minitron."""
    return subprocess.run([sys.executable, plant.__file__, *argv], text=True, stdout=subprocess.PIPE)


def test_the_entries_are_well_formed():
    """Whether they fit the code is the business of plant.py, so that an edit of the code needs no edit here."""
    assert len({m.name for m in MISTAKES}) == len(MISTAKES)
    for m in MISTAKES:
        assert m.name and m.tests and tokens(m.old) and m.old != m.new, m.name
        assert bool(m.function) != bool(m.file) and not m.file.endswith(".py"), m.name
    missing = [m.name for m in MISTAKES if not (plant.ROOT / m.tests.split()[0].split("::")[0]).is_file()]
    assert not missing, "the file of their tests has another name now"


@pytest.fixture
def sources(tmp_path):
    """Two files: the class and its method `run` are in one, a function `run` in the other."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "loop.py").write_text(CODE)
    (tmp_path / "other.py").write_text("def run(step):\n    return step(1, 2)\n")
    (tmp_path / "job.sh").write_text("run --steps 3\nrun --last\n")
    return Sources(tmp_path, ["room/loop.py", "other.py"])


def entry(function: str, old: str, new: str = "0", **fields: str) -> plant.Mistake:
    return plant.Mistake("name", old, new, "tests", function, **fields)


@pytest.mark.parametrize(
    "function, old, new, line",
    [
        ("Loop.next", "self . step+1", "self.step", "        return self.step  # + 1, since it has been done"),
        ("loop.Loop.run", "!= 1", "> 1", "        if self.next > 1:"),
        ("run.once", "step(x, self.next)", "step(x)", "            return step(x)"),
        ("next", "@property", "@cached", "    @cached"),
        ("Loop.rate", "0.1", "0.2", "    rate: float = 0.2"),
        ("LIMIT", "3", "4", "LIMIT = 4  # of tries"),
        ("room.loop", "return once", "once", "            once(self.next)"),
        ("other.run", "1,", "", "    return step( 2)"),
        ("Loop.run", "return once(", "pass\nonce(", "            pass\n            once(self.next)"),
    ],
)
def test_an_entry_finds_its_tokens(sources, function, old, new, line):
    file, text = entry(function, old, new).planted(sources)
    before, after = file.read_text().splitlines(), text.splitlines()
    assert [each for each in after if each not in before] == line.splitlines()


@pytest.mark.parametrize(
    "function, old, new, problem",
    [
        ("Loop.walk", "step", "0", "no definition"),
        ("oop.run", "step", "0", "no definition"),
        ("Loop.next", "self.step + 2", "0", "0 times"),
        ("Loop.next", "elf", "0", "0 times"),
        ("Loop.next", "1, since", "0", "0 times"),  # comments do not count
        ("LIMIT", "0", "1", "0 times"),
        ("run", "return step(", "0", "2 times"),  # of two files
        ("Loop.run", "self.next", "0", "3 times"),
        ("other.run", "1", "1", "nothing"),
        ("other.run", "return", "return (", "no Python"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(sources, function, old, new, problem):
    with pytest.raises(ValueError, match=problem):
        entry(function, old, new).planted(sources)


def test_a_file_that_is_not_python_is_changed_by_its_text(sources):
    file, text = entry("", "--steps 3", "--steps 4", file="job.sh").planted(sources)
    assert (file.name, text) == ("job.sh", "run --steps 4\nrun --last\n")
    for wrong in (entry("", "run", file="job.sh"), entry("", "run", file="no.sh")):
        with pytest.raises(ValueError, match="times"):
            wrong.planted(sources)


def test_entries_that_do_not_fit_are_listed(tmp_path):
    one = MISTAKES[0]
    list_of(tmp_path / "list.toml", one, replace(one, name="stale", old="no such text"))
    done = run_plant("--check", "--list", str(tmp_path / "list.toml"))
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["REWRITE", "stale:"]]
    assert done.returncode == 1
    assert run_plant("--check", "--list", str(tmp_path / "list.toml"), one.name).returncode == 0


def list_of(path, *mistakes: plant.Mistake) -> None:
    tables = ("".join(f"{key} = {json.dumps(value)}\n" for key, value in asdict(m).items()) for m in mistakes)
    path.write_text("".join(f"[[mistake]]\n{table}" for table in tables))


def test_what_no_test_sees_is_missed(tmp_path):
    """Of four small entries one is caught, one passes, one ends its process, and one has no tests."""
    one = next(m for m in MISTAKES if m.name == "uint16 is taken up to its last id")
    harmless = replace(one, name="harmless", new=f"{one.old} and True")
    ends = replace(one, name="ends", new="__import__('os')._exit(1)")
    never = replace(one, name="never", tests="tests/data/test_data_indexed.py -k no_such_test")
    list_of(tmp_path / "list.toml", one, harmless, ends, never)
    done = run_plant("--list", str(tmp_path / "list.toml"))
    words = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert words == ["caught", "MISSED", "BROKEN", "BROKEN", "4"]  # "4 mistakes in ..."
    assert done.returncode == 1


@pytest.mark.slow
def test_the_tests_catch_every_mistake():
    """It takes a core some minutes for a hundred mistakes."""
    done = run_plant()
    assert done.returncode == 0, done.stdout
