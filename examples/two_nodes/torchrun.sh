#!/usr/bin/env bash
# Trains on two nodes by torchrun. Run it on each node with the same arguments; only NODE_RANK differs:
#   MASTER_ADDR=node-0 NODE_RANK=0 examples/two_nodes/torchrun.sh --recipe recipes/dit-xl-2-256.toml --data STORE --out RUN
# STORE and RUN lie on a file system that both nodes share. Run again, it resumes. KILN_JOB_SECRET (openssl rand -hex 32, the
# same on both nodes) keeps strangers from the ranks' notices: docs/distributed.md.
set -euo pipefail
: "${MASTER_ADDR:?expected the name or address of the first node}" "${NODE_RANK:?expected 0 on the first node, 1 on the other}"
exec torchrun --no-python --nnodes "${NODES:-2}" --node-rank "$NODE_RANK" --nproc-per-node "${RANKS_PER_NODE:-8}" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" "${KILN:-kiln}" train "$@"
