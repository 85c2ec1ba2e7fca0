#!/usr/bin/env bash
# The commands of docs/first_hour.md, one after another, on two CPU cores: pictures, plan, published weights, features,
# training, resuming, sampling, evaluation, a page that compares two runs. Running it again goes on where it stopped.
#   examples/first_hour.sh [FOLDER [STEPS]]     (default: first_hour 400)
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-first_hour} steps=${2:-400}
build=${KILN_BUILD:-build}
kiln() { echo "\$ kiln $*"; "$build/kiln" "$@"; }
half=$(((steps + 1) / 2)) often=$(((steps + 7) / 8))
mkdir -p "$folder"

if [ ! -d "$folder/pictures" ]; then
  echo "\$ build/kiln-demo-data --out $folder/pictures --classes faces=face-*,flags=country-flag,signs=arrow+zodiac"
  "$build/kiln-demo-data" --out "$folder/pictures" --classes 'faces=face-*,flags=country-flag,signs=arrow+zodiac'
fi
model="--model dit --hidden-size 64 --depth 4 --num-heads 4 --patch-size 4 --image-size 32 --objective flow --compute-dtype bf16"
train="$model --data $folder/store --global-batch 32 --lr 1e-3 --ema-decay 0.9 --log-every $often --cfg-scale 2
  --num-sampling-steps 10 --evaluate-every $half --evaluate-images 24 --evaluate-reference $folder/pictures"

# shellcheck disable=SC2086
kiln plan $model --data synthetic --autoencoder pixels --num-classes 3 --global-batch 32
kiln download --list
kiln download sd-vae-ft-mse --offline || echo "(not fetched before: without --offline it is)"
kiln sample --model DiT-XL/2-512 --seed 1 --offline || echo "(not fetched before: without --offline it is)"
kiln extract --data "$folder/pictures" --autoencoder pixels --image-size 32 --out "$folder/store"
# shellcheck disable=SC2086
{
  kiln train $train --out "$folder/run" --max-steps $half
  kiln train $train --out "$folder/run" --max-steps $steps
  kiln train $train --out "$folder/other" --max-steps $steps --lr 3e-4
}
kiln sample --run "$folder/run" --num-images 12 --cfg-scale 2 --num-sampling-steps 20 --seed 1 --out "$folder/samples" --grid
kiln evaluate "$folder/run" --reference "$folder/pictures" --crop 32 --net random --num-pictures 24 --cfg-scale 2 \
  --num-sampling-steps 20 --random-labels --out "$folder/result.json"
kiln report "$folder/run"
kiln report "$folder/run" "$folder/other" --out "$folder/runs.html"
