// The ways in which the 128x128 fused decode kernel can be launched; for its launcher, the tests
// and the benchmark.
#ifndef KERNELS_CUDA_DECODE_TILING_H_
#define KERNELS_CUDA_DECODE_TILING_H_

#include "gdn/kernels/fused_decode.h"

namespace gdn::cuda {

// How the kernels for 128x128 divide the work. splits 0: blocks that stream whole heads through
// shared memory (fused_decode_stream.cuh). Otherwise a head is divided into `splits` blocks of
// `warps` warps, each with `groups` times eight rows of the state: one whole head a block
// (fused_decode_whole.cuh; several tokens: fused_decode_split.cuh) or a part of one
// (fused_decode_split.cuh).
struct DecodeTiling {
  int warps;
  int groups;
  int splits;
};

// The tilings that are compiled; all give the same bits. The last two are for whole heads of one
// token; where blocks of 4x4 and 8x2 differ in what goes through registers and what through shared
// memory, see fused_decode_128.cuh.
constexpr DecodeTiling kDecodeTilings[] = {{8, 2, 0}, {8, 2, 1}, {4, 2, 2},
                                           {4, 1, 4}, {4, 4, 1}, {8, 2, 1}};
constexpr int kNumDecodeTilings = 6;

// Whether a tiling covers a ratio HV/H and a number of tokens, on a device that can run it: a
// cluster of blocks works on a key head, eight at most.
constexpr bool DecodeTilingCovers(int tiling, int64_t ratio, int64_t tokens) {
  const int splits = kDecodeTilings[tiling].splits;
  const bool one_token = splits == 0 || tiling >= 4;
  return splits * ratio <= 8 && (tokens == 1 || !one_token);
}

// Index into kDecodeTilings for the arguments on the current device, or -1 for the generic kernel.
gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling);

// Runs the given tiling, or the generic kernel for -1; GDN_UNSUPPORTED_SHAPE where the arguments or
// the device rule it out.
gdn_status FusedDecodeWith(const gdn_exec& exec, const gdn_fused_decode_args& args, int tiling);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_DECODE_TILING_H_
