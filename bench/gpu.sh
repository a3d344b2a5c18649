#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU run: install, test, time. The most valuable first, each step within a limit of its own, so that what is there
# when time runs out is worth having. Needs no network.
#
#   OUT=folder BUDGET=560 bash bench/gpu.sh
#
# Where nvcc is, the CUDA library is built for this GPU; where it is not, one built before may come along (pytransformer/*.so, _build_info.json
# and build/conformance/; on any machine with nvcc: make build && python tests/cuda/test_ptx_conformance.py). DRY_RUN=1 only tells the steps.
# ONLY='attention|decode' carries out the steps whose names hold that, after the installation: for a second run. COMMIT=… is told where
# the checkout came without .git.
#
# In $OUT afterwards, and after each step: facts.txt (device, driver, versions, commit), steps.txt (each step's verdict and time),
# results.tar.gz (logs/, a log of each step; bench/, the benchmark's results.json and report.md, the first to be committed under
# bench/results/<gpu>/), and tuned/ (the Triton kernels' measured configurations, to be committed in kernels/tuned/).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=${OUT:-$root/results/gpu}
budget=${BUDGET:-560}
python=${PYTHON:-python3}
work=$(mktemp -d)
site=$work/site
failed=0
mkdir -p "$out" "$work/bench" "$work/logs"
for toolkit in "${CUDA_HOME:-}" /usr/local/cuda; do
  command -v nvcc >/dev/null || [[ ! -x $toolkit/bin/nvcc ]] || PATH=$toolkit/bin:$PATH
done
export PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
export PYTRANSFORMER_CUDA_ARCHS=${PYTRANSFORMER_CUDA_ARCHS:-native} PYTRANSFORMER_CPU_ISAS=${PYTRANSFORMER_CPU_ISAS:-generic}

left() { echo $((budget - SECONDS)); }

# step NAME SECONDS COMMAND…: run it within that time and what is left, tell how it went
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  [[ $name == install* || $name =~ ${ONLY:-.} ]] || return 0
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
  # A run that is cut short leaves it. 1: something still writes its log.
  tar -czf "$work/results.tar.gz" -C "$work" logs bench || (($? == 1)) && mv "$work/results.tar.gz" "$out/"
  ((code == 0)) || failed=1
  return "$code"
}

{
  date -u +%FT%TZ
  echo "commit ${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.limit --format=csv
  "$python" -c 'import platform, torch, triton; print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__, "capability", torch.cuda.get_device_capability())'
} >"$out/facts.txt" 2>&1
cat "$out/facts.txt"

# Outside the checkout, whose kernels/ folder is not a package of that name.
step install 300 "$python" -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" "$root" ||
  # Another nvcc than the kernels were written with may spill a register: slow is better than nothing.
  PYTRANSFORMER_CUDA_SPILLS=1 step install_slow 240 "$python" -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" "$root" ||
  exit 1
if ! command -v nvcc >/dev/null && [[ -f $root/pytransformer/libpytransformer_cuda.so && -d $site/pytransformer ]]; then
  cp "$root"/pytransformer/{libpytransformer_cuda.so,_build_info.json} "$site/pytransformer/"
fi
export PYTHONPATH=$site
cd "$work"

# Tests by several processes where pytest-xdist and pytest-timeout are installed: one that hangs, or spoils the CUDA context, takes no other
# with it, and the float64 solutions on the CPU are made side by side.
apart=()
if "$python" -c 'import pytest_timeout, xdist' 2>/dev/null; then
  apart=(-n 4 --timeout 80 --timeout-method thread)
fi
pytest=(env OMP_NUM_THREADS=4 "$python" -m pytest -p no:cacheprovider -v -m gpu "${apart[@]}")

