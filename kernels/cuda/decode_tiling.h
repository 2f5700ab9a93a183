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

// The tilings that are compiled; all give the same bits.
constexpr DecodeTiling kDecodeTilings[] = {{8, 2, 0}, {8, 2, 1}, {4, 2, 2}, {4, 1, 4}, {4, 4, 1}};
constexpr int kNumDecodeTilings = 5;

// Whether a tiling covers a ratio HV/H and a number of tokens, on a device that can run it: a
// cluster of blocks works on a key head, eight at most; the streaming blocks and the small ones
// of whole heads take one token.
constexpr bool DecodeTilingCovers(int tiling, int64_t ratio, int64_t tokens) {
  const DecodeTiling& t = kDecodeTilings[tiling];
  if (t.splits == 0) return tokens == 1;
  return t.splits * ratio <= 8 && (tokens == 1 || t.warps * t.splits != 4);
}

// Index into kDecodeTilings for the arguments on the current device, or -1 for the generic kernel.
gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling);

// Runs the given tiling, or the generic kernel for -1; GDN_UNSUPPORTED_SHAPE where the arguments or
// the device rule it out.
gdn_status FusedDecodeWith(const gdn_exec& exec, const gdn_fused_decode_args& args, int tiling);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_DECODE_TILING_H_
