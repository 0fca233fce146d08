#!/bin/sh
# Runs a program as N processes on this host: launch_distributed.sh N python train.py [arguments ...]
# PYTHON chooses the interpreter of the launcher (default: python3).
set -eu

if [ "$#" -lt 2 ]; then
    echo "usage: $0 N program [arguments ...], for example: $0 4 python train.py --epochs 10" >&2
    exit 2
fi
nproc=$1
shift
exec "${PYTHON:-python3}" -m cyxjax.launch --nproc-per-node "$nproc" --no-python "$@"
