#!/usr/bin/env bash
# One host of a run on several: starts torchrun, which starts rank.sh once per device. slurm.sbatch runs it on each
# node; without SLURM, run the same line on every host, the one at ADDRESS included:
#   NODES=2 RENDEZVOUS=ADDRESS:PORT launch/node.sh --logs /shared/logs --name NAME --moe-every 2 --experts 8 ...
# PROCESSES sets the number of ranks on this host (default: its GPUs, or 1), RANK_LOGS where each rank's output goes.
set -euo pipefail

fail() { echo "node.sh on $(uname -n): $*" >&2; exit 1; }
[[ ${RENDEZVOUS:-} == *:* && -n ${NODES:-} ]] || fail "set NODES and RENDEZVOUS=ADDRESS:PORT, the same on every host"
command -v torchrun >/dev/null || fail "torchrun is not on PATH; activate the environment first"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -n ${SLURM_JOB_ID:-} ]]; then devices=${SLURM_GPUS_ON_NODE:-1}; else devices=$(python -c 'import torch; print(torch.cuda.device_count() or 1)'); fi
processes=${PROCESSES:-$devices}
threads=$((${SLURM_CPUS_ON_NODE:-$(getconf _NPROCESSORS_ONLN)} / processes))

# The address from which this host reaches the others. A host's own name may resolve to loopback, which torchrun and
# gloo would then announce to everyone.
own=$(python - "$RENDEZVOUS" <<'PY'
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((host, int(port)))  # sends nothing
    print(probe.getsockname()[0])
PY
) || fail "there is no route to $RENDEZVOUS"
head=$([[ ${SLURM_NODEID:-} == 0 || (-z ${SLURM_NODEID:-} && $own == "${RENDEZVOUS%:*}") ]] && echo 1 || echo 0)
interface=$(ip -o -4 addr show to "$own" 2>/dev/null | awk '{print $2; exit}') || true
[[ -z $interface ]] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}

# Caches on this host's own disk: on a shared home, ranks of one job tear each other's files.
cache=${TMPDIR:-/tmp}/openlm-moe-${USER:-$(id -u)}-${SLURM_JOB_ID:-${RENDEZVOUS##*:}}-${SLURM_NODEID:-0}
trap 'rm -rf "$cache"' EXIT
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

torchrun --nnodes="$NODES" --nproc-per-node="$processes" --local-addr="$own" --rdzv-backend=c10d \
    --rdzv-endpoint="$RENDEZVOUS" --rdzv-id="${SLURM_JOB_ID:-openlm-moe}" --rdzv-conf="is_host=$head,join_timeout=900" \
    --no-python -- "$here/rank.sh" "$@"
