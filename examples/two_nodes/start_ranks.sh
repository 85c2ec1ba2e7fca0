#!/bin/sh
# Starts the ranks of one node where there is no torchrun, as in Kiln's containers: a process for each GPU.
#   NODES=2 NODE_RANK=0 RANKS_PER_NODE=8 MASTER_ADDR=node-0 start_ranks.sh train --recipe ... --data STORE --out RUN
# TERM goes to all of them: they save a checkpoint. If one fails, the others notice and end; so does this, with its status.
set -eu
: "${NODES:?}" "${NODE_RANK:?}" "${RANKS_PER_NODE:?}" "${MASTER_ADDR:?}"
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}" WORLD_SIZE=$((NODES * RANKS_PER_NODE)) LOCAL_WORLD_SIZE="$RANKS_PER_NODE"
processes=""
trap 'kill -TERM $processes 2>/dev/null || :' TERM INT
number=0
while [ "$number" -lt "$RANKS_PER_NODE" ]; do
  RANK=$((NODE_RANK * RANKS_PER_NODE + number)) LOCAL_RANK=$number "${KILN:-kiln}" "$@" &
  processes="$processes $!"
  number=$((number + 1))
done
status=0
for process in $processes; do
  ended=no
  while [ $ended = no ]; do
    code=0
    wait "$process" || code=$?
    # A signal ends `wait`, but not the process.
    if [ $code = 0 ] || ! kill -0 "$process" 2>/dev/null; then ended=yes; fi
  done
  [ $code = 0 ] || status=$code
done
exit "$status"
