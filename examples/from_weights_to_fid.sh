#!/usr/bin/env bash
# Published weights, 50,000 samples and the numbers of ADM's evaluator, as the DiT paper reports them. On a GPU; needs
# the Inception weights and ADM's reference file, which their authors publish (docs/evaluation.md).
#   examples/from_weights_to_fid.sh INCEPTION.pth VIRTUAL_imagenet256_labeled.npz [NUMBER_OF_GPUS]
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 1; }
inception=$1 reference=$2 gpus=${3:-1}

weights=$(build/kiln download DiT-XL-2-256x256)
decoder=$(build/kiln download sd-vae-ft-ema)
build/kiln sample --weights "$weights" --model DiT-XL/2 --autoencoder "$decoder" --num-images 50000 --random-labels \
  --cfg-scale 1.5 --num-sampling-steps 250 --seed 0 --batch 64 --tf32 --device cuda --nproc "$gpus" \
  --npz fid/samples.npz --no-png --out fid
build/kiln evaluate fid/samples.npz --reference "$reference" --net inception --net-weights "$inception" \
  --device cuda --nproc "$gpus" --batch 128 --out fid/result.json
