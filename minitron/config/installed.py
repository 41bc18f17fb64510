"""Make an installed minitron as usable as a checkout: recipes by name, tools as commands, and hints to install more.

    minitron-pretrain llama3_8b train.steps=20      python -m minitron.pretrain configs/llama3_8b.yaml train.steps=20
    minitron-plan llama3_8b --world 8 --device h100 python tools/plan.py configs/llama3_8b.yaml ...

A wheel holds the checkout's configs/, tools/ and benchmarks/ under minitron/share, where a checkout has them beside
minitron/. torchrun starts the ranks in both cases: torchrun ... -m minitron.pretrain llama3_8b.
"""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path

SHARE = Path(__file__).parents[1] / "share"
ROOT = SHARE if SHARE.is_dir() else Path(__file__).parents[2]
COMMANDS = {
    "minitron-pretrain": "minitron.pretrain",
    "minitron-finetune": "minitron.finetune",
    "minitron-plan": "tools/plan.py",
    "minitron-check-job": "tools/check_job.py",
    "minitron-draw-pipeline": "tools/draw_pipeline.py",
    "minitron-train-tokenizer": "tools/train_tokenizer.py",
    "minitron-preprocess": "tools/preprocess_data.py",
    "minitron-check-data": "tools/check_data.py",
    "minitron-preview-chat": "tools/preview_chat.py",
    "minitron-convert": "tools/convert_hf.py",
    "minitron-convert-megatron": "tools/convert_megatron.py",
    "minitron-inspect": "tools/inspect_checkpoint.py",
    "minitron-generate": "tools/generate.py",
    "minitron-metrics": "tools/training_metrics.py",
    "minitron-plot": "tools/plot_run.py",
    "minitron-stragglers": "tools/stragglers.py",
    "minitron-tour": "tools/tour.py",
}


def main() -> None:
    """Run the program that the command's name, which is sys.argv[0], stands for, as if it were started itself."""
    program = COMMANDS[Path(sys.argv[0]).stem]
    if program.endswith(".py"):
        runpy.run_path(str(ROOT / program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def typed(text: str) -> str:
    """Name the commands of a wheel, which has no tools/ folder: minitron-plan for python tools/plan.py."""
    names = {program: command for command, program in COMMANDS.items()} if ROOT == SHARE else {}
    return re.sub(r"(?<![\w/])(?:python )?(tools/\w+\.py)", lambda found: names.get(found[1], found[0]), text)


def recipe(name: str) -> Path | None:
    """Return the file of the recipe of that name, as in llama3_8b; None if there is none."""
    path = ROOT / "configs" / f"{name}.yaml"
    return path if re.fullmatch(r"\w{1,100}", name) and path.is_file() else None  # no file has a longer name


def list_recipes() -> str:
    """Write a line for each recipe: its name, and the first sentence of its comment."""
    lines = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        comments = takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines()[1:])
        sentence = re.split(r"[.;:](?: |$)", " ".join(line[2:] for line in comments))[0]
        lines.append(f"{path.stem:18} {sentence}")
    return "\n".join(lines)


def similar_recipe(argument: str) -> str | None:
    """Return the name of the recipe that an argument or a file's name may mean."""
    names = [path.stem for path in (ROOT / "configs").glob("*.yaml")]
    return next(iter(get_close_matches(Path(argument).stem, names, 1, 0.7)), None)


def pip_install(extra: str, *options: str) -> str:
    """Return the command that adds an extra's packages to the Python that runs: `python` only if that is this one."""
    here = shutil.which("python") == sys.executable
    try:
        distribution("minitron")
        what = [f"minitron[{extra}]"]
    except PackageNotFoundError:  # a checkout that is not installed: the registry's minitron may be another
        what = ["-e", f"{ROOT}[{extra}]"]
    return shlex.join(["python" if here else sys.executable, "-m", "pip", "install", *options, *what])
