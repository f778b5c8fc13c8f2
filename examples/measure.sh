#!/usr/bin/env bash
# Measures what examples/results holds of one machine, with the installed package:
#
#   examples/measure.sh cpu FOLDER               # some minutes on 2 cores
#   examples/measure.sh h200 FOLDER              # some minutes on an H200
#   examples/measure.sh h200 FOLDER speed host   # some of its steps
#
# VARIANTS names the folder of libraries that `python benchmarks/run.py ablation --build-only`
# made, for the step ablation; COMMIT is recorded where this does not run from a checkout. Steps
# are commands of their own, and a failing one does not stop the others. Afterwards
# `python docs/tools/result_pages.py` writes the pages of results from what lies in examples/results.
set -uo pipefail
name=$1 folder=$2
shift 2
mkdir -p "$folder"
status=0

run() { # STEP ARGUMENTS...: benchmarks, and saves FOLDER/STEP_NAME.json
  local step=$1
  shift
  printf '\n=== %s (%d s)\n' "$step" "$SECONDS"
  python3 "$(dirname "$0")/../benchmarks/run.py" "$@" ${COMMIT:+--commit "$COMMIT"} \
    --save "$folder/${step}_$name.json" || { status=1; echo "=== failed: $step"; }
}

step_cpu() {
  case $1 in
    speed) run speed --cases cpu cpu-layer --warmup 2 --calls 30 --seconds 30 ;;
    length) run length --cases cpu-length --passes forward both --warmup 1 --calls 10 \
      --seconds 5 --plot "$folder/plots_cpu" ;;
    features) run features --cases cpu-features --passes forward both --warmup 3 --calls 50 \
      --contenders jax_flash ;;
    host) run host host ;;
  esac
}

step_gpu() {
  local few_calls=(--passes forward backward --warmup 3 --calls 15 --seconds 1)
  case $1 in
    speed) run speed --cases targets decode layer --passes forward backward --warmup 5 \
      --calls 30 --seconds 0.8 --setup-limit 5 --plot "$folder/plots_$name" \
      --contenders jax_flash 'jax.nn cudnn' 'tokamax mosaic' 'cuDNN (torch)' ;;
    short) run short --cases targets --only '(1,512' '(1,1024' --passes forward backward \
      --warmup 5 --calls 30 --seconds 0.4 --sustained 0.2 --setup-limit 20 \
      --contenders jax_flash 'jax.nn cudnn' 'pallas mgpu (float16)' ;;
    encoders) run encoders --cases encoders --passes forward both --warmup 5 --calls 20 \
      --seconds 0.3 --setup-limit 20 --contenders jax_flash 'jax.nn cudnn' 'cuDNN (torch)' ;;
    biases) run biases --cases biases --passes forward both --warmup 3 --calls 10 --seconds 0.2 \
      --setup-limit 60 --contenders jax_flash 'jax.nn cudnn' 'jax.nn xla' 'cuDNN (torch)' ;;
    plain) run plain --cases training --only '(1,1536' '(1,2048' '(8,1024' '(16,1024,16,128)' \
      192/128 '(2,8192,8,256)' --passes forward --warmup 3 --calls 15 --seconds 0.3 \
      --contenders jax_flash FlashAttention-4 'cuDNN (torch)' ;;
    pairs) run pairs --cases pairs --passes forward both --warmup 3 --calls 10 --seconds 0.2 \
      --setup-limit 60 --contenders jax_flash FlashAttention-4 'cuDNN (torch)' ;;
    few) run few --cases few-queries --warmup 5 --calls 20 --seconds 0.3 --setup-limit 20 \
      --contenders jax_flash 'jax.nn cudnn' 'jax.nn xla' ;;
    pooling) run pooling --cases pooling --warmup 5 --calls 20 --seconds 0.3 --setup-limit 20 \
      --contenders jax_flash 'jax.nn cudnn' 'jax.nn xla' ;;
    length) run length --cases length --only '128) bfloat16 causal' "${few_calls[@]}" \
      --contenders jax_flash 'jax.nn cudnn' 'FlashAttention-2 (torch)' \
      --plot "$folder/plots_length_$name" ;;
    features) run features --cases features "${few_calls[@]}" --contenders jax_flash 'jax.nn cudnn' ;;
    host) run host host --calls 8 ;;
    profile) run profile profile --shape 4 4096 16 128 --mask full
      run floors profile --brief --cases targets ;;
    ablation) run ablation ablation --libraries "${VARIANTS:?names no folder}" --warmup 3 \
      --calls 20 ;;
  esac
}

if [ "$name" = cpu ]; then
  [ $# -gt 0 ] || set -- speed length features host
  for step in "$@"; do step_cpu "$step"; done
else
  [ $# -gt 0 ] || set -- speed encoders biases plain pairs few pooling length features host profile ${VARIANTS:+ablation}
  for step in "$@"; do step_gpu "$step"; done
fi
exit $status
