#!/usr/bin/env bash
# Quality of a study model, all of it, over several GPUs with some programs on each, the longest first.
#   CARDS=0,1,2,3 EACH=5 scripts/studies/quality/all.sh RUN/model DIR OUT [LABEL [SECONDS]]
# DIR is that of `policies.py`; rows go to OUT/*.jsonl, logs beside them. A program of the section dymoe,
# fidelity, layers or dynaexq takes up to 18 GB, fewer than a dozen GB the others. Each is stopped after SECONDS
# (3000); what was stopped, or did not fit its card, goes on when the same command runs again. Status 0: all is there.
set -u
export MODEL=$1 DIR=$2 OUT=$3 LABEL=${4:-study} LIMIT=${5:-3000} PYTHON=${PYTHON:-python3} CARDS=${CARDS:-0}
export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_triton_gemm=false"
export NUM_CARDS=$(tr , '\n' <<< "$CARDS" | wc -l)
mkdir -p "$OUT"

run() {  # a line: what, and a method's name or a regular expression of cases
  local what=${1%%|*} which=${1#*|} name card status
  name=$what$(tr -c 'A-Za-z0-9\n' _ <<< "$which")
  card=$(cut -d, -f$((SLOT % NUM_CARDS + 1)) <<< "$CARDS")
  local each=(--checkpoint="$MODEL" --label="$LABEL" --output="$OUT/$name.jsonl")
  if [ "$what" = tasks ]; then
    each=(scripts.studies.quality.task_scores "${each[@]}" --data="$DIR/eval" --documents=500
          --work_dir="$OUT/$name" --methods="$which")
  else
    each=(scripts.studies.quality.policies "${each[@]}" --texts="$DIR" --origins=4
          --sections="$what" --cases="$which")
  fi
  CUDA_VISIBLE_DEVICES=$card timeout -k 10 "$LIMIT" "$PYTHON" -m "${each[@]}" > "$OUT/$name.log" 2>&1
  status=$?
  echo "$name: status $status, after $SECONDS s"
  return "$status"
}
export -f run

[ -e "$MODEL/buddies.safetensors" ] || "$PYTHON" -m moejax.profile_experts --config.checkpoint="$MODEL" || exit
{
  "$PYTHON" -c 'from scripts.studies.quality.task_cases import METHODS
print(*(f"tasks|{name}" for name in sorted(METHODS, key=lambda name: "DyMoE" not in name)), sep="\n")'
  cat << END
decide|^DyMoE 4/0 \+
buddymoe|decode
decide|^BuddyMoE
dynaexq|.
dymoe|^4/0 critical
dymoe|^4/2 critical
dymoe|load
decide|^DyMoE 4/[02]$
layers|^(uniform|int4)
layers|^(4/|0.75)
buddymoe|^(original$|0.75 [rol])
buddymoe|^0.5 [rol]
buddymoe|^0.375 [rol]
dymoe|^4/. (linear|equal|sensitivity)
dymoe|random
fidelity|^4/2
fidelity|^(4/0|0.75)
fidelity|^(uniform|int4)
shift|.
decide|^DynaExq
heavy|.
dymoe|^layer
decide|^(bf16|INT|MiLo)
END
} | xargs -d '\n' -P $((NUM_CARDS * ${EACH:-4})) --process-slot-var=SLOT -I{} bash -c 'run "$1"' _ {}
