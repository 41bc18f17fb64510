"""The mistakes of mistakes.toml: they can still be planted, and (-m slow) the tests catch every one."""

import subprocess
import sys
from dataclasses import asdict, replace

import pytest

import plant

MISTAKES = plant.read(plant.LIST)


def run_plant(*argv: str) -> subprocess.CompletedProcess:
    """A process of its own: this one's fork server has imported minitron."""
    return subprocess.run([sys.executable, plant.__file__, *argv], text=True, stdout=subprocess.PIPE)


def test_every_mistake_fits_the_code():
    """A text that moved on must be written anew, or nothing proves that the mistake is still caught."""
    assert [f"{m.name}: {m.problem()}" for m in MISTAKES if m.problem()] == []
    assert len({m.name for m in MISTAKES}) == len(MISTAKES)
    missing = [m.name for m in MISTAKES if not (plant.ROOT / m.tests.split()[0].split("::")[0]).is_file()]
    assert not missing, "the file of their tests has another name now"


def test_an_entry_that_does_not_fit_is_seen():
    one = MISTAKES[0]
    assert "occurs 0 times" in replace(one, old="no such text").problem()
    assert "times in" in replace(one, old="\n").problem() and "changes nothing" in replace(one, new=one.old).problem()
    assert "occurs 0 times" in replace(one, file="minitron/no_such_file.py").problem()


def test_what_no_test_sees_is_missed(tmp_path):
    """Of three small entries one is caught, one passes its tests, and of one there are no tests."""
    one = next(m for m in MISTAKES if m.name == "uint16 is taken up to its last id")
    harmless = replace(one, name="harmless", new=f"{one.old} and True")
    never = replace(one, name="never", tests="tests/data/test_data_indexed.py -k no_such_test")
    tables = ("".join(f"{key} = '{value}'\n" for key, value in asdict(m).items()) for m in (one, harmless, never))
    (tmp_path / "list.toml").write_text("".join(f"[[mistake]]\n{table}" for table in tables))
    done = run_plant("--list", str(tmp_path / "list.toml"))
    words = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert words == ["caught", "MISSED", "BROKEN", "3"]  # "3 mistakes in ..."
    assert done.returncode == 1


@pytest.mark.slow
def test_the_tests_catch_every_mistake():
    """It takes a core some minutes for a hundred mistakes."""
    done = run_plant()
    assert done.returncode == 0, done.stdout
