#!/usr/bin/env bash
# One GPU and two GPUs of one host, under ten minutes: does a mesh answer as one GPU does, and how fast?
#   scripts/studies/speed/two_gpus.sh OUT                              # rows: OUT/*.jsonl, logs: OUT/*.log
#   scripts/studies/speed/two_gpus.sh OUT Mixtral-8x7B "(8.,12.,16.)"    # another shape and its budgets
# First what checks the mesh; then one GPU, resident on the first card and under budgets on the second, at once; then
# both, as a mesh of MESH (2; 2,heads splits attention; 2,experts hands experts out). A part that takes too
# long is stopped, and what it measured stays.
set -u
out=$1 mesh=${MESH:-2} name=${2:-Qwen3-30B-A3B} gib=${3:-(4.,8.,12.)} python=${PYTHON:-python3}
mkdir -p "$out"; cards=${CUDA_VISIBLE_DEVICES:-0,1}  # of a host with more, the two to take
export NCCL_LAUNCH_ORDER_IMPLICIT=1 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1  # no NVLink multicast
shape=(--config.shape="$name" --config.bits=4 --config.attention_bits=4 --config.new_tokens=96
       --config.runs=2 --config.count_experts=false "--config.compilation_cache=$(mktemp -d)")
resident=("${shape[@]}" "--config.batches=(1,16,64)" --config.prompt_tokens=128)
budgets=("${shape[@]}" "--config.budgets=$gib" --config.skew=uniform --config.prompt_tokens=512)

bench() {  # name, most seconds, flags
  local name=$1 seconds=$2; shift 2
  timeout -k 10 "$seconds" "$python" -m moejax.benchmark "$@" --config.output="$out/$name.jsonl" \
    > "$out/$name.log" 2>&1
  echo "== $name: status $?, after $SECONDS s"
  tail -n 12 "$out/$name.log" | cut -c1-240
}

timeout -k 10 120 "$python" -m scripts.studies.speed.check_mesh --devices="$mesh" --shape="$name" 2>&1 | tail -n 6 | cut -c1-300
echo "== checked, after $SECONDS s"
CUDA_VISIBLE_DEVICES=${cards%%,*} bench one_resident 200 "${resident[@]}" &
CUDA_VISIBLE_DEVICES=${cards##*,} bench one_budgets 200 "${budgets[@]}" &
wait
bench two_resident 130 "${resident[@]}" --config.mesh="$mesh"
bench two_budgets 140 "${budgets[@]}" --config.mesh="$mesh"
