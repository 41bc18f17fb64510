# To be sourced from the root of the checkout: `use_venv EXTRAS` makes or reuses a virtual environment with minitron and
# its EXTRAS (as in `plot,test`) installed at the pinned versions, and sets `python` to its interpreter.
#
#   VENV     where it lives (default .venv)
#   PYTHON   the interpreter to make it from (default: the first Python 3.11 or newer among the usual names)
#
# A GPU container brings a torch built for its driver and libraries. If $PYTHON has such a torch, the environment sees
# $PYTHON's packages and keeps them; only what is missing is installed. --system-site-packages would not do: where
# $PYTHON itself lives in a virtual environment, as in many containers, it shows the packages of the wrong Python.
[ "${1:-}" != --help ] || exec sed -n '/^#!/d;/^#SBATCH/d;/^#/!q;s/^# \{0,1\}//p' "$0"

fail() {
    echo "$0: ${*//[[:cntrl:]]/ }" >&2
    exit 1
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "${PYTHON:-python3} is no Python 3.11 or newer; install one, or name one: PYTHON=/path/to/python3.12"
}

# The version of a torch built for GPUs, or nothing.
gpu_torch() {
    local code='import torch; print(torch.__version__ if torch.version.cuda or torch.version.hip else "")'
    "$1" -c "$code" 2>/dev/null || true
}

# Without ensurepip: its setuptools would hide the one of $base, and Debian's Python has none. use_venv adds pip.
make_venv() {
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
        fail "VENV=$VENV is no virtual environment and not empty; remove it or name another place"
    fi
    "$1" -m pip --version >/dev/null 2>&1 || fail "$1 has no pip; install it (Debian, Ubuntu: apt install python3-pip)"
    "$1" -m venv --without-pip "$VENV"
}

# Shows $base's packages to the environment, behind its own, and prints the pins for what $base does not have.
share_packages() {
    local base=$1 site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base" -c 'import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")' \
        >"$site/base_packages.pth"
    "$base" - constraints.txt <<'END'
import re, sys
from importlib.metadata import distributions, version

present = {re.sub(r"[-_.]+", "-", d.name).lower() for d in distributions()}
print(f"torch=={version('torch')}")
for line in open(sys.argv[1], encoding="utf-8"):
    if "==" in line and line.split("==")[0] not in present:
        print(line, end="")
END
}

use_venv() {
    local extras=$1 base stamp wanted torch pins
    VENV=${VENV:-.venv}
    base=$(find_python)
    stamp=$VENV/installed-${extras//,/-}
    # What the environment was made of. As long as nothing of it changes, the environment is ready.
    wanted="$PWD $base $("$base" -V) $(cat pyproject.toml constraints.txt launch/venv.sh | cksum)"
    python=$VENV/bin/python
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    make_venv "$base"
    pins=constraints.txt
    torch=$(gpu_torch "$base")
    if [ -n "$torch" ]; then
        pins=$VENV/pins.txt
        share_packages "$base" >"$pins"
        echo "Installing minitron[$extras] into $VENV beside torch $torch of $base ..."
    else
        echo "Installing minitron[$extras] and its own torch into $VENV; this takes a few minutes ..."
    fi
    # The build runs in the environment itself: with build isolation pip would fetch an unpinned setuptools.
    local install=("$base" -m pip --python "$python" install --quiet --disable-pip-version-check -c "$pins")
    "${install[@]}" pip "setuptools>=77" && "${install[@]}" --no-build-isolation -e ".[$extras]" ||
        fail "the installs failed, see above; once the cause is gone, the same command goes on in $VENV"
    # One that sees $base's packages has its pip, but no command of that name, and the one in PATH would install elsewhere.
    [ -e "$VENV/bin/pip" ] ||
        install -m 755 <(printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m pip "$@"\n') "$VENV/bin/pip"
    echo "$wanted" >"$stamp"
}
