#!/bin/bash
# Train a variant of nestling and its draft: variant.sh hybrid|unwindowed|mtp FOLDER [limit of the target's training, and
# of the draft's, in seconds]. Needs build/nestling/ of corpus.py and tokenizer.py. 2 minutes each on one H200.
set -e
kind=$1 folder=$2 target_limit=${3:+--limit-s $3} draft_limit=${4:+--limit-s $4}
here=$(dirname "$0") python=${PYTHON:-python3}
target=$kind draft=$kind-eagle3 draft_kind=eagle3
if [ "$kind" = mtp ]; then target=dense draft=mtp draft_kind=mtp; fi
$python "$here/target.py" --variant $target --out "$folder/nestling-$target" --steps 1500 --batch 16 --dropout 0 \
  --learning-rate 2e-3 --warmup 100 --every 150 --no-compile --no-plot $target_limit
$python "$here/head.py" --kind $draft_kind --target "$folder/nestling-$target" --out "$folder/nestling-$draft" \
  --generated-rows 2048 --heldout-rows 96 --prompt-lengths 512 1024 --temperatures 0.8 --row 1280 --corpus-row 1536 \
  --steps 1000 --batch 8 --corpus-batch 4 --ttt 5 --warmup 100 --every 200 --no-compile --no-plot $draft_limit
