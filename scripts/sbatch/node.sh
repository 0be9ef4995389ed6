#!/usr/bin/env bash
# Run the launcher of one node, and pass SIGTERM on to it.
#
#   scripts/sbatch/node.sh MARKER torchrun-command ...
#
# Slurm signals every process of a task. torchrun must get the signal once, because a second one cuts short the shutdown
# in which the ranks save, so it runs in a session of its own. A stopped launcher has an exit code other than 0 although
# nothing is wrong. With that code, srun --kill-on-bad-exit would end the nodes that still save, so this script creates
# MARKER, a file on the shared file system, and exits with 0.
set -uo pipefail
marker="$1" stopping='' launcher=''
# shellcheck disable=SC2329 # called by trap
stop() {
    [[ -z "$stopping" ]] || return 0
    stopping=1
    : >"$marker"
    if [[ -n "$launcher" ]]; then kill -TERM "$launcher" 2>/dev/null; fi
}
# First of all, because the signal may come while the step starts.
trap stop TERM

if [[ "$*" == -h || "$*" == --help ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit 0
fi
shift
# The job was told to stop before this node could be.
[[ ! -e "$marker" ]] || exit 0

# The rank of this node is its index in the list of the job's nodes.
export PET_NODE_RANK="$SLURM_NODEID"
# Each process has a connection to every other one, and the launcher's store has two to every rank. In a large job,
# these are more files than the usual soft limit of 1024 allows.
files="$(ulimit -Hn)"
# No limit is not a value that Linux accepts as the soft one.
[[ "$files" != unlimited ]] || files=1048576
ulimit -Sn "$files"
setsid "$@" &
launcher=$!
# The signal may have come before the launcher was there.
[[ -z "$stopping" ]] || kill -TERM "$launcher" 2>/dev/null
while true; do
    wait "$launcher"
    code=$?
    # wait also returns when a signal comes.
    kill -0 "$launcher" 2>/dev/null || break
done
[[ -z "$stopping" ]] || exit 0
exit "$code"
