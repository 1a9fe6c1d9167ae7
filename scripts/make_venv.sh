#!/usr/bin/env bash
# Makes a virtual environment with torch in it, or completes a half-made one: make_venv.sh FOLDER [PYTHON]
# Most of what is installed is never imported: Python compiles what is, at its first import.
set -euo pipefail
folder=$1
python=${2:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "make_venv.sh: offload needs Python 3.10 or newer, and $python is $("$python" --version);" \
        "name another: make PYTHON=python3.12 ..." >&2
    exit 1
fi
if ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$folder"
fi

if ! "$folder/bin/python" -c 'import torch' 2>/dev/null; then
    # Where this release lies in a local wheel folder it is the small CPU build; whatever the newest
    # release is, it would be gigabytes of CUDA libraries.
    if [ "$("$folder/bin/python" -c 'import sys; print(sys.version_info[:2])')" != "(3, 11)" ] ||
        ! "$folder/bin/python" -m pip install --no-compile torch==2.13.0; then
        "$folder/bin/python" -m pip install --no-compile torch
    fi
fi
