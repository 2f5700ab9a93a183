// The separate ops of a decode step on a GPU: the same bits again and again, in any company of
// rows, and far into large buffers.
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/ops_test_util.h"

namespace gdn::kernels {
namespace {

using OpsBitsCuda = CudaTest;

// The ops on a call: everything that they write.
struct OpsResult {
  explicit OpsResult(const FusedCall& before) : call(before), between(before.shape) {}
  FusedCall call;
  HostBetween between;
};

void ExpectSameBits(const OpsResult& a, const OpsResult& b) {
  ExpectSameBits(a.call, b.call);
  EXPECT_TRUE(a.between.qkv.bytes() == b.between.qkv.bytes());
  EXPECT_TRUE(a.between.g.bytes() == b.between.g.bytes());
  EXPECT_TRUE(a.between.beta.bytes() == b.between.beta.bytes());
  EXPECT_TRUE(a.between.o.bytes() == b.between.o.bytes());
}

class OpsOnDevice {
 public:
  explicit OpsOnDevice(const FusedCall& before)
      : result_(before), device(result_.call), between(result_.between) {}
  void Run(const gdn_fused_decode_args& args, const StepBetween& at) const {
    const Stream stream;
    EnqueueOps(stream.Exec(), args, at);
    stream.Synchronize();
  }
  const OpsResult& Download() {
    device.Download(result_.call);
    between.Download(result_.between);
    return result_;
  }

 private:
  OpsResult result_;

