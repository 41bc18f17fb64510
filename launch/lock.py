"""Write requirements.lock: every package that minitron and its extras `plot` and `tensorboard` bring, with its hash.

    python launch/lock.py > requirements.lock            after a change of constraints.txt; asks the package index

Versions are those of constraints.txt. Hashes are of the files that pip takes for this Python and this machine, so the
lock is for the Python and Linux that its first line names; others install with `-c constraints.txt`.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["plot"] + extras["tensorboard"]
    # From the public index alone: a wheel of this machine has another hash under the same version.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary", ":all:", "-c", str(ROOT / "constraints.txt"), "setuptools", *wanted]
    found = subprocess.run(command, env=environ | {"PIP_CONFIG_FILE": os.devnull}, stdout=subprocess.PIPE, check=True)
    python = "{}.{}".format(*sys.version_info)
    print(f"# Made by launch/lock.py for Python {python} on Linux {platform.machine()}.")
    print("# pip install --require-hashes -r requirements.lock && pip install --no-deps --no-build-isolation .")
    pins = {}
    for package in json.loads(found.stdout)["install"]:
        name = re.sub(r"[-_.]+", "-", package["metadata"]["name"]).lower()
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        pins[name] = f"{name}=={package['metadata']['version']} --hash=sha256:{digest}"
    print("\n".join(pins[name] for name in sorted(pins)))


if __name__ == "__main__":
    main()
