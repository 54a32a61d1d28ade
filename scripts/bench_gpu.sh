#!/usr/bin/env bash
# What CHANGELOG says of a GPU, measured again: one process at a time, nothing else on the card.
#
#   scripts/bench_gpu.sh OUT                  # all parts; rows go to OUT/*.jsonl
#   scripts/bench_gpu.sh OUT models memory    # some of: tests, models, kernels, memory, policies,
#                                             # quantizers, benchmark, baselines
#
# Each command has at most SECONDS_EACH seconds (600), and a failed one does not stop the others.
# Programs are kept in OUT/programs, so that a second run compiles little.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:?where rows go}
shift
parts=${*:-tests models kernels memory policies quantizers benchmark baselines}
limit=${SECONDS_EACH:-600}
python=${PYTHON:-python3}
mkdir -p "$out"
total_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -1)

run() {
  echo "== $* ($SECONDS s)"
  timeout "$limit" "$@" || echo "-- ended with $?: $*"
}

fraction() { # of the card that so many GiB are
  awk "BEGIN { print 1024 * $1 / $total_mib }"
}

models() {
  local decode=(--decode_only --prompt=512 --context=1024 --steps_per_call=16)
  decode+=(--batch=1 --batch=4 --batch=16 --batch=32)
  local keep=("--cache=$out/programs" "--output=$out/models.jsonl")
  for model in "Mixtral-8x7B 3" "Mixtral-8x7B 4" "Qwen3-30B-A3B 4" "Qwen3-30B-A3B 3"; do
    read -r shape bits <<< "$model"
    run "$python" scripts/bench_model_gpu.py --shape="$shape" --bits="$bits" "${decode[@]}" "${keep[@]}"
    run "$python" scripts/bench_model_gpu.py --shape="$shape" --bits="$bits" --prefill_only \
      --prompt=512 --prompt=2048 "${keep[@]}"
  done
}

kernels() {
  run "$python" -m scripts.bench_kernels --cache="$out/programs" --out="$out/kernels.jsonl"
  run "$python" -m scripts.bench_router --output="$out/router.jsonl"
  run "$python" scripts/bench_attention.py --output="$out/attention.jsonl"
  run "$python" scripts/bench_fetch.py --output="$out/fetch.jsonl"
  run "$python" -m scripts.bench_host_rows --output="$out/fetch.jsonl"
}

memory() {
  local keep=("--programs=$out/programs" "--out=$out/memory.jsonl")
  run "$python" -m scripts.bench_memory_gpu --model=Qwen3-30B-A3B --nottft \
    --slots=8 --slots=24 --slots=48 --slots=80 "${keep[@]}"
  for budget in "Mixtral-8x7B 16" "Mixtral-8x7B 24" "Qwen3-30B-A3B 8" "Qwen3-30B-A3B 12"; do
    read -r shape gib <<< "$budget"
    XLA_CLIENT_MEM_FRACTION=$(fraction "$gib") \
      run "$python" -m scripts.bench_memory_gpu --model="$shape" --gib="$gib" "${keep[@]}"
  done
  run "$python" -m scripts.bench_memory_gpu --nottft --nosingle --depth=8 --slots=64 --slots=0 \
    --batch=1 --batch=2 --batch=4 --batch=8 --batch=16 --batch=32 "${keep[@]}"
  run "$python" -m scripts.bench_transfers_gpu --routing=resting --routing=trace "${keep[@]}"
  run "$python" -m scripts.bench_host_store --out="$out/host_store.jsonl"
}

policies() { # sections of bench_policies_gpu, each a process; what takes longer is left out by name
  local keep=("--programs=$out/programs" "--out=$out/policies.jsonl" "--limit=$((limit * 3 / 4))")
  local policies=("$python" -m scripts.bench_policies_gpu)
  for section in dynaexq buddymoe latency cost; do
    run "${policies[@]}" --section="$section" "${keep[@]}"
  done
  for gib in 16 24; do # in room for the budget and what is replayed
    XLA_CLIENT_MEM_FRACTION=$(fraction $((gib + 12))) \
      run "${policies[@]}" --section=dymoe --gib="$gib" "${keep[@]}"
  done
  XLA_CLIENT_MEM_FRACTION=$(fraction 28) \
    run "${policies[@]}" --section=compose --gib=16 "${keep[@]}"
  XLA_CLIENT_MEM_FRACTION=.95 \
    run "${policies[@]}" --section=dynaexq_wide "${keep[@]}"
  XLA_CLIENT_MEM_FRACTION=.95 \
    run "${policies[@]}" --model=Qwen3-Next-80B-A3B --section=dynaexq_wide --tiers=4,2 --zipf=1 \
    "${keep[@]}"
  run "${policies[@]}" --model=DeepSeek-V2-Lite --section=buddymoe --batch=1 --batch=8 --zipf=1 \
    "${keep[@]}"
}

quantizers() { # beside the hqq library, where it and torch are installed
  run "$python" -m scripts.bench_quantizers_gpu --cache="$out/programs" \
    --output="$out/quantizers.jsonl"
}

benchmark() { # as users measure: prompts run, budgets swept, policies, random weights
  local keep=("--config.compilation_cache=$out/programs" --config.platform=gpu)
  run "$python" -m moejax.benchmark --config.shape=Qwen3-30B-A3B --config.attention_bits=4 \
    --config.budgets="(8,12,16)" --config.batches="(1,4,16)" --config.context=1024 \
    --config.output="$out/benchmark_qwen3.json,$out/benchmark.jsonl" "${keep[@]}"
  run "$python" -m moejax.benchmark --config.shape=Qwen3-30B-A3B --config.attention_bits=4 \
    --config.budgets="(24,)" --config.batches="(1,4,16,32)" --config.context=1024 \
    --config.output="$out/benchmark_qwen3_whole.json,$out/benchmark.jsonl" "${keep[@]}"
  run "$python" -m moejax.benchmark --config.shape=Mixtral-8x7B --config.attention_bits=4 \
    --config.budgets="(12,16,24,32)" --config.context=1024 --config.memory.prefetch=2 \
    --config.output="$out/benchmark_mixtral.json,$out/benchmark.jsonl" "${keep[@]}"
  run "$python" -m moejax.benchmark --config=configs/benchmark_dynaexq.py \
    --config.num_prompts=32 --config.output="$out/benchmark_dynaexq.json,$out/benchmark.jsonl" \
    "${keep[@]}"
}

baselines() { # transformers with accelerate's offload, where it is installed
  for budget in "Mixtral-8x7B 24" "Mixtral-8x7B 16" "Qwen3-30B-A3B 12"; do
    read -r shape gib <<< "$budget"
    run "$python" -m scripts.bench_accelerate --model="$shape" --gib="$gib" \
      --out="$out/accelerate.jsonl"
  done
}

tests() {
  XLA_CLIENT_MEM_FRACTION=.05 run "$python" -m pytest -m gpu -n 14 -v --tb=short \
    -k "not beyond" tests
  run "$python" -m pytest -m gpu -n 0 -v -k beyond tests  # these need most of the card
}

for part in $parts; do
  case $part in
    tests | models | kernels | memory | policies | quantizers | benchmark | baselines) "$part" ;;
    *) echo "no part named $part: see the head of this file" >&2; exit 2 ;;
  esac
done
