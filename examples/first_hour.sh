#!/usr/bin/env bash
# The commands of docs/first_hour.md, one after another, on two CPU cores: data, plan, features, training, resuming,
# sampling, evaluation, a page that compares two runs. Running it again goes on where it stopped.
#   examples/first_hour.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-first_hour}
kiln() { echo "\$ kiln $*"; build/kiln "$@"; }
mkdir -p "$folder"

[ -d "$folder/pictures" ] || build/kiln-demo-data --out "$folder/pictures" --classes 'faces=face-*,flags=country-flag,signs=arrow+zodiac'
model="--model dit --hidden-size 128 --depth 4 --num-heads 4 --patch-size 4 --image-size 32 --objective flow --compute-dtype bf16"

# shellcheck disable=SC2086
{
  kiln plan $model --data synthetic --autoencoder pixels --num-classes 3 --global-batch 32
  kiln extract --data "$folder/pictures" --autoencoder pixels --image-size 32 --out "$folder/store"
  train="$model --data $folder/store --global-batch 32 --lr 1e-3 --ema-decay 0.99 --log-every 100 --num-sampling-steps 20
    --cfg-scale 2 --evaluate-every 200 --evaluate-images 64 --evaluate-reference $folder/pictures"
  kiln train $train --out "$folder/run" --max-steps 200
  kiln train $train --out "$folder/run" --max-steps 400
  kiln train $train --out "$folder/other" --max-steps 400 --lr 3e-4
}
kiln sample --run "$folder/run" --num-images 12 --cfg-scale 2 --num-sampling-steps 20 --seed 1 --out "$folder/samples" --grid
kiln evaluate "$folder/run" --reference "$folder/pictures" --crop 32 --net random --num-pictures 96 --cfg-scale 2 \
  --num-sampling-steps 20 --random-labels --out "$folder/result.json"
kiln report "$folder/run" "$folder/other" --out "$folder/runs.html"
