#!/usr/bin/env bash
# Run the launcher of one node, and hand SIGTERM to it.
#
#   scripts/sbatch/node.sh MARKER torchrun-command ...
#
# Slurm signals every process of a task; torchrun must get the signal once, or its second copy cuts the shutdown short
# in which the ranks save. So it runs in a session of its own. A stopped launcher ends with an exit code that is not 0
# although all is well: MARKER, a file on the shared file system, says so instead, and the exit code is 0, because
# srun --kill-on-bad-exit would end the nodes that still save.
set -uo pipefail
if [[ "$*" == -h || "$*" == --help ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi

marker="$1"
shift
stopping=

# shellcheck disable=SC2329 # called by trap
stop() {
    [[ -z "$stopping" ]] || return 0
    stopping=1
    : >"$marker"
    if [[ -n "$launcher" ]]; then kill -TERM "$launcher" 2>/dev/null; fi
}

launcher=
trap stop TERM
# Static rendezvous: this node's place in the list of the job's nodes.
export PET_NODE_RANK="$SLURM_NODEID"
setsid "$@" &
launcher=$!
# The signal may have come before there was anything to hand it to.
[[ -z "$stopping" ]] || kill -TERM "$launcher" 2>/dev/null
while true; do
    wait "$launcher"
    code=$?
    # wait also ends when a signal comes.
    kill -0 "$launcher" 2>/dev/null || break
done
[[ -z "$stopping" ]] || exit 0
exit "$code"
