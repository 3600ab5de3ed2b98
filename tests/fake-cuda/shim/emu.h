// Runs the CUDA kernels of worker/compute/kernels on the CPU, for tests: the host's side.
//
// A kernel is compiled by the C++ compiler with shim.h in front of it (kernels.sh does so by hand, build.rs in
// the crate) and registers itself by name. A test program launches it like this:
//
//   // CXXFLAGS="-O2" sh kernels.sh OUT kernels/*.cu     (writes OUT/kernels.o; -fsanitize=address may be added)
//   // g++ -std=c++17 -O2 -I shim test.cpp OUT/kernels.o -lpthread -lrt -o test
//   #include "emu.h"
//   #include <cstdio>
//   #include <vector>
//   int main() {
//       const int rows = 7, columns = 33;
//       std::vector<float> x(rows * columns, 1.0f), y(rows);
//       for (int schedule = 0; schedule < 3; schedule++) {
//           const char* error = emu_launch_args("row_sum_f32", {rows, 1, 1}, {128, 1, 1}, 0,
//                                               (emu_schedule)schedule, 42,
//                                               x.data(), y.data(), rows, columns);
//           if (error) { printf("%s\n", error); return 1; }
//           for (float v : y) if (v != columns) return 1;
//       }
//   }
//
// emu_launch_args takes the kernel's arguments by value and checks their sizes and number against the kernel's own
// signature; a scalar must therefore be of exactly the kernel's width (`7LL` for a `long long`).
//
// What is an error, with the kernel's name, block and threads in the text: threads at different barriers, or some
// of them gone while others wait (barrier divergence); warp collectives whose masks disagree or leave out the
// caller; writes past the dynamic shared memory; a block larger than __launch_bounds__; a kernel that does not
// end (PARAFT_FAKE_CUDA_KERNEL_SECONDS, 120 by default).
//
// Shared memory is filled with 0xFF (NaN, -1) before each block, values taken by a shuffle from a lane that does not
// exist or has gone are 0xFF too: whoever reads what was never written gets NaN, not zero.
#ifndef PARAFT_EMU_H
#define PARAFT_EMU_H

#include <stddef.h>
#include <stdint.h>

#define EMU_API extern "C" __attribute__((visibility("default")))

struct emu_dim {
    unsigned x, y, z;
};

// The order in which the threads of a block run between two barriers, and the blocks of the grid.
enum emu_schedule : int {
    EMU_ASCENDING = 0,
    EMU_DESCENDING = 1,
    EMU_RANDOM = 2,  // a new order at each barrier, from the seed
};

// Runs the kernel to its end; `args` points to its arguments, one by one, as for cuLaunchKernel. Returns null, or what
// went wrong (valid until the next launch from this thread). One launch runs at a time; others wait.
EMU_API const char* emu_launch(const char* kernel, emu_dim grid, emu_dim block, size_t dynamic_shared_bytes,
                               void** args, int schedule, uint64_t seed);

// The number of arguments of a kernel (-1: no such kernel) and, if `sizes` is not null, their sizes in bytes.
EMU_API int emu_kernel_args(const char* kernel, size_t* sizes, int capacity);

// 1 where the kernel's argument of this number, from 0, is a pointer.
EMU_API int emu_kernel_arg_is_pointer(const char* kernel, int argument);

// The most threads a block of this kernel may have: its __launch_bounds__, else 1024; -1: no such kernel.
EMU_API int emu_kernel_max_threads(const char* kernel);

// The names of all kernels, one by one: null past the last.
EMU_API const char* emu_kernel_name(int index);

#include <string>

template <class... A>
const char* emu_launch_args(const char* kernel, emu_dim grid, emu_dim block, size_t dynamic_shared_bytes,
                            emu_schedule schedule, uint64_t seed, A... args) {
    static thread_local std::string error;
    size_t expected[64];
    const int count = emu_kernel_args(kernel, expected, 64);
    const size_t given[] = {sizeof(A)..., 0};
    bool fits = count == (int)sizeof...(A);
    for (int i = 0; fits && i < count; i++) fits = expected[i] == given[i];
    if (count < 0) {
        error = std::string("no kernel is called ") + kernel;
        return error.c_str();
    }
    if (!fits) {
        error = std::string(kernel) + ": the arguments differ in number or size from the kernel's:";
        for (int i = 0; i < count; i++) error += " " + std::to_string(expected[i]);
        return error.c_str();
    }
    void* pointers[] = {(void*)&args..., nullptr};
    return emu_launch(kernel, grid, block, dynamic_shared_bytes, pointers, schedule, seed);
}

#endif
