"""Plant the mistakes of mistakes.toml in the code, one at a time, and check that the tests catch each.

    python tests/plant.py [--jobs 2] [NAME...]          NAME: a part of an entry's name; without one, all of them
    python tests/plant.py --check [NAME...]             only list the entries that do not fit the code

A test proves little until it has failed. Mistakes are planted in temporary copies of the files that git lists, so your
working tree is never touched. Without a mistake, one process runs the tests of all entries of a test file, so a test
that passes only after others is not noticed. Each entry gets one line:

    caught            its tests fail with the mistake, and pass without it
    MISSED            its tests pass with the mistake: they need another assertion
    BROKEN            its tests fail without any mistake, or cannot be collected with this one, or hang
    REWRITE           its tokens do not occur exactly once in its function: write it anew for the code as it is now
    not applicable    its tests are skipped on this machine

The exit status is 1 if an entry is MISSED, BROKEN or to REWRITE.
"""

import argparse
import ast
import gc
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent

from definitions import Sources, find_text

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mistakes.toml"
# Each test process is a fork of one that has imported what is slow to import, and nothing of minitron.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["torch", "torch.fx.experimental.symbolic_shapes", "numpy", "pytest", "hypothesis", "transformers"]
)
SECONDS = 900  # of the tests of one mistake; a mistake that makes them hang is none that they catch
Ran = tuple[dict[str, str], str]  # see run_tests


@dataclass(frozen=True)
class Mistake:
    """An entry of mistakes.toml, which explains the fields."""

    name: str
    old: str
    new: str
    tests: str
    function: str = ""
    file: str = ""

    def planted(self, sources: Sources) -> tuple[Path, str]:
        """Return the file and its text with the mistake. Raises ValueError if the entry does not fit the code."""
        if self.function:
            if not sources.named(self.function):
                raise ValueError(f"no definition is named {self.function}")
            places = sources.find(self.function, self.old)
        else:
            places = find_text(sources.root / self.file, self.old)
        where, old = self.function or self.file, " ".join(self.old.split())
        if len(places) != 1:
            raise ValueError(f"`{old}` occurs {len(places)} times in {where}, not once")
        file, start, end = places[0]
        text = file.read_text()
        line = text[text.rfind("\n", 0, start) + 1 :]
        margin = line[: len(line) - len(line.lstrip(" "))] if self.function else ""
        planted = text[:start] + indent(self.new, margin).removeprefix(margin) + text[end:]
        if planted == text:
            raise ValueError("it changes nothing")
        if self.function:
            try:
                ast.parse(planted)
            except SyntaxError as error:
                raise ValueError(f"with `{self.new}` {where} is no Python: {error}") from None
        return file, planted


def read(path: Path) -> list[Mistake]:
    return [Mistake(**entry) for entry in tomllib.loads(path.read_text())["mistake"]]


