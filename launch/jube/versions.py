"""What the submission of a benchmark has to name, a line each: versions of the libraries, and commits.

python launch/jube/versions.py
"""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = {"Transformer Engine": "transformer_engine", "flash-attn": "flash-attn", "Triton": "triton"}


def main() -> None:
    found = {
        "Python": platform.python_version(),
        "PyTorch": f"{torch.__version__}, commit {torch.version.git_version}",
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        **{name: version(package) for name, package in PACKAGES.items()},
        "minitron": f"{version('minitron') or 'not installed'}, {commit(Path(__file__).resolve().parent)}",
    }
    for name, value in found.items():
        print(f"{name}: {value or 'none'}", flush=True)


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str:
    """The commit of a checkout, and whether files of it were changed."""
    try:
        head, changes = (
            subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "no git checkout"
    return f"commit {head}{' and changes' if changes else ''}"


if __name__ == "__main__":
    main()
