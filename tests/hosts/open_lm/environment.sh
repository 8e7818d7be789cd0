#!/bin/sh
# make test-open-lm OPEN_LM_SOURCE=DIR: a venv with the open_lm checked out in DIR and what it imports, our tests in it,
# and their record in results/open_lm/. The versions are those that were tried together.
set -eu
source=${1:-}
[ -d "$source/open_lm" ] || {
    echo "OPEN_LM_SOURCE='$source' is no checkout of mlfoundations/open_lm; give its folder: make test-open-lm OPEN_LM_SOURCE=DIR" >&2
    exit 2
}
venv=.venv-open-lm
if [ ! -e "$venv/ready" ]; then
    "$(sh .ci/find-python)" -m venv "$venv"
    install="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
    $install torch==2.13.0 numpy==2.4.6 webdataset==0.2.86 transformers==4.49.0 pandas fsspec tqdm pyyaml Pillow \
        braceexpand huggingface_hub pytest pytest-timeout hypothesis
    $install --no-deps xformers==0.0.35 "$source"
    touch "$venv/ready"
fi
exec "$venv/bin/python" tests/hosts/open_lm/record.py "$source"
