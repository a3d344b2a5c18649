#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The GPU run: install, test, time. The most valuable first, each step within a limit of its own, so that what is there
# when time runs out is worth having. Needs no network.
#
#   OUT=folder BUDGET=560 bash bench/gpu.sh
#
# PREBUILT=folder: the package as `pip install --target` left it on another machine with the same Python, torch and processor, so that no
# time goes into compiling: nvcc takes three to seven minutes on two cores. Without it, and where nvcc is, the CUDA library is built for this
# GPU; where it is not, one built before may come along (pytransformer/*.so, _build_info.json and build/conformance/; on any machine with nvcc: make build && python tests/cuda/test_ptx_conformance.py). DRY_RUN=1 only tells the steps.
# ONLY='attention|decode' carries out the steps whose names hold that, after the installation: for a second run. COMMIT=… is told where
# the checkout came without .git.
#
# In $OUT afterwards, and after each step: facts.txt (device, driver, versions, commit), steps.txt (each step's outcome and time),
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
if [[ -n ${PREBUILT:-} ]]; then
  site=$(realpath "$PREBUILT")
else
  step install 300 "$python" -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" "$root" ||
    # Another nvcc than the kernels were written with may spill a register: slow is better than nothing.
    PYTRANSFORMER_CUDA_SPILLS=1 step install_slow 240 "$python" -m pip install -v --no-index --no-deps --no-build-isolation --target "$site" "$root" ||
    exit 1
fi
if ! command -v nvcc >/dev/null && [[ -f $root/pytransformer/libpytransformer_cuda.so && -d $site/pytransformer ]]; then
  cp "$root"/pytransformer/{libpytransformer_cuda.so,_build_info.json} "$site/pytransformer/"
fi
export PYTHONPATH=$site
cd "$work"
# A package without the library, as pip leaves it where PYTRANSFORMER_CUDA_ARCHS was not set again, would fail every test of backend cuda, in minutes.
if [[ -z ${DRY_RUN:-} && ! -f $site/pytransformer/libpytransformer_cuda.so ]]; then
  echo "$site has no CUDA library: set PYTRANSFORMER_CUDA_ARCHS=sm_90a (or this GPU's) where it is built and where it is installed" >&2
  exit 2
fi

# Tests by as many processes as there are cores, where pytest-xdist and pytest-timeout are installed: one that hangs, or spoils the CUDA context,
# takes no other with it, and Triton's compilations and the float64 solutions on the CPU are made side by side. On an H100 with 16 cores 350
# tests, most of tests/cuda, took a minute; one of Triton's, with its compilations, 2 to 40 s.
apart=()
if "$python" -c 'import pytest_timeout, xdist' 2>/dev/null; then
  apart=(-n "$(nproc)" --dist worksteal --timeout 80 --timeout-method thread)
fi
pytest=(env OMP_NUM_THREADS=2 "$python" -m pytest -p no:cacheprovider -v -m gpu "${apart[@]}")
cuda=("$root"/tests/cuda/test_gpu*.py) triton=("$root"/tests/triton/test_gpu*.py)

# First whether the machine does what the emulator takes for granted, and both backends are right.
step conformance 100 "$python" -m pytest -p no:cacheprovider -v -x -m gpu "$root/tests/cuda/test_ptx_conformance.py"
step test_cuda 120 "${pytest[@]}" "${cuda[@]}"
# On Hopper the step before ran its own kernels where they can; this runs the portable ones there.
PYTRANSFORMER_CUDA_PATH=portable step test_cuda_portable 60 "${pytest[@]}" "$root/tests/cuda/test_gpu_attention.py" -k test_every_path
step test_triton 180 "${pytest[@]}" "${triton[@]}" -k "not test_random"
# Check every backend in child processes. After a run without failures, bench/tools/verified.py --tested COMMIT records the sources.
PYTRANSFORMER_CACHE=$out step verify 150 "$python" -m pytransformer verify --device cuda --seconds 110

# Benchmarks. Their numbers are drawn on the GPU and not compared with float64, which takes the CPU minutes at these sizes: the tests did.
bench() { # NAME SECONDS ARGUMENTS…
  local name=$1 limit=$2 path=()
  shift 2
  [[ $name =~ ${ONLY:-.} ]] || return 0
  set -- "$@" --device cuda --no-verify --no-memory --no-plots --no-peaks --min-time 0.1
  [[ -z ${PYTRANSFORMER_CUDA_PATH:-} ]] || path=(PYTRANSFORMER_CUDA_PATH="$PYTRANSFORMER_CUDA_PATH")
  if [[ -n ${DRY_RUN:-} ]]; then
    echo "$name ($limit s): $python -m pytransformer bench $*"
  else
    echo "$name $limit ${path[*]} $*" >>"$work/benchmarks"
  fi
}
benchmarks() { # NAME SECONDS: carry out what was collected, in forks of one process
  [[ -s $work/benchmarks ]] || return 0
  mv "$work/benchmarks" "$work/$1.steps"
  ONLY= step "$1" "$2" "$python" "$root/bench/tools/steps.py" "$work/$1.steps" --seconds "$(($2 < $(left) ? $2 : $(left)))" --out "$work/bench"
  cat "$work/logs/$1.log"
}

