#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU run, in three calls of less than ten minutes each. Needs no network.
#
#   OUT=folder PREBUILT=folder BASE=folder bash bench/gpu.sh limits
#   OUT=folder PREBUILT=folder bash bench/gpu.sh peers
#   OUT=folder PREBUILT=folder bash bench/gpu.sh tests
#
#   limits  the candidate against BASE in turns; clock, power and cycles of ours and cuDNN
#   peers   every op beside every peer that is installed, the cells that were behind first
#   tests   both backends, random problems, sanitizer, tuning
#
# Each call ends with a table of the best peer's time over ours, cell by cell. Without a name all
# three follow each other within one budget.
#
# PREBUILT  the package as `pip install --target` left it on another machine with the same Python,
#           torch and processor: nvcc takes minutes. Without it the package is built here, with
#           nvcc, or with the libraries of the checkout (pytransformer/*.so, _build_info.json).
# BASE      an older package of the same form
# BUDGET    seconds of a call, 560 by default
# ONLY      a regular expression: only steps with such names run, after the installation
# COMMIT    named in facts.txt if the checkout has no .git
# DRY_RUN   1: print the steps
# ON_CPU    1: run the benchmarks of a call with tiny problems on the CPU, to try this script
#
# $OUT has facts.txt (device, driver, versions, commit), steps.txt (exit code and time of each
# step), cells.md (the last table), results.tar.gz (logs/; bench/, whose results.json and report.md
# are to be committed in bench/results/<gpu>/) and tuned/ (configurations for kernels/tuned/).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/results/gpu}
budget=${BUDGET:-560}
python=${PYTHON:-python3}
calls=("$@")
((${#calls[@]})) || calls=(limits peers tests)
work=$(mktemp -d)
site=$work/site
failed=0
mkdir -p "$out" "$work/bench" "$work/logs"
out=$(realpath "$out")
for toolkit in "${CUDA_HOME:-}" /usr/local/cuda; do
  command -v nvcc >/dev/null || [[ ! -x $toolkit/bin/nvcc ]] || PATH=$toolkit/bin:$PATH
done
export PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
export PYTRANSFORMER_CUDA_ARCHS=${PYTRANSFORMER_CUDA_ARCHS:-native}
export PYTRANSFORMER_CPU_ISAS=${PYTRANSFORMER_CPU_ISAS:-generic}

left() { echo $((budget - SECONDS)); }

# step NAME SECONDS COMMAND…: run it within that time and what is left, and record the result
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  [[ $name == install* || $name == cells || $name =~ ${ONLY:-.} ]] || return 0
  if [[ -n ${DRY_RUN:-} ]]; then
    echo "$name ($limit s): $*"
    return 0
  fi
  (($(left) < limit)) && limit=$(left)
  if ((limit < 5)); then
    echo "$name: left out, no time" | tee -a "$out/steps.txt"
    return 1
  fi
  timeout -k 5 "$limit" "$@" >"$work/logs/$name.log" 2>&1 || code=$?
  tail -n 5 "$work/logs/$name.log"
  echo "$name: exit code $code after $((SECONDS - start)) s" | tee -a "$out/steps.txt"
  # A run that is stopped keeps this archive. 1: a file changed while tar read it.
  tar -czf "$work/results.tar.gz" -C "$work" logs bench || (($? == 1)) &&
    mv "$work/results.tar.gz" "$out/"
  ((code == 0)) || failed=1
  return "$code"
}

facts() {
  date -u +%FT%TZ
  echo "commit ${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv
  "$python" -c '
import platform, torch
print("python", platform.python_version(), "torch", torch.__version__)
import triton
print("triton", triton.__version__, "capability", torch.cuda.get_device_capability())'
  "$python" -m pip list 2>/dev/null | grep -iE 'flash|quack|liger|cutlass|cudnn'
}
if [[ -z ${DRY_RUN:-} ]]; then
  facts >"$out/facts.txt" 2>&1
  cat "$out/facts.txt"
fi

# Outside the checkout, whose kernels/ folder is not a package of that name.
build=("$python" -m pip install -v --no-index --no-deps --no-build-isolation \
  --target "$site" "$root")
if [[ -n ${PREBUILT:-} ]]; then
  site=$(realpath "$PREBUILT")
else
  step install 300 "${build[@]}" ||
    # Another nvcc may spill a register.
    PYTRANSFORMER_CUDA_SPILLS=1 step install_slow 240 "${build[@]}" ||
    exit 1
fi
library=pytransformer/libpytransformer_cuda.so
if ! command -v nvcc >/dev/null && [[ -f $root/$library && -d $site/pytransformer ]]; then
  cp "$root/$library" "$root/pytransformer/_build_info.json" "$site/pytransformer/"
fi
base=${BASE:+$(realpath "$BASE")}
export PYTHONPATH=$site
cd "$work"
if [[ -z ${DRY_RUN:-}${ON_CPU:-} && ! -f $site/$library ]]; then
  # Every test of the backend cuda would fail, in minutes.
  echo "$site has no CUDA library: set PYTRANSFORMER_CUDA_ARCHS where it is built" >&2
  exit 2
fi

# Tests run in a process per core if pytest-xdist and pytest-timeout are installed, so that a hang
# or a lost CUDA context affects no other test.
apart=()
if [[ -z ${DRY_RUN:-} ]] && "$python" -c 'import pytest_timeout, xdist' 2>/dev/null; then
  apart=(-n "$(nproc)" --dist worksteal --timeout 80 --timeout-method thread)
fi
one=("$python" -m pytest -p no:cacheprovider -v -m gpu)
pytest=(env OMP_NUM_THREADS=2 "${one[@]}" "${apart[@]}")
cuda=("$root"/tests/cuda/test_gpu*.py) triton=("$root"/tests/triton/test_gpu*.py)
paths=("${pytest[@]}" "$root/tests/cuda/test_gpu_attention.py" -k test_every_path)
conformance=("${one[@]}" -x "$root/tests/cuda/test_ptx_conformance.py")

# gpu_step: a step that needs a GPU
gpu_step() { [[ -n ${ON_CPU:-} ]] || step "$@"; }

# Benchmarks collect in files of lines NAME SECONDS ARGUMENTS. Their numbers are drawn on the GPU
# and not compared with float64, which takes the CPU minutes at these sizes.
bench() { # FILE NAME SECONDS ARGUMENTS…
  local file=$1 name=$2 limit=$3 least=0.1 path=()
  shift 3
  [[ $name =~ ${ONLY:-.} ]] || return 0
  if [[ -n ${ON_CPU:-} ]]; then
    least=0
    [[ $file != turns ]] || limit=1
    set -- "$@" --size small --shape L=16 --backends cpu,torch --device cpu --threads 1
  else
    set -- "$@" --device cuda
  fi
  set -- "$@" --no-verify --no-memory --no-plots --no-peaks --min-time $least
  [[ -z ${PYTRANSFORMER_CUDA_PATH:-} || $file != times ]] ||
    path=(PYTRANSFORMER_CUDA_PATH="$PYTRANSFORMER_CUDA_PATH")
  if [[ -n ${DRY_RUN:-} ]]; then
    echo "$name ($limit s): $python -m pytransformer bench $*"
  else
    echo "$name $limit ${path[*]} $*" >>"$work/$file.steps"
  fi
}
# turns.py, clocks.py and steps.py run what has been collected.
collected() { # FILE: true if it has steps
  [[ -n ${DRY_RUN:-} || -s $work/$1.steps ]]
}

# Clock and power beside all benchmarks of a call.
sample_clocks() {
  command -v nvidia-smi >/dev/null && [[ -z ${DRY_RUN:-} ]] || return 0
  nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu --format=csv -lms 200 \
    >"$work/bench/clocks_times.csv" 2>/dev/null &
  sampler=$!
  trap 'kill $sampler 2>/dev/null' EXIT
}

A=(attention --dtype bfloat16)
d128=B=2,Hq=16,Lq=4096,Lk=4096,D=128
d64=B=2,Hq=32,Lq=4096,Lk=4096,D=64
length() { echo "B=$((16384 / $1)),Hq=16,Lq=$1,Lk=$1,D=128"; }
peers=torch_cudnn,flash_attn_4
in_order=cuda,cuda_any_order,torch_cudnn,flash_attn_4,flash_attn_4_in_order

limits() {
  gpu_step conformance 60 "${conformance[@]}"
  gpu_step test_paths 80 "${paths[@]}"
  if [[ -n $base ]]; then
    bench turns bwd128 40 "${A[@]}" --case full,causal --shape $d128 --mode bwd \
      --backends cuda,torch_cudnn
    bench turns bwd64 40 "${A[@]}" --case full,causal --shape $d64 --mode bwd \
      --backends cuda,torch_cudnn
    bench turns bwd128_1024 30 "${A[@]}" --case full,causal --shape "$(length 1024)" --mode bwd \
      --backends cuda,cuda_any_order,torch_cudnn
    bench turns bwd128_2048 30 "${A[@]}" --case full,causal --shape "$(length 2048)" --mode bwd \
      --backends cuda,torch_cudnn
    bench turns fwd128 20 "${A[@]}" --case full,causal --shape $d128 --mode fwd \
      --backends cuda,torch_cudnn
    bench turns fwd64 20 "${A[@]}" --case full,causal --shape $d64 --mode fwd \
      --backends cuda,torch_cudnn
    bench turns mask 20 "${A[@]}" --case bool_mask --mode fwd,bwd \
      --shape B=2,Hq=16,Lq=2048,Lk=2048,D=64 \
      --backends cuda,torch_cudnn
    collected turns && step turns 200 "$python" "$root/bench/tools/turns.py" "$work/turns.steps" \
      --base "$base" --candidate "$site" --seconds 190 --out "$work/bench"
  fi
  bench loops bwd128 0 "${A[@]}" --case full --shape $d128 --mode bwd --backends cuda,torch_cudnn
  bench loops fwd128 0 "${A[@]}" --case full --shape $d128 --mode fwd --backends cuda,torch_cudnn
  bench loops fwd64 0 "${A[@]}" --case causal --shape $d64 --mode fwd --backends cuda,torch_cudnn
  local loop=3
  [[ -z ${ON_CPU:-} ]] || loop=0
  collected loops && step clocks 90 "$python" "$root/bench/tools/clocks.py" "$work/loops.steps" \
    --seconds $loop --out "$work/bench"
  if collected loops && command -v ncu >/dev/null; then
    gpu_step ncu 90 ncu --profile-from-start off --csv --metrics "$metrics" \
      "$python" "$root/bench/tools/clocks.py" "$work/loops.steps" --profile
  fi
}
metrics=sm__cycles_elapsed.max,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_executed_pipe_tensor.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio
metrics+=,smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio

run_peers() {
  local B=(bench times) terms=B=2,Hq=16,Lq=2048,Lk=2048,D=64
  # The cells that were behind the best peer first.
  "${B[@]}" terms 80 "${A[@]}" --case bias,dropout,bool_mask --mode fwd,bwd --shape $terms \
    --backends cuda,triton,torch_efficient,torch_cudnn,flex
  "${B[@]}" bwd128_1024 20 "${A[@]}" --case full,causal --shape "$(length 1024)" --mode bwd \
    --backends $in_order
  local losses=(linear_cross_entropy --dtype bfloat16 --mode fwd,bwd,fwd+bwd --shape)
  "${B[@]}" cross_entropy 40 "${losses[@]}" rows=4096,d=4096,classes=65536 \
    --backends cuda,triton,torch,liger
  local networks=(feed_forward --dtype bfloat16 --mode fwd,bwd --shape)
  "${B[@]}" feed_forward 30 "${networks[@]}" rows=8192,d=4096,hidden=14336 --backends cuda,torch
  "${B[@]}" fwd64 20 "${A[@]}" --case full,causal --shape $d64 --mode fwd \
    --backends cuda,triton,$peers
  "${B[@]}" decode_16 25 attention --case decode,decode_pages --dtype bfloat16 --mode fwd \
    --shape Lk=8192,Lq=1,D=128,B=16,Hq=32,Hkv=8 --backends cuda,triton,torch
  local norms=(add_norm layer_norm rms_norm --case add_norm,layer_norm,rms_norm --dtype bfloat16
    --mode fwd,bwd --backends cuda,triton,torch,quack,liger --shape)
  "${B[@]}" norms_4096 40 "${norms[@]}" rows=16384,d=4096
  "${B[@]}" bwd128 20 "${A[@]}" --case full,causal --shape $d128 --mode bwd --backends $in_order
  "${B[@]}" bwd64 20 "${A[@]}" --case full,causal --shape $d64 --mode bwd --backends $in_order
  "${B[@]}" d256 30 "${A[@]}" --case full,causal --shape B=1,Hq=16,Lq=8192,Lk=8192,D=256 \
    --mode fwd,bwd \
    --backends cuda,$peers
  "${B[@]}" fwd128 20 "${A[@]}" --case full,causal --shape $d128 --mode fwd \
    --backends cuda,triton,$peers
  local keys
  for keys in 512 2048; do
    "${B[@]}" "bwd128_$keys" 15 "${A[@]}" --case full,causal --shape "$(length $keys)" --mode bwd \
      --backends $in_order
  done
  "${B[@]}" long 30 "${A[@]}" --case full,causal --shape B=1,Hq=16,Lq=16384,Lk=16384,D=128 \
    --mode fwd,bwd \
    --backends cuda,$peers
  "${B[@]}" sparse 50 "${A[@]}" --case key_padding,t5_bias,alibi,window,segments --mode fwd,bwd \
    --shape $terms --backends cuda,torch_efficient,torch_cudnn,flex
  "${B[@]}" decode_1 15 attention --case decode,decode_pages --dtype bfloat16 --mode fwd \
    --shape Lk=8192,Lq=1,D=128,B=1,Hq=32,Hkv=8 --backends cuda,triton,torch
  local of
  for of in B=1,Hq=1,Hkv=1 B=4,Hq=32,Hkv=32; do
    "${B[@]}" "decode_8k_$of" 15 attention --case decode_pages,decode --dtype bfloat16 --mode fwd \
      --shape "Lk=8192,Lq=1,D=128,$of" --backends cuda,triton,torch
  done
  # Many short sequences: launches, and what masks recompute.
  "${B[@]}" short 30 "${A[@]}" --case full,bool_mask --mode fwd,fwd+bwd \
    --shape B=64,Hq=16,Lq=512,Lk=512,D=64 \
    --backends cuda,$peers
  # An image's patches: a bias whose rows are not aligned, with its gradient.
  "${B[@]}" odd 20 "${A[@]}" --case bias --mode fwd,fwd+bwd --shape B=64,Hq=12,Lq=197,Lk=197,D=64 \
    --backends cuda,torch_efficient
  "${B[@]}" norms_1024 25 "${norms[@]}" rows=65536,d=1024
  local turns=(--backends cuda,triton,naive,compile --dtype bfloat16 --shape)
  "${B[@]}" rotary 35 rotary "${turns[@]}" B=2,Hq=32,Lq=4096,D=128 --case rotary,rotary_norm \
    --mode fwd,bwd
  "${B[@]}" append_kv 20 append_kv "${turns[@]}" B=8,Hq=32,Hkv=8,Lq=1,D=128 --mode fwd
  PYTRANSFORMER_CUDA_PATH=portable "${B[@]}" attention_portable 20 "${A[@]}" \
    --case full,causal --shape $d128 \
    --mode fwd,bwd --backends cuda
  # Plain products by our kernels too: whether csrc/cuda/matmul/sm90/plan.h should choose them.
  PYTRANSFORMER_CUDA_PATH=sm90 "${B[@]}" feed_forward_ours 20 \
    "${networks[@]}" rows=8192,d=4096,hidden=14336 \
    --backends cuda,torch
  "${B[@]}" cross_entropy_1024 20 "${losses[@]}" rows=8192,d=1024,classes=32768 \
    --backends cuda,torch,liger
  collected times || return 0
  sample_clocks
  step times $((budget - 20)) "$python" "$root/bench/tools/steps.py" "$work/times.steps" \
    --seconds $((budget - 30)) --out "$work/bench"
  [[ -n ${DRY_RUN:-} ]] || cat "$work/logs/times.log"
}

run_tests() {
  gpu_step conformance 60 "${conformance[@]}"
  gpu_step test_cuda 120 "${pytest[@]}" "${cuda[@]}"
  # The step before ran the sm_90a kernels where they exist.
  PYTRANSFORMER_CUDA_PATH=portable gpu_step test_cuda_portable 60 "${paths[@]}"
  gpu_step test_triton 150 "${pytest[@]}" "${triton[@]}" -k "not test_random"
  # Every backend in child processes. After a run without failures, bench/tools/verified.py --tested
  # COMMIT records the sources.
  PYTRANSFORMER_CACHE=$out gpu_step verify 120 "$python" -m pytransformer verify --device cuda \
    --seconds 90
  gpu_step test_random 100 "${pytest[@]}" "${triton[@]}" -k "test_random"
  if command -v compute-sanitizer >/dev/null; then
    gpu_step sanitizer_cuda 60 compute-sanitizer --error-exitcode 9 "${one[@]}" "${cuda[@]}" \
      -k "test_every_path or test_case or test_products"
  fi
  gpu_step tune 60 "$python" "$root/bench/tools/tune.py" --op attention --only 128 --most 6 \
    --seconds 50 \
    --folder "$out/tuned"
}

for call in "${calls[@]}"; do
  case $call in
    limits) limits ;;
    peers) run_peers ;;
    tests) run_tests ;;
    *) echo "$call is not limits, peers or tests" >&2 && exit 2 ;;
  esac
done
[[ -n ${DRY_RUN:-} ]] && exit 0
if [[ -n $(find "$work/bench" -name results.json -o -name turns.json) ]]; then
  step cells 60 "$python" "$root/bench/tools/cells.py" "$work/bench"
  cp "$work/logs/cells.log" "$out/cells.md"
  cat "$out/cells.md"
fi
rm -rf "$work"
exit "$failed"