 public:
  DeviceCall device;
  DeviceBetween between;
};

OpsResult Result(const FusedCall& before) {
  OpsOnDevice ops(before);
  ops.Run(ops.device.args, ops.between.get());
  return ops.Download();
}

// Of two shapes: the one that has kernels of its own, and another.
std::vector<FusedShape> Shapes() {
  FusedShape common;
  common.rows = 4;
  common.key_heads = 1;
  common.special_rows = false;
  common.round_o = common.round_before_gate = 1;
  FusedShape other = common;
  other.key_dim = 60;
  other.value_dim = 100;
  other.state_dtype = GDN_BF16;
  return {common, other};
}

TEST_F(OpsBitsCuda, AThousandRepeats) {
  for (const FusedShape& shape : Shapes()) {
    SCOPED_TRACE("K " + std::to_string(shape.key_dim));
    const FusedCall before(shape);
    const OpsResult first = Result(before);
    OpsOnDevice ops(before);
    for (int i = 0; i < 1000 && !HasFailure(); ++i) {
      ops.device.Upload(before);
      Must(cudaMemset(ops.between.qkv.get(), 0xff, ops.between.qkv.bytes()));
      Must(cudaMemset(ops.between.g.get(), 0xff, ops.between.g.bytes()));
      Must(cudaMemset(ops.between.beta.get(), 0xff, ops.between.beta.bytes()));
      Must(cudaMemset(ops.between.o.get(), 0xff, ops.between.o.bytes()));
      Must(cudaDeviceSynchronize());
      ops.Run(ops.device.args, ops.between.get());
      ExpectSameBits(ops.Download(), first);
    }
  }
}

TEST_F(OpsBitsCuda, ARowDoesNotDependOnTheRowsAroundIt) {
  for (FusedShape shape : Shapes()) {
    SCOPED_TRACE("K " + std::to_string(shape.key_dim));
    shape.rows = 70;
    shape.special_rows = true;
    const FusedCall before(shape);
    const OpsResult together = Result(before);
    OpsOnDevice alone(before);
    const auto at = [](const void* from, int64_t elements, gdn_dtype dtype) {
      return static_cast<char*>(const_cast<void*>(from)) + elements * SizeOf(dtype);
    };
    for (int64_t row = 0; row < shape.rows; ++row) {
      gdn_fused_decode_args args = alone.device.args;
      args.rows = 1;
      args.x = at(args.x, row * shape.x_stride(), shape.dtype);
      args.y = at(args.y, row * shape.y_stride(), shape.dtype);
      args.read_index += row;
      args.write_index += row;
      args.fresh += row;
      StepBetween between = alone.between.get();
      between.qkv = at(between.qkv, row * shape.channels(), shape.dtype);
      between.o = at(between.o, row * shape.values(), shape.dtype);
      between.g += row * shape.value_heads();
      between.beta += row * shape.value_heads();
      alone.Run(args, between);
    }
    ExpectSameBits(alone.Download(), together);
  }
}

// `bytes` at `stride`, one after the other.
void CopyLines(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t bytes,
               int64_t lines, cudaMemcpyKind kind) {
  Must(cudaMemcpy2D(to, static_cast<size_t>(to_stride), from, static_cast<size_t>(from_stride),
                    static_cast<size_t>(bytes), static_cast<size_t>(lines), kind));
  Must(cudaDeviceSynchronize());
}

// Slots and lines from 2^31 bytes on, and from 2^31 elements on.
TEST_F(OpsBitsCuda, SlotsAndLinesBeyondTwoToThe31) {
  for (FusedShape shape : Shapes()) {
    SCOPED_TRACE("K " + std::to_string(shape.key_dim));
    shape.rows = 2;
    shape.spare_slots = 0;
    FusedCall before(shape);
    before.read = before.write = {0, 1};  // Both read pools that are all there.
    Random random(7);
    for (int64_t i = 0; i < before.state.size(); ++i) before.state.Set(i, random.Normal());
    for (int64_t i = 0; i < before.conv_state.size(); ++i)
      before.conv_state.Set(i, random.Normal());
    const OpsResult expected = Result(before);

    // The first slot and line at the beginning, the second at `apart` elements.
    const int64_t state_element = SizeOf(shape.state_dtype);
    for (const int64_t apart : {(int64_t{1} << 30) + 64, (int64_t{1} << 31) + 64}) {
      SCOPED_TRACE(apart);
      OpsOnDevice ops(before);
      const auto far = [&](int64_t line, int64_t element) {
        return DeviceBuffer(static_cast<size_t>((apart + line) * element));
      };
      const DeviceBuffer state = far(shape.state_stride(), state_element);
      const DeviceBuffer conv_state = far(shape.conv_stride(), 2);
      const DeviceBuffer x = far(shape.x_stride(), 2);
      const DeviceBuffer y = far(shape.y_stride(), 2);
      const auto spread = [&](const DeviceBuffer& to, const Tensor& from, int64_t line) {
        const int64_t element = SizeOf(from.dtype());
        CopyLines(to.get(), apart * element, from.data(), line * element, line * element, 2,
                  cudaMemcpyHostToDevice);
      };
      const auto gather = [&](Tensor& to, const DeviceBuffer& from, int64_t line) {
        const int64_t element = SizeOf(to.dtype());
        CopyLines(to.data(), line * element, from.get(), apart * element, line * element, 2,
                  cudaMemcpyDeviceToHost);
      };
      spread(state, before.state, shape.state_stride());
      spread(conv_state, before.conv_state, shape.conv_stride());
      spread(x, before.x, shape.x_stride());
      spread(y, before.y, shape.y_stride());
      gdn_fused_decode_args args = ops.device.args;
      args.state = state.get();
      args.conv_state = conv_state.get();
      args.x = x.get();
      args.y = y.get();
      args.state_slot_stride = args.conv_slot_stride = apart;
      args.x_token_stride = args.y_token_stride = apart;
      ops.Run(args, ops.between.get());
      OpsResult got = ops.Download();
      gather(got.call.state, state, shape.state_stride());
      gather(got.call.conv_state, conv_state, shape.conv_stride());
      gather(got.call.y, y, shape.y_stride());
      ExpectSameBits(got, expected);
    }
  }
}

// More rows than a dimension of a grid has blocks. The real ones are around its edge; the others
// are padding, of which the ops with states make zeros.
TEST_F(OpsBitsCuda, MoreRowsThanAGridDimension) {
  const std::vector<int64_t> places = {0, 65534, 65535, 65536, 69999};
  FusedShape few = Shapes()[0];
  few.rows = static_cast<int64_t>(places.size());
  few.ratio = 1;
  const FusedCall before(few);
  const OpsResult expected = Result(before);
  FusedCall many = before;
  FusedShape& shape = many.shape;
  shape.rows = 70000;
  many.x = Tensor(shape.dtype, shape.rows * shape.x_stride());
  many.y = Tensor(shape.dtype, shape.rows * shape.y_stride());
  many.read.assign(shape.rows, -1);
  many.write.assign(shape.rows, -1);
  many.fresh.assign(shape.rows, 0);
  for (size_t i = 0; i < places.size(); ++i) {
    many.read[places[i]] = before.read[i];
    many.write[places[i]] = before.write[i];
    for (int64_t j = 0; j < shape.x_stride(); ++j) {
      many.x.Set(places[i] * shape.x_stride() + j,
                 before.x.Get(static_cast<int64_t>(i) * shape.x_stride() + j));
    }
  }
  const OpsResult got = Result(many);
  EXPECT_TRUE(got.call.state.bytes() == expected.call.state.bytes());
  EXPECT_TRUE(got.call.conv_state.bytes() == expected.call.conv_state.bytes());
  const auto line = [](const Tensor& tensor, int64_t row, int64_t size) {
    return tensor.Slice(row * size, (row + 1) * size);
  };
  const auto expect_rows = [&](const Tensor& all, const Tensor& some, int64_t size,
                               bool zeros_between) {
    int64_t wrong = 0;
    for (int64_t row = 0, next = 0; row < shape.rows; ++row) {
      const bool real = next < few.rows && row == places[next];
      if (real) {
        wrong += line(all, row, size) != line(some, next, size);
        ++next;
      } else if (zeros_between) {
        const auto bytes = line(all, row, size);
        wrong += !std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; });
      }
    }
    EXPECT_EQ(wrong, 0);
  };
  expect_rows(got.between.qkv, expected.between.qkv, shape.channels(), true);
  expect_rows(got.between.o, expected.between.o, shape.values(), true);
  expect_rows(got.between.g, expected.between.g, shape.value_heads(), false);
  expect_rows(got.between.beta, expected.between.beta, shape.value_heads(), false);
  expect_rows(got.call.y, expected.call.y, shape.y_stride(), false);
}

}  // namespace
}  // namespace gdn::kernels