# First whether the machine does what the emulator takes for granted, and the CUDA tier is right.
step conformance 150 "$python" -m pytest -p no:cacheprovider -v -x -m gpu "$root/tests/cuda/test_ptx_conformance.py"
# The verdict on every backend, each in a process of its own; its file is a result, and is used without asking once it is committed.
PYTRANSFORMER_CACHE=$out step verify 150 "$python" -m pytransformer verify --device cuda --seconds 110
# What reading the sources could not settle: few calls each, so that an answer comes before long compilations. dropout masks bit by bit,
# sums of T5's table in Triton, float32 packed sequences, long sums and large problems, a thread without a context.
step first_cuda 75 "${pytest[@]}" "$root/tests/cuda" -k "dropout_mask or without_a_context or packed_case or many_tiles or many_classes"
step first_triton 75 "${pytest[@]}" "$root/tests/triton" -k "dropout_mask or (test_case and (t5_bias or varlen) and bfloat16)"
step test_cuda 90 "${pytest[@]}" "$root/tests/cuda/test_gpu.py"

step test_cuda_attention 150 "${pytest[@]}" "$root/tests/cuda/test_gpu_attention.py"
# On Hopper the step before ran its own kernels where they can; this runs the portable ones there.
PYTRANSFORMER_CUDA_PATH=portable step test_cuda_portable 90 "${pytest[@]}" "$root/tests/cuda/test_gpu_attention.py" -k test_every_path
# Keys in pages, and keys of few queries split over blocks: the same bits as keys in one piece, and as a sequence alone; keys and values in
# eight bits, against float64; PYTRANSFORMER_CHECK too.
step test_cuda_decode 60 "${pytest[@]}" "$root/tests/cuda/test_gpu_attention_decode.py"

step test_cuda_rotary 60 "${pytest[@]}" "$root/tests/cuda/test_gpu_rotary.py"
step test_cuda_feed_forward 90 "${pytest[@]}" "$root/tests/cuda/test_gpu_feed_forward.py"
step test_cuda_cross_entropy 90 "${pytest[@]}" "$root/tests/cuda/test_gpu_cross_entropy.py"

bench() { # NAME SECONDS ARGUMENTS…
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$python" -m pytransformer bench "$@" --device cuda --no-memory --no-plots --min-time 0.2 \
    --out "$work/bench/$name"
}

peers=cuda,triton,torch,torch_flash,torch_efficient,torch_cudnn
norms=(add_norm layer_norm rms_norm --backends cuda,triton,torch --dtype bfloat16 --mode fwd,bwd --shape)
bench norms_4096 60 "${norms[@]}" rows=16384,d=4096
bench norms_1024 60 "${norms[@]}" rows=65536,d=1024

turns=(--backends cuda,triton,naive,compile --dtype bfloat16 --shape)
bench rotary 45 rotary "${turns[@]}" B=2,Hq=32,Lq=4096,D=128 --case rotary,rotary_norm --mode fwd,bwd
bench append_kv 45 append_kv "${turns[@]}" B=8,Hq=32,Hkv=8,Lq=1,D=128 --mode fwd

tests=("${pytest[@]}" "$root/tests/triton")
# Each case is a compilation or two, some 430 in all: those of the type that models use first, the others behind the benchmarks.
step test_cases 120 "${tests[@]}" -k "test_case and bfloat16"
step test_limits 60 "${tests[@]}" -k "graph or programs or addresses or eight_bits"
bench attention_d128 90 attention --backends $peers --case full,causal --dtype bfloat16 --mode fwd,bwd --shape B=2,Hq=16,Lq=4096,Lk=4096,D=128
bench attention_d64 60 attention --backends $peers --case full,causal --dtype bfloat16 --mode fwd,bwd --shape B=2,Hq=32,Lq=4096,Lk=4096,D=64
bench attention_any_order 45 attention --backends cuda,cuda_any_order --case full,causal --dtype bfloat16 --mode bwd \
  --shape B=2,Hq=16,Lq=4096,Lk=4096,D=128
bench attention_terms 90 attention --backends $peers --case key_padding,bool_mask,bias,t5_bias,alibi,dropout,window --dtype bfloat16 --mode fwd,fwd+bwd \
  --shape B=2,Hq=16,Lq=2048,Lk=2048,D=64