def listed() -> list[str]:
    """Return the project's files: those that git has or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    return [name for name in names if (ROOT / name).is_file()]


class Outcomes:
    """A plugin of pytest: the outcome of each chosen test, "passed", "failed" or "skipped"; "" if it has not run."""

    def __init__(self):
        self.of: dict[str, str] = {}

    def pytest_collection_finish(self, session) -> None:
        self.of |= {item.nodeid: "" for item in session.items}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or not report.passed:
            self.of[report.nodeid] = report.outcome


def run_tests(words: list[str], planted: tuple[Path, str] | None = None, seconds: float = SECONDS) -> Ran:
    """Run pytest with these arguments in a fresh copy of the project.

    planted: a file of the project and the text that it has in the copy. Returns the outcome of each test, and what was
    printed. There are no outcomes if the tests cannot be collected, end their process, or take longer than `seconds`.
    """
    with TemporaryDirectory(prefix="minitron-plant-") as folder:
        for name in listed():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        if planted is not None:
            file, text = planted
            (Path(folder) / file.relative_to(ROOT)).write_text(text)
        (written := Path(folder) / "output").touch()
        process = SERVER.Process(target=_pytest, args=(folder, words))
        process.start()
        process.join(seconds)
        if hung := process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        output = written.read_text(errors="replace")
        if hung or process.exitcode not in (0, 1):
            why = f"it took more than {seconds} s" if hung else f"exit {process.exitcode}"
            return {}, f"{output}\n{why}"
        outcomes = Path(folder) / "outcomes"  # a process that ended before pytest did has left none
        return json.loads(outcomes.read_text()) if outcomes.exists() else {}, output


def _pytest(folder: str, words: list[str]) -> None:
    """Run pytest in a process of its own. It imports minitron from `folder`, and writes two files there."""
    gc.freeze()  # collections leave out all that the server has imported
    os.setsid()
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("output", os.O_WRONLY | os.O_APPEND), stream)
    # Folders of the project have their copies. Others below it are kept: the environment may be there.
    copied = {ROOT / path.relative_to(folder) for path in (Path(folder), *Path(folder).rglob("*/"))}
    sys.path[:] = [folder, *(path for path in sys.path if Path(path) not in copied)]
    # No GPU: the tests of a selection are those of a CPU, on every machine. The rest is for processes that tests start.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
    import pytest
    import torch

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "minitron" for name in sys.modules), "it would run without the mistake"

    options = ["-q", "--disable-warnings", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    status = pytest.main([*options, *words], [outcomes := Outcomes()])
    Path(folder, "outcomes").write_text(json.dumps(outcomes.of))
    sys.exit(int(status))


def verdict(with_it: Ran, without: Ran) -> tuple[str, str]:
    """Return the word of a mistake, and the output that explains it, from its tests with it and without it."""
    found, output = with_it
    states = {without[0].get(test, "not there") for test in found}
    if states == {"skipped"}:
        return "not applicable", "its tests are skipped here"
    if not found:
        return "BROKEN", output
    if not states <= {"passed", "skipped"}:
        return "BROKEN", f"without the mistake its tests are {', '.join(sorted(states))}:\n{without[1]}"
    return "caught" if "failed" in found.values() else "MISSED", output


def plant(planted: dict[Mistake, tuple[Path, str]], jobs: int) -> bool:
    """Print a line for each mistake when its tests have ended; return whether all that apply were caught."""
    started = time.monotonic()
    chosen: dict[str, dict[str, None]] = {}  # by file, the expressions that choose tests of it; "test" chooses all
    for mistake in planted:
        file, _, expression = mistake.tests.partition(" -k ")
        chosen.setdefault(file, {}).update(dict.fromkeys(shlex.split(expression) or ["test"]))

    def run_clean(file: str) -> Ran:
        any_of = " or ".join(f"({expression})" for expression in chosen[file])
        return run_tests([*shlex.split(file), "-k", any_of], seconds=SECONDS * len(chosen[file]))

    with ThreadPoolExecutor(jobs) as pool:
        clean, runs = {}, []
        for mistake, change in planted.items():
            file = mistake.tests.partition(" -k ")[0]
            if file not in clean:  # once, before the first of its mistakes
                clean[file] = pool.submit(run_clean, file)
            runs.append((mistake, pool.submit(run_tests, ["-x", *shlex.split(mistake.tests)], change), clean[file]))
        fine = True
        for mistake, with_it, without in runs:
            word, output = verdict(with_it.result(), without.result())
            took = re.findall(r" in ([\d.]+)s", output)[-1:] or ["-"]  # as pytest says
            print(f"{word:14} {took[0]:>6} s   {mistake.name}", flush=True)
            if word != "caught":
                fine &= word == "not applicable"
                print(f"    {mistake.tests}\n{output.strip()[-3000:]}".replace("\n", "\n    "), flush=True)
    print(f"{len(planted)} mistakes in {time.monotonic() - started:.0f} s")
    return fine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of the name of a mistake")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mistakes at a time, by default as many as there are cores"
    )
    parser.add_argument("--check", action="store_true", help="only list the entries that do not fit the code")
    parser.add_argument("--list", type=Path, default=LIST, help="another file than mistakes.toml")
    args = parser.parse_args(argv)
    chosen = [m for m in read(args.list) if not args.names or any(name in m.name for name in args.names)]
    if not chosen:
        parser.error(f"no mistake in {args.list} has {' or '.join(args.names)} in its name")
    sources = Sources(ROOT, [name for name in listed() if name.endswith(".py") and not name.startswith("tests/")])
    planted, fine = {}, True
    for mistake in chosen:
        try:
            planted[mistake] = mistake.planted(sources)
        except ValueError as error:
            fine = False
            print(f"{'REWRITE':14} {mistake.name}: {error}", flush=True)
    return 0 if (args.check or plant(planted, args.jobs)) and fine else 1


if __name__ == "__main__":
    sys.exit(main())