peers=cuda,triton,torch_flash,torch_cudnn
attention=(attention --dtype bfloat16 --case full,causal --shape)
bench bwd128 20 "${attention[@]}" B=2,Hq=16,Lq=4096,Lk=4096,D=128 --mode bwd --backends cuda,cuda_any_order,torch_cudnn
bench fwd128 20 "${attention[@]}" B=2,Hq=16,Lq=4096,Lk=4096,D=128 --mode fwd --backends $peers
bench fwd64 20 "${attention[@]}" B=2,Hq=32,Lq=4096,Lk=4096,D=64 --mode fwd --backends $peers
bench bwd64 20 "${attention[@]}" B=2,Hq=32,Lq=4096,Lk=4096,D=64 --mode bwd --backends cuda,cuda_any_order,torch_cudnn
# Where the backward in order begins to pay.
for keys in 512 1024 2048; do
  bench "bwd128_$keys" 20 "${attention[@]}" "B=$((16384 / keys)),Hq=16,Lq=$keys,Lk=$keys,D=128" --mode bwd --backends cuda,cuda_any_order,torch_cudnn
done
bench long 30 "${attention[@]}" B=1,Hq=16,Lq=16384,Lk=16384,D=128 --mode fwd,bwd --backends cuda,torch_cudnn
bench d256 20 "${attention[@]}" B=1,Hq=16,Lq=8192,Lk=8192,D=256 --mode fwd --backends cuda,torch_flash,torch_cudnn
PYTRANSFORMER_CUDA_PATH=portable bench attention_portable 25 "${attention[@]}" B=2,Hq=16,Lq=4096,Lk=4096,D=128 --mode fwd,bwd --backends cuda
bench terms 60 attention --case key_padding,bool_mask,bias,t5_bias,alibi,dropout,window --dtype bfloat16 --mode fwd,bwd \
  --shape B=2,Hq=16,Lq=2048,Lk=2048,D=64 --backends cuda,triton,torch_efficient,torch_cudnn
# Many short sequences: what launches cost, of masks those of what is recomputed too.
bench short 40 attention --case full,bool_mask --dtype bfloat16 --mode fwd,fwd+bwd --shape B=64,Hq=16,Lq=512,Lk=512,D=64 --backends $peers
# An image's patches: rows of a bias that are not aligned, with its gradient.
bench odd 30 attention --case bias --dtype bfloat16 --mode fwd,fwd+bwd --shape B=64,Hq=12,Lq=197,Lk=197,D=64 --backends cuda,triton,torch_efficient
# One token over 8,192 keys, in pages (whose peers gather them) and in one piece, of few heads and sequences and of many.
for of in B=1,Hq=1,Hkv=1 B=1,Hq=8,Hkv=8 B=1,Hq=32,Hkv=8 B=4,Hq=32,Hkv=32 B=16,Hq=32,Hkv=8; do
  bench "decode_8k_$of" 25 attention --case decode_pages,decode --dtype bfloat16 --mode fwd --shape "Lk=8192,Lq=1,D=128,$of" --backends cuda,triton,torch
done
norms=(add_norm layer_norm rms_norm --case add_norm,layer_norm,rms_norm --backends cuda,triton,torch --dtype bfloat16 --mode fwd,bwd --shape)
bench norms_4096 30 "${norms[@]}" rows=16384,d=4096
bench norms_1024 30 "${norms[@]}" rows=65536,d=1024
turns=(--backends cuda,triton,naive,compile --dtype bfloat16 --shape)
bench rotary 45 rotary "${turns[@]}" B=2,Hq=32,Lq=4096,D=128 --case rotary,rotary_norm --mode fwd,bwd
bench append_kv 30 append_kv "${turns[@]}" B=8,Hq=32,Hkv=8,Lq=1,D=128 --mode fwd
networks=(feed_forward --dtype bfloat16 --mode fwd,bwd --shape)
bench feed_forward 40 "${networks[@]}" rows=8192,d=4096,hidden=14336 --backends cuda,triton,torch
bench feed_forward_1024 30 "${networks[@]}" rows=16384,d=1024,hidden=4096 --backends cuda,triton,torch
# Plain products by our kernels too: whether csrc/cuda/matmul/sm90/plan.h should choose them.
PYTRANSFORMER_CUDA_PATH=sm90 bench feed_forward_ours 30 "${networks[@]}" rows=8192,d=4096,hidden=14336 --backends cuda,torch
losses=(linear_cross_entropy --dtype bfloat16 --mode fwd,bwd --shape)
bench cross_entropy 40 "${losses[@]}" rows=4096,d=4096,classes=65536 --backends cuda,triton,torch
bench cross_entropy_1024 30 "${losses[@]}" rows=8192,d=1024,classes=32768 --backends cuda,triton,torch
PYTRANSFORMER_CUDA_PATH=sm90 bench cross_entropy_ours 30 "${losses[@]}" rows=4096,d=4096,classes=65536 --backends cuda,torch
benchmarks times 300

step test_random 150 "${pytest[@]}" "${triton[@]}" -k "test_random"
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
