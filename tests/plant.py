"""Plant the mistakes of mistakes.toml in the code, one at a time, and see that the tests catch each.

    python tests/plant.py [--jobs 2] [NAME...]          NAME: a part of an entry's name; without one, all of them

Tests prove nothing as long as nobody has seen them fail. The work is done in temporary copies of what git lists, so the
tree that you edit is never touched. For each entry one line says what became of it:

    caught            its tests fail with the mistake, and pass without it
    MISSED            its tests pass with the mistake: they need another assertion
    BROKEN            its tests fail without any mistake, or could not be collected with this one, or hung
    not applicable    its tests are skipped on this machine, or its text is not in the file just once any more

The exit status is 1 if a mistake was missed or a test is broken.
"""

import argparse
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

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mistakes.toml"
# Each test process is a fork of one that has imported what is slow to import, and nothing of minitron.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "numpy", "pytest", "hypothesis", "transformers"])
SECONDS = 900  # of the tests of one mistake; a mistake that makes them hang is none that they catch


@dataclass(frozen=True)
class Mistake:
    """An entry of mistakes.toml, which explains the fields."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    def problem(self) -> str:
        """Say why the entry does not fit the code, or ''."""
        count = (ROOT / self.file).read_text().count(self.old) if (ROOT / self.file).is_file() else 0
        if count != 1:
            return f"its text occurs {count} times in {self.file}"
        return "it changes nothing" if self.old == self.new else ""


def read(path: Path) -> list[Mistake]:
    return [Mistake(**entry) for entry in tomllib.loads(path.read_text())["mistake"]]


def run_tests(tests: str, mistake: Mistake | None = None) -> tuple[str, str]:
    """Run these tests in a fresh copy, with the mistake. Returns (passed, failed, skipped or broken; their output)."""
    with TemporaryDirectory(prefix="minitron-plant-") as folder:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        if mistake is not None:
            target = Path(folder) / mistake.file
            target.write_text(target.read_text().replace(mistake.old, mistake.new))
        (written := Path(folder) / "output").touch()
        process = SERVER.Process(target=_pytest, args=(folder, shlex.split(tests)))
        process.start()
        process.join(SECONDS)
        if hung := process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        output = written.read_text(errors="replace")
    if hung or process.exitcode not in (0, 1):
        return "broken", f"{output}\n{f'it took more than {SECONDS} s' if hung else f'exit {process.exitcode}'}"
    found = re.search(r"\d (failed|error|passed)", output) or [None, "skipped"]
    if process.exitcode:
        return "failed" if found[1] in ("failed", "error") else "broken", output
    return found[1], output


def _pytest(folder: str, tests: list[str]) -> None:
    """Run in a process of its own: pytest, which imports all from `folder` and writes to its file "output"."""
    os.setsid()
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open("output", os.O_WRONLY | os.O_APPEND), stream)
    sys.path[:] = [folder, *(path for path in sys.path if ROOT not in (Path(path), *Path(path).parents))]
    # No GPU: the tests of a selection are those of a CPU, on every machine. The rest is for processes that tests start.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
    import pytest
    import torch

    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "minitron" for name in sys.modules), "it would run without the mistake"

    options = ["-x", "-q", "--disable-warnings", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    sys.exit(int(pytest.main([*options, *tests])))


def plant(mistakes: list[Mistake], jobs: int) -> bool:
    """Print a line for each mistake as it is known; return whether all that apply were caught."""
    started, clean = time.monotonic(), {}

    def verdict(mistake: Mistake) -> tuple[str, str]:
        if problem := mistake.problem():
            return "not applicable", problem
        without, output = clean[mistake.tests].result()
        if without == "skipped":
            return "not applicable", "its tests are skipped here"
        if without != "passed":
            return "BROKEN", f"without the mistake its tests are {without}:\n{output}"
        found, output = run_tests(mistake.tests, mistake)
        return {"failed": "caught", "broken": "BROKEN"}.get(found, "MISSED"), output

    with ThreadPoolExecutor(jobs) as pool:
        verdicts = []
        for mistake in mistakes:
            if mistake.tests not in clean:  # once, before the first mistake that they are to catch
                clean[mistake.tests] = pool.submit(run_tests, mistake.tests)
            verdicts.append(pool.submit(verdict, mistake))
        fine = True
        for mistake, future in zip(mistakes, verdicts):
            word, output = future.result()
            took = re.findall(r" in ([\d.]+)s", output)[-1:] or ["-"]  # as pytest says
            print(f"{word:14} {took[0]:>6} s   {mistake.name}", flush=True)
            if word != "caught":
                fine &= word == "not applicable"
                print(f"    {mistake.tests}\n{output.strip()[-3000:]}".replace("\n", "\n    "), flush=True)
    print(f"{len(mistakes)} mistakes in {time.monotonic() - started:.0f} s")
    return fine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of the name of a mistake")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="mistakes at a time, by default as many as there are cores"
    )
    parser.add_argument("--list", type=Path, default=LIST, help="another file than mistakes.toml")
    args = parser.parse_args(argv)
    chosen = [m for m in read(args.list) if not args.names or any(name in m.name for name in args.names)]
    if not chosen:
        parser.error(f"no mistake in {args.list} has {' or '.join(args.names)} in its name")
    return 0 if plant(chosen, args.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
