#!/usr/bin/env bash
# Are the published FIDs of DiT reached? Fetches DiT-XL/2's weights for 256 and 512 px, the autoencoder, Inception and the
# reference files of ADM, draws 50,000 pictures of each as the paper did (250 DDPM steps, which kiln sample takes by itself;
# guidance 1.5, classes at random) and compares: 2.27 at 256 px, 3.04 at 512. Needs GPUs and the network; on one A100 some
# days. Run again, it goes on.
#   examples/check_published_fids.sh [NUMBER_OF_GPUS [FOLDER]]
# FID_TOLERANCE (0.1) says what counts as equal; FID_IMAGES, FID_DEVICE and FID_OPTIONS (of kiln sample) rehearse it.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-1} folder=${2:-fid} kiln=${KILN_BUILD:-build}/kiln
images=${FID_IMAGES:-50000} device=${FID_DEVICE:-cuda} tolerance=${FID_TOLERANCE:-0.1}

decoder=$("$kiln" download sd-vae-ft-ema)
inception=$("$kiln" download inception-2015-12-05)
verdict=0
# check SIZE PUBLISHED_FID
check() {
  local out=$folder/$1 weights reference fid said=ok
  weights=$("$kiln" download "DiT-XL-2-$1x$1")
  reference=$("$kiln" download "adm-imagenet-$1")
  # shellcheck disable=SC2086
  "$kiln" sample --weights "$weights" --model DiT-XL/2 --image-size "$1" --autoencoder "$decoder" --num-images "$images" \
    --random-labels --cfg-scale 1.5 --seed 0 --batch 64 --tf32 --device "$device" --nproc "$gpus" \
    --npz "$out/samples.npz" --no-png --out "$out" ${FID_OPTIONS:-}
  "$kiln" evaluate "$out/samples.npz" --reference "$reference" --net inception --net-weights "$inception" --metrics fid \
    --device "$device" --nproc "$gpus" --batch 128 --out "$out/result.json"
  fid=$(grep -o '"fid": *[0-9.eE+-]*' "$out/result.json" | grep -o '[0-9.eE+-]*$')
  awk -v a="$fid" -v b="$2" -v most="$tolerance" 'BEGIN {exit !(a - b <= most && b - a <= most)}' || said="not ok" verdict=1
  echo "DiT-XL/2 at $1 px: FID $fid, published $2: $said"
}
check 256 2.27
check 512 3.04
[ "$images" = 50000 ] || echo "of $images pictures: the published figures are of 50000"
exit $verdict
