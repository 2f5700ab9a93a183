// Bitwise properties of the fused decode step on a GPU: repeats, tilings, and neighbours.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/cuda_test_util.h"

namespace gdn::kernels {
namespace {

using FusedDecodeBits = CudaTest;

// Forks into unused slots: the inputs survive.
FusedCall Forking(const FusedShape& shape) {
  FusedCall call(shape);
  int64_t unused = 0;
  for (int64_t& slot : call.write) {
    while (std::find(call.read.begin(), call.read.end(), unused) != call.read.end()) ++unused;
    slot = unused++;
  }
  return call;
}

// How many of 1,000 runs differ from the first. With early_start behind the same call of another
// layer, while which it begins.
int Differing(const FusedCall& before, int tiling, int32_t early_start) {
  const FusedCall first = CudaResult(before, tiling);
  FusedCall host = before;
  DeviceCall device(host);
  device.args.early_start = early_start;
  const DeviceCall other(host);
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  int different = 0;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    Must(cudaMemsetAsync(device.y.get(), 0xff, device.y.bytes(), stream.get()));
    if (early_start != 0) {
      EXPECT_EQ(cuda::FusedDecodeWith(exec, other.args, tiling), GDN_OK) << gdn_last_error();
    }
    EXPECT_EQ(cuda::FusedDecodeWith(exec, device.args, tiling), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    device.Download(host);
    different += host.y.bytes() != first.y.bytes() || host.state.bytes() != first.state.bytes() ||
                 host.conv_state.bytes() != first.conv_state.bytes();
  }
  return different;
}

TEST_F(FusedDecodeBits, AThousandRepeats) {
  for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
    for (int tiling = kGenericTiling; tiling < cuda::kNumDecodeTilings; ++tiling) {
      for (int64_t tokens : {1, 3}) {
        if (tiling >= 0 && !cuda::DecodeTilingCovers(tiling, 2, tokens)) continue;
        FusedShape s;
        s.rows = 2;  // What is downloaded a thousand times is small.
        s.key_heads = 1;
        s.tokens = tokens;
        s.state_dtype = state_dtype;
        s.special_rows = false;
        s.spare_slots = 0;
        const FusedCall before = Forking(s);
        for (int32_t early_start : {0, 1}) {
          SCOPED_TRACE("tiling " + std::to_string(tiling) + ", state " +
                       std::to_string(state_dtype) + ", tokens " + std::to_string(tokens) +
                       ", early " + std::to_string(early_start));
          EXPECT_EQ(Differing(before, tiling, early_start), 0);
        }
      }
    }
  }
}

TEST_F(FusedDecodeBits, EveryTilingGivesTheSameBits) {
  for (gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (int64_t tokens : {1, 4}) {
        for (int64_t ratio : {1, 2}) {
          FusedShape s;
          s.rows = 20;
          s.ratio = ratio;
          s.dtype = dtype;
          s.state_dtype = state_dtype;
          s.tokens = tokens;
          const FusedCall before(s);
          constexpr int kQuarters = 3;  // Covers all of these.
          const FusedCall first = CudaResult(before, kQuarters);
          for (int tiling = 0; tiling < cuda::kNumDecodeTilings; ++tiling) {
            if (!cuda::DecodeTilingCovers(tiling, s.ratio, tokens)) continue;
            SCOPED_TRACE(tiling);
            ExpectSameBits(CudaResult(before, tiling), first);
          }
        }
      }
    }
  }
}

// More blocks than run at once: the first ones wait for the kernel before and fetch ahead for later
// ones, past padding, fresh and forked rows.
TEST_F(FusedDecodeBits, LaterBlocksGiveTheSameBits) {
  for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
    FusedShape s;
    s.rows = 350;
    s.key_heads = 1;
    s.state_dtype = state_dtype;
    const FusedCall before(s);
    constexpr int kQuarters = 3;
    const FusedCall first = CudaResult(before, kQuarters);
    for (int tiling = 0; tiling < cuda::kNumDecodeTilings; ++tiling) {
      for (int32_t early_start : {0, 1}) {
        SCOPED_TRACE(tiling);
        FusedCall host = before;
        DeviceCall device(host);
        device.args.early_start = early_start;
        ASSERT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
        device.Download(host);
        ExpectSameBits(host, first);
      }
    }
  }
}

// Each row alone gives the bits it has among the others, whatever the launcher chooses for either.
TEST_F(FusedDecodeBits, ARowDoesNotDependOnTheRowsAroundIt) {
  for (int64_t rows : {2, 9, 70}) {
    for (int64_t ratio : {1, 2, 3}) {
      for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
        SCOPED_TRACE(rows);
        FusedShape s;
        s.rows = rows;
        s.ratio = ratio;
        s.state_dtype = state_dtype;
        FusedCall before(s);
        const FusedCall together = CudaResult(before);
        FusedCall alone = before;
        const DeviceCall device(alone);
        for (int64_t row = 0; row < rows; ++row) {
          gdn_fused_decode_args args = device.args;
          args.rows = 1;
          args.x = static_cast<const uint16_t*>(args.x) + row * s.x_stride();
          args.y = static_cast<uint16_t*>(args.y) + row * s.y_stride();
          args.read_index += row;
          args.write_index += row;
          args.fresh += row;
          const Stream stream;
          const gdn_exec exec = stream.Exec();
          ASSERT_EQ(gdn_fused_decode(&exec, &args), GDN_OK) << gdn_last_error();
          stream.Synchronize();
        }
        device.Download(alone);
        ExpectSameBits(alone, together);
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
