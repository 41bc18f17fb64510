"""What `pip install` of a built wheel gives: commands, recipes by name, lines that fit the Python that is active."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minitron.config import installed
from minitron.config.cli import user_errors

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENV = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VENV")}


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, env=ENV)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, without a network: the build backend is the one that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("minitron", "configs", "tools", "benchmarks"):
        shutil.copytree(ROOT / name, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "src")
    pip("wheel", folder / "src", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """The commands of a new environment that holds the wheel, and sees this one's packages but not this checkout."""
    venv = tmp_path_factory.mktemp("empty") / "v"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    paths = {"base": str(venv), "platbase": str(venv)}
    (Path(sysconfig.get_path("purelib", vars=paths)) / "packages.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    return venv / "bin"


def typed(bin_folder: Path, folder: Path, *command: str) -> subprocess.CompletedProcess:
    env = ENV | {"OMP_NUM_THREADS": "1", "PATH": f"{bin_folder}{os.pathsep}{ENV['PATH']}"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_the_wheel_holds_what_users_name(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    for folder in ("configs", "tools"):
        for path in (ROOT / folder).glob("*"):
            if path.suffix in (".py", ".yaml", ".json", ".txt"):
                assert f"minitron/share/{folder}/{path.name}" in names
    assert {f"minitron/planner/{name}.json" for name in ("devices", "published")} <= names
    assert "minitron/share/benchmarks/results/calibration.json" in names
    tables = {f"minitron/interop/{path.name}" for path in (ROOT / "minitron" / "interop").glob("*.*")}
    assert {"minitron/config/names.yaml"} | tables <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "minitron").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py") and not name.startswith("minitron/share/")}
    assert not [name for name in names if not name.startswith(("minitron/", "minitron-"))]


def test_every_command_is_a_program(bin_folder):
    assert PROJECT["scripts"] == dict.fromkeys(installed.COMMANDS, "minitron.config.installed:main")
    tools = {path.name for path in (ROOT / "tools").glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert {Path(program).name for program in installed.COMMANDS.values()} >= tools
    assert {path.name for path in bin_folder.glob("minitron-*")} == set(installed.COMMANDS)
    manual = (ROOT / "tools" / "README.md").read_text()
    for command, program in installed.COMMANDS.items():
        assert f"`{command}`" in manual and f"`{program}`" in manual or program.startswith("minitron.")


def test_a_model_is_trained_by_name_in_an_empty_folder(bin_folder, tmp_path):
    """The issue's command; then the same module under torchrun."""
    sizes = [
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.num_heads=2",
        "model.num_kv_heads=2",
        "data.source=mock",
        "train.steps=2",
    ]
    command = ["minitron-pretrain", "quickstart", *sizes, "log.dir=run", "model.ffn_hidden_size=64"]
    done = typed(bin_folder, tmp_path, *command)
    assert done.returncode == 0 and "iteration        2/       2" in done.stdout, done.stderr
    assert (tmp_path / "run" / "config.yaml").is_file()
    where = "import minitron; print(minitron.__file__)"
    assert str(bin_folder.parent) in typed(bin_folder, tmp_path, "python", "-c", where).stdout
    shown = typed(bin_folder, tmp_path, "python", "-m", "minitron.finetune", "llama3_8b_lora", "--print-config")
    assert "kind: lora" in shown.stdout


def test_tools_are_commands(bin_folder, tmp_path):
    planned = typed(bin_folder, tmp_path, "minitron-plan", "llama3_8b", "--world", "8", "--device", "h100")
    assert planned.returncode == 0 and planned.stdout.startswith("8 x H100: tp 1, pp 2, vp 8"), planned.stderr
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    options = ["--input", "a.jsonl", "--output-prefix", "a", "--tokenizer", "bytes", "--workers", "2"]  # of processes
    made = typed(bin_folder, tmp_path, "minitron-preprocess", *options)
    assert made.returncode == 0 and (tmp_path / "a_text_document.idx").is_file(), made.stderr
    for command, options in (("minitron-plan", []), ("minitron-convert", []), ("minitron-convert", ["import"])):
        shown = typed(bin_folder, tmp_path, command, *options, "--help").stdout
        assert shown.startswith(" ".join([f"usage: {command}", *options])) and "python tools/" not in shown
    wrong = typed(bin_folder, tmp_path, "minitron-check-data", "b_text_document")
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: b_text_document.idx: no such file")
    assert "minitron-preprocess" in wrong.stderr and "tools/" not in wrong.stderr


def test_errors_name_the_commands_of_a_wheel_alone(monkeypatch, capsys):
    """Not in a path, and not what is no command; a checkout's user has the file."""
    text = "tools/plan.py; python tools/plan.py --world 8; (tools/rows.py); /a/tools/plan.py"
    assert installed.typed(text) == text
    monkeypatch.setattr(installed, "SHARE", installed.ROOT)
    expected = "minitron-plan; minitron-plan --world 8; (tools/rows.py); /a/tools/plan.py"
    with pytest.raises(SystemExit), user_errors():
        raise ValueError(text)
    assert capsys.readouterr().err == f"error: {expected}\n"


@pytest.mark.parametrize(
    "argument, message",
    [
        ("llama3-8b", "did you mean the recipe llama3_8b?"),
        pytest.param(
            "configs/llama3_8b.yaml",
            "configs/llama3_8b.yaml cannot be read: no such file or directory; the recipe is found as llama3_8b",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "parallel",
            "parallel is neither a YAML file nor an override; write FILE.yaml or section.key=value\n",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_name_is_one_line(bin_folder, tmp_path, argument, message):
    done = typed(bin_folder, tmp_path, "minitron-pretrain", argument)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("option", ["--help", "--print-config", "--schema"])
def test_the_reader_of_help_may_stop(bin_folder, tmp_path, option):
    """`--help | head -1`, `--print-config | head -1`: nothing on stderr, where a traceback stood."""
    line = f"minitron-pretrain {option} | head -1; exit ${{PIPESTATUS[0]}}"
    done = typed(bin_folder, tmp_path, "bash", "-c", line)
    assert done.stderr == "" and done.stdout.count("\n") == 1 and done.returncode in (0, 141)


# ---- lines that install ----------------------------------------------------------------------------------------------


def test_lines_name_the_python_that_is_active(monkeypatch, tmp_path):
    """With another `python` in PATH the whole path; where minitron is not installed the checkout, not a registry's."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installed, "distribution", lambda name: None)
    assert installed.pip_install("plot") == f"{sys.executable} -m pip install 'minitron[plot]'"
    (tmp_path / "python").symlink_to(sys.executable)
    assert installed.pip_install("plot") == f"{sys.executable} -m pip install 'minitron[plot]'"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    fp8 = installed.pip_install("fp8", "--no-build-isolation")
    assert fp8 == "python -m pip install --no-build-isolation 'minitron[fp8]'"

    def missing(name):
        raise installed.PackageNotFoundError(name)

    monkeypatch.setattr(installed, "distribution", missing)
    assert installed.pip_install("plot") == f"python -m pip install -e '{ROOT}[plot]'"


def test_extras_that_lines_name_exist():
    """And no message of minitron or its tools writes such a line by hand."""
    named = set()
    for path in [*(ROOT / "minitron").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        text = path.read_text()
        named |= set(re.findall(r"(?:pip_install|_installed)\(['\"]([\w-]+)['\"]", text))
        assert "pip install" not in text or path.name in ("installed.py", "kernels.py"), path  # apex is in no registry
    assert named >= {"plot", "tensorboard", "fp8", "flash-attn"} and named <= PROJECT["optional-dependencies"].keys()


# ---- the quickstart's environment, and the lock ----------------------------------------------------------------------

STUB = """#!/usr/bin/env bash
case "$*" in
"-m pip --version") exec {python} "$@" ;;
"-m pip "*) echo "$@" >>{log} ;;
"-c import torch; print"*) echo "{torch}" ;;
*) exec {python} "$@" ;;
esac
"""


@pytest.mark.parametrize("torch", ["", "2.11.0"])
def test_the_environment_has_a_pip(tmp_path, torch):
    """Of its own; or, where it sees the packages of a container's Python, a command that runs theirs for it."""
    stub, log, venv = tmp_path / "python3", tmp_path / "log", tmp_path / "venv"
    stub.write_text(STUB.format(python=sys.executable, log=log, torch=torch))
    stub.chmod(0o755)
    env = ENV | {"PYTHON": str(stub), "VENV": str(venv)}
    done = subprocess.run(
        ["bash", "-euc", "source launch/venv.sh; use_venv plot"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first, second = log.read_text().splitlines()
    assert first.endswith(" pip setuptools>=77") and second.endswith(" -e .[plot]")
    if torch:
        said = subprocess.run([venv / "bin" / "pip", "--version"], env=ENV, capture_output=True, text=True)
        assert said.stdout.startswith("pip "), said.stderr
        prefix = subprocess.run([venv / "bin" / "pip", "inspect"], env=ENV, capture_output=True, text=True).stdout
        assert '"python_full_version"' in prefix


def test_the_lock_has_every_package_at_the_tested_version():
    """All that the core and the extras bring here, at constraints.txt's versions, each with a hash."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(re.fullmatch(r"([\w-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups() for line in lines)
    assert list(locked) == sorted(locked) and len(locked) == len(lines)
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert {name: pins[name] for name in locked.keys() & pins.keys()} == {
        name: version for name, version in locked.items() if name in pins
    }
    assert [name for name in locked.keys() - pins.keys() if not name.startswith(("nvidia-", "cuda-"))] == []
    wanted = PROJECT["dependencies"] + [
        line for name in ("plot", "tensorboard") for line in PROJECT["optional-dependencies"][name]
    ]
    seen, todo = set(), [Requirement(line) for line in wanted]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or not (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        todo += map(Requirement, distribution(name).requires or [])
    assert seen <= locked.keys()