# Many short sequences: what launches cost, of masks those of what is recomputed too.
bench attention_short 45 attention --backends $peers --case full,bool_mask --dtype bfloat16 --mode fwd,fwd+bwd --shape B=64,Hq=16,Lq=512,Lk=512,D=64
# An image's patches: rows of a bias that are not aligned, with its gradient.
bench attention_odd 30 attention --backends $peers --case bias --dtype bfloat16 --mode fwd,fwd+bwd --shape B=64,Hq=12,Lq=197,Lk=197,D=64
PYTRANSFORMER_CUDA_PATH=portable bench attention_portable 45 attention --backends cuda --case full,causal --dtype bfloat16 --mode fwd,bwd \
  --shape B=2,Hq=16,Lq=4096,Lk=4096,D=128
bench attention_long 60 attention --backends cuda,torch_flash,torch_cudnn --case full,causal --dtype bfloat16 --mode fwd,bwd --shape B=1,Hq=16,Lq=16384,Lk=16384,D=128
bench attention_d256 45 attention --backends cuda,torch_flash,torch_cudnn --case full,causal --dtype bfloat16 --mode fwd --shape B=1,Hq=16,Lq=8192,Lk=8192,D=256
# One token over 8,192 keys, in pages (whose peers gather them) and in one piece, of few heads and sequences and of many.
for of in B=1,Hq=1,Hkv=1 B=1,Hq=8,Hkv=8 B=1,Hq=32,Hkv=8 B=4,Hq=32,Hkv=32 B=16,Hq=32,Hkv=8; do
  bench "decode_8k_$of" 30 attention --backends cuda,triton,torch --case decode_pages,decode --dtype bfloat16 --mode fwd --shape "Lk=8192,Lq=1,D=128,$of"
done
bench decode 45 attention --backends $peers --case causal --dtype bfloat16 --mode fwd --shape B=1,Hq=32,Lq=1,Lk=32768,D=128
networks=(feed_forward --dtype bfloat16 --mode fwd,bwd --shape)
bench feed_forward 60 "${networks[@]}" rows=8192,d=4096,hidden=14336 --backends cuda,triton,torch
bench feed_forward_1024 45 "${networks[@]}" rows=16384,d=1024,hidden=4096 --backends cuda,triton,torch
# Plain products by our kernels too: whether csrc/cuda/matmul/sm90/plan.h should choose them.
PYTRANSFORMER_CUDA_PATH=sm90 bench feed_forward_ours 45 "${networks[@]}" rows=8192,d=4096,hidden=14336 --backends cuda,torch
losses=(linear_cross_entropy --dtype bfloat16 --mode fwd,bwd --shape)
bench cross_entropy 60 "${losses[@]}" rows=4096,d=4096,classes=65536 --backends cuda,triton,torch
bench cross_entropy_1024 45 "${losses[@]}" rows=8192,d=1024,classes=32768 --backends cuda,triton,torch
PYTRANSFORMER_CUDA_PATH=sm90 bench cross_entropy_ours 45 "${losses[@]}" rows=4096,d=4096,classes=65536 --backends cuda,torch
step test_cases_float32 90 "${tests[@]}" -k "test_case and float32"
step test_random 120 "${tests[@]}" -k "random"
step test_cases_float16 90 "${tests[@]}" -k "test_case and float16 and not bfloat16"
step test_head_dims 90 "${tests[@]}" -k "head_dims"
step tune 120 "$python" "$root/bench/tools/tune.py" --op attention --only 128 --most 6 --seconds 90 --folder "$out/tuned"
if command -v compute-sanitizer >/dev/null; then
  step sanitizer_cuda 60 compute-sanitizer --error-exitcode 9 "$python" -m pytest -p no:cacheprovider -q -m gpu "$root/tests/cuda/test_gpu.py" \
    "$root/tests/cuda/test_gpu_attention.py" "$root/tests/cuda/test_gpu_feed_forward.py" "$root/tests/cuda/test_gpu_cross_entropy.py" \
    "$root/tests/cuda/test_gpu_rotary.py" -k "test_every_path or test_case or test_products"
  step sanitizer 60 compute-sanitizer --error-exitcode 9 "$python" -m pytest -p no:cacheprovider -q -m gpu "$root/tests/triton" \
    -k "test_case and bfloat16 and (causal or everything)"
fi

[[ -n ${DRY_RUN:-} ]] && exit 0
rm -rf "$work"
exit "$failed"
