#!/usr/bin/env bash
# Trains on this machine, one process per device: launch/local.sh --moe-every 2 --experts 8 ...
# PROCESSES=2 sets their number; without a GPU it is 1.
set -euo pipefail

command -v torchrun >/dev/null || { echo "local.sh: torchrun is not on PATH; activate the environment first" >&2; exit 1; }
processes=${PROCESSES:-$(python -c 'import torch; print(torch.cuda.device_count() or 1)')}
threads=$(($(getconf _NPROCESSORS_ONLN) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

exec torchrun --standalone --nproc-per-node="$processes" -m -- openlm_moe.main "$@"
