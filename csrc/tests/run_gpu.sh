#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the tests of the CUDA kernels, runs them, and runs each again under the tools of compute-sanitizer.
#
#   csrc/tests/run_gpu.sh [FOLDER [TOOL...]]     default: build/native-tests/gpu, all four tools
#
# Needs CMake, a C++ compiler and nvcc (CUDACXX, CUDA_HOME, PATH, /usr/local/cuda); takes ninja where it is found. Without a GPU
# it builds and says what it skipped; without nvcc it says just that. UNIRL_CUDA_ARCHS: as in setup.py, default here "90+PTX".
#
# racecheck knows barriers, not order by acquire and release, nor that a warp's elected thread arrives for all of it. The attention's
# backward has both: counters (load_shared_acquire, store_shared_release), and rows of statistics that the copy engine
# writes (copy_bytes_to_shared) once a warp's elected thread has said that the warp has read them (load_pair). A race
# between those is not counted; any other fails.
set -euo pipefail
csrc="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-build/native-tests/gpu}"
tools=("${@:2}")
if [ "${#tools[@]}" -eq 0 ]; then tools=(memcheck racecheck synccheck initcheck); fi

# The first of the given commands that exists.
first_found() {
  local name
  for name in "$@"; do
    if command -v "$name"; then return; fi
  done
}

# Whether racecheck's report in a file names a race between other functions than the known ones.
has_unknown_race() {
  local known="load_shared_acquire|store_shared_release|copy_bytes_to_shared|load_pair"
  [ -n "$(grep -oE "(Read|Write) access at .*\+0x" "$1" | grep -vE "$known")" ]
}

nvcc="$(first_found "${CUDACXX:-}" "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" nvcc /usr/local/cuda/bin/nvcc)"
if [ -z "$nvcc" ]; then
  echo "nvcc is not found (CUDACXX, CUDA_HOME, PATH): the tests of the CUDA kernels are not built"
  exit 0
fi
generator=()
if command -v ninja > /dev/null; then generator=(-G Ninja); fi
cmake -S "$csrc" -B "$folder" "${generator[@]}" -DUNIRL_BUILD_EXTENSION=OFF -DUNIRL_BUILD_TESTS=ON -DUNIRL_WITH_CUDA=ON \
  -DCMAKE_CUDA_COMPILER="$nvcc" "-DUNIRL_CUDA_ARCHS=${UNIRL_CUDA_ARCHS:-90+PTX}" > /dev/null
cmake --build "$folder" --target gpu_tests --parallel "${MAX_JOBS:-$(nproc)}" | tail -n 1

failed=0
ctest --test-dir "$folder" -L gpu --output-on-failure --timeout 120 || failed=1

sanitizer="$(first_found compute-sanitizer "$(dirname "$nvcc")/compute-sanitizer" /usr/local/cuda/bin/compute-sanitizer)"
if [ -z "$sanitizer" ]; then echo "compute-sanitizer is not found: the tests do not run under it"; fi
mkdir -p "$folder/reports"
for test in "$folder"/test_cuda_*; do
  name="$(basename "$test")"
  code=0
  said="$("$test")" || code=$?
  if [ "$code" -eq 77 ]; then echo "== $name $said"; fi
  if [ "$code" -eq 77 ] || [ -z "$sanitizer" ]; then continue; fi
  for tool in "${tools[@]}"; do
    echo "== $name under $tool"
    start=$SECONDS
    code=0
    report="$folder/reports/$name.$tool.txt"
    timeout 300 "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 1000 "$test" > "$report" 2>&1 || code=$?
    if [ "$tool" = racecheck ] && grep -q "RACECHECK SUMMARY" "$report" && ! has_unknown_race "$report"; then
      if [ "$code" -ne 0 ]; then echo "only races that are none: $(grep -c "Race reported" "$report")"; fi
      code=0
    elif [ "$code" -ne 0 ]; then
      head -n 60 "$report"
    fi
    echo "== $name under $tool: exit status $code after $((SECONDS - start)) s; $(grep SUMMARY "$report" || echo no summary)"
    if [ "$code" -ne 0 ]; then failed=1; fi
  done
done
exit "$failed"
