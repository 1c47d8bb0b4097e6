#!/usr/bin/env bash
# The GPU's code on a machine without one. A stand-in takes the place of the GPU and of NCCL: torch takes it for CUDA, it computes
# in the host's memory by the CPU's kernels, and it refuses what a GPU would refuse (device.cpp). It shows that tensors are where
# they must be, that kernels get the layouts they want, that recorded layers wait for nothing, and that numbers are right. It says
# nothing of speed, of the GPU's own kernels, or of work that overlaps.
#
#   bash tests/without_gpu/run.sh                                  tests/gpu, but for what needs a compiler
#   bash tests/without_gpu/run.sh tests/parity/test_layouts.py     the table of layouts on stand-ins, over a stand-in for NCCL
#   MEGATRON_STAND_IN=10.0 bash tests/without_gpu/run.sh tests/gpu/test_low_precision.py -m gpu      as a Blackwell
#
#   bash tests/without_gpu/run.sh pretrain_gpt.py FLAGS            a program
#
# It needs a C++ compiler (CXX, or g++) and a build of torch without CUDA. Other arguments go to pytest.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/setup.sh requirements-dev.txt

export MEGATRON_STAND_IN_FOLDER="$PWD/runs/without_gpu/$("$PYTHON" -c 'import sys, torch; print(torch.__version__, sys.version_info.minor, sep="-")')"
LIBRARY="$MEGATRON_STAND_IN_FOLDER/gpu_stand_in.so"
if [ ! "$LIBRARY" -nt tests/without_gpu/device.cpp ]; then
    mkdir -p "$MEGATRON_STAND_IN_FOLDER"
    "$PYTHON" - <<'END' | xargs "${CXX:-g++}" -O1 -std=c++20 -shared -fPIC -DTORCH_EXTENSION_NAME=gpu_stand_in tests/without_gpu/device.cpp -o "$LIBRARY"
import sysconfig
from torch.utils.cpp_extension import include_paths, library_paths
print(*(f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]), *(f"-L{path}" for path in library_paths()),
      "-lc10 -ltorch -ltorch_cpu -ltorch_python")
END
fi

export MEGATRON_STAND_IN="${MEGATRON_STAND_IN:-9.0}" MEGATRON_TEST_DEVICE=cuda TRITON_INTERPRET=1
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export PYTHONPATH="$PWD/tests/without_gpu:$MEGATRON_STAND_IN_FOLDER${PYTHONPATH:+:$PYTHONPATH}"
case "${1:-}" in
    benchmarks/*.py) exec "$PYTHON" "$@" ;;
    tests/*) ;;
    *.py) exec "$PYTHON" "$@" ;;
esac
if [ $# = 0 ]; then # without torch's compiler, and what takes the interpreter of Triton very long
    set -- -m gpu tests/gpu --ignore tests/gpu/test_compiling.py --deselect "tests/gpu/test_kernels.py::test_the_loss_of_blocks_takes_far_less_memory_than_the_logits[True]"
fi
exec "$PYTHON" -m pytest -n 2 --dist loadfile "$@"
