#!/usr/bin/env bash
# BuddyMoE on two GPUs that hold other experts each, half of them in slots: kappa 0 and 1 of eq. 3.
#   scripts/studies/several_gpus/buddies.sh OUT     # rows: OUT/*.jsonl, logs: OUT/*.log; two minutes each
set -u
out=$1 python=${PYTHON:-python3}
shape=${SHAPE:---config.shape=Qwen3-30B-A3B --config.attention_bits=4 --config.policy.slots=32}
mkdir -p "$out"
export NCCL_LAUNCH_ORDER_IMPLICIT=1 NCCL_NVLS_ENABLE=0 PYTHONUNBUFFERED=1  # no NVLink multicast
for kappa in 0 1; do
  # shellcheck disable=SC2086
  timeout -k 10 200 "$python" -m moejax.benchmark $shape --config.bits=4 --config.mesh=2,experts \
    --config.policy.name=buddymoe --config.policy.settings="max_requests=0,tae_tau=0.8,kappa=$kappa" \
    --config.batches="(1,16)" --config.new_tokens=96 --config.prompt_tokens=128 --config.runs=2 \
    --config.count_experts=false "--config.compilation_cache=$(mktemp -d)" \
    --config.output="$out/kappa_$kappa.jsonl" > "$out/kappa_$kappa.log" 2>&1
  echo "== kappa $kappa: status $?, after $SECONDS s"
  tail -n 14 "$out/kappa_$kappa.log" | cut -c1-240
done
