#!/usr/bin/env bash
# One rank, as torchrun starts it. Its output goes to $RANK_LOGS/rank_N.log, rank 0's to the screen as well; if it fails, a
# line with time, rank, exit code and host goes to $RANK_LOGS/failures, so that the first one can be named.
set -uo pipefail

output=${RANK_LOGS:-rank_logs}
mkdir -p "$output"
log=$output/rank_$RANK.log
# A signal reaches the whole process group: this shell and tee outlive it, the trainer decides.
trap : TERM INT USR1
if [[ $RANK == 0 ]]; then exec > >(trap '' TERM INT USR1 && exec tee -a "$log") 2>&1; else exec >>"$log" 2>&1; fi

python -m openlm_moe.main "$@" &
while kill -0 $! 2>/dev/null; do wait $!; done # a trapped signal ends a wait early
wait $!
code=$?
[[ $code == 0 ]] || echo "$(date +%s.%N) $RANK $code ${SLURMD_NODENAME:-$(uname -n)}" >>"$output/failures"
exit $code
