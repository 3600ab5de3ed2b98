#!/bin/sh
# Compiles kernels and the shim by hand: sh kernels.sh OUT kernel.cu... writes OUT/kernels.o (see emu.h for the rest).
# build.rs of the crate does the same. CXX and CXXFLAGS (for example "-O1 -g -fsanitize=address") are honoured.
set -e
out=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
cxx=${CXX:-g++}
flags="-std=c++17 -ffp-contract=off -fPIC -fvisibility=hidden -w ${CXXFLAGS:--O2}"
mkdir -p "$out"
objects=
for kernel in "$@"; do
    kernel=$(cd "$(dirname "$kernel")" && pwd)/$(basename "$kernel")
    folder=$(dirname "$kernel")
    stem=$(basename "$kernel" .cu | tr -c 'A-Za-z0-9\n' _)
    wrapper=$out/$stem.cpp
    {
        echo '#include "shim.h"'
        echo "extern \"C\" __attribute__((weak, visibility(\"hidden\"))) char __start_shim_$stem[], __stop_shim_$stem[];"
        # Each .cu is a program of its own for NVRTC: two may have helpers of the same name.
        echo "namespace {"
        echo "#include \"$kernel\""
        echo "__attribute__((constructor)) void shim_register_file() {"
        $cxx -E -P -x c++ -std=c++17 -DPARAFT_SHIM -I "$folder" "$kernel" | tr '\n' ' ' |
            grep -oE 'extern "C" *__global__ *(void *)?(__launch_bounds__ *\([^()]*\) *)?(void *)?[A-Za-z_0-9]+ *\(' |
            sed -E -e 's/ *\($//' \
                -e 's/.*__launch_bounds__ *(\([^()]*\)).*[ )]([A-Za-z_0-9]+)$/    shim_register_kernel("\2", \2, shim_bounds\1, S, E);/' \
                -e 's/^extern.*[ ]([A-Za-z_0-9]+)$/    shim_register_kernel("\1", \1, 1024, S, E);/' \
                -e "s/S, E/__start_shim_$stem, __stop_shim_$stem/"
        echo "}"
        echo "}"
    } >"$wrapper"
    $cxx $flags -c "$wrapper" -I "$here" -I "$folder" -o "$out/$stem.o"
    # All of a file's static shared memory in a section of its own, so that it can be poisoned before each block.
    objcopy --set-section-flags .bss=alloc,load,contents,data --rename-section .bss="shim_$stem" "$out/$stem.o"
    objects="$objects $out/$stem.o"
done
$cxx $flags -c "$here/shim.cpp" -I "$here" -o "$out/shim.o"
$cxx -r -nostdlib $objects "$out/shim.o" -o "$out/kernels.o"
echo "$out/kernels.o"
