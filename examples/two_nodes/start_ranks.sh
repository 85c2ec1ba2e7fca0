#!/bin/sh
# Starts the ranks of one node where there is no torchrun, as in Kiln's containers: a process for each GPU.
#   NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDR=node-0 start_ranks.sh train --recipe ... --data STORE --out RUN
# TERM goes to all of them: they save a checkpoint. If one fails, the others notice and end; so does this, with its status.
set -eu
: "${NODES:?}" "${NODE_RANK:?}" "${RANKS_PER_NODE:?}" "${MASTER_ADDR:?}"
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}" WORLD_SIZE=$((NODES * RANKS_PER_NODE)) LOCAL_WORLD_SIZE="$RANKS_PER_NODE"
processes="" interrupted=no
trap 'interrupted=yes; kill -TERM $processes 2>/dev/null || :' TERM INT
number=0
while [ "$number" -lt "$RANKS_PER_NODE" ]; do
  RANK=$((NODE_RANK * RANKS_PER_NODE + number)) LOCAL_RANK=$number "${KILN:-kiln}" "$@" &
  processes="$processes $!"
  number=$((number + 1))
done
status=0
for process in $processes; do
  # A signal ends `wait`, but not the process. 127: it had ended before, when the signal came.
  before=127
  while :; do
    interrupted=no code=0
    wait "$process" || code=$?
    [ $code != 127 ] || code=$before
    [ $interrupted = yes ] || break
    before=$code
  done
  [ $code = 0 ] || status=$code
done
exit "$status"
