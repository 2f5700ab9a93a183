// The ways in which the 128x128 fused decode kernel can be launched; for its launcher, the tests
// and the benchmark.
#ifndef KERNELS_CUDA_DECODE_TILING_H_
#define KERNELS_CUDA_DECODE_TILING_H_

#include "gdn/kernels/fused_decode.h"

namespace gdn::cuda {

// How the 128x128 kernel divides a head: `splits` blocks, each of `warps` warps that hold `groups`
// times eight rows of the state.
struct DecodeTiling {
  int warps;
  int groups;
  int splits;
};

// The tilings that are compiled; all give the same bits.
constexpr DecodeTiling kDecodeTilings[] = {{16, 1, 1}, {8, 2, 1}, {8, 1, 2}, {4, 1, 4}, {2, 1, 8}};
constexpr int kNumDecodeTilings = 5;

// Index into kDecodeTilings for the arguments on the current device, or -1 for the generic kernel.
gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling);

// Runs the given tiling, or the generic kernel for -1; GDN_UNSUPPORTED_SHAPE where the arguments or
// the device rule it out.
gdn_status FusedDecodeWith(const gdn_exec& exec, const gdn_fused_decode_args& args, int tiling);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_DECODE_TILING_H_
