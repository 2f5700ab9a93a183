// Slots, strides, graphs and launch order of the fused decode step on a GPU.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/cuda_test_util.h"

namespace gdn::kernels {
namespace {

using FusedDecodeSlots = CudaTest;

// A slot whose offset exceeds 2^31 bytes, and one beyond 2^31 elements, give the bits of slot 0.
TEST_F(FusedDecodeSlots, SlotsBeyondTwoToThe31) {
  for (int tiling : {kAutoTiling, kGenericTiling}) {
    FusedShape s;
    s.rows = 1;
    s.key_heads = 16;
    s.special_rows = false;
    s.spare_slots = 0;
    FusedCall small(s);
    small.read = small.write = {0};
    Random random(7);
    for (int64_t i = 0; i < s.state_stride(); ++i) small.state.Set(i, random.Normal());
    for (int64_t i = 0; i < s.conv_stride(); ++i) small.conv_state.Set(i, random.Normal());
    const FusedCall expected = CudaResult(small, tiling);
    for (int64_t slot : {int64_t{1030}, int64_t{4200}}) {
      const int64_t state_bytes = s.state_stride() * 4;
      const int64_t conv_bytes = s.conv_stride() * 2;
      const DeviceBuffer state(static_cast<size_t>((slot + 1) * state_bytes));
      const DeviceBuffer conv(static_cast<size_t>((slot + 1) * conv_bytes));
      Must(cudaMemcpy(state.get<char>() + slot * state_bytes, small.state.data(), state_bytes,
                      cudaMemcpyHostToDevice));
      Must(cudaMemcpy(conv.get<char>() + slot * conv_bytes, small.conv_state.data(), conv_bytes,
                      cudaMemcpyHostToDevice));
      Must(cudaDeviceSynchronize());
      FusedCall host = small;
      host.read = host.write = {slot};
      DeviceCall device(host);
      device.args.state = state.get();
      device.args.conv_state = conv.get();
      ASSERT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
      device.y.Download(host.y.data());
      Must(cudaMemcpy(host.state.data(), state.get<char>() + slot * state_bytes, state_bytes,
                      cudaMemcpyDeviceToHost));
      Must(cudaMemcpy(host.conv_state.data(), conv.get<char>() + slot * conv_bytes, conv_bytes,
                      cudaMemcpyDeviceToHost));
      ExpectSameBits(host, expected);
    }
  }
}

// More rows than fit one grid dimension; the real rows sit around its edge.
TEST_F(FusedDecodeSlots, MoreRowsThanAGridDimension) {
  for (int tiling : {kAutoTiling, kGenericTiling}) {
    FusedShape few;
    few.rows = 5;
    few.key_heads = 1;
    few.ratio = 1;
    few.special_rows = false;
    const FusedCall expected_from(few);
    const FusedCall expected = CudaResult(expected_from, tiling);
    FusedShape s = few;
    s.rows = 70000;
    s.x_pad = few.x_pad;
    FusedCall host = expected_from;
    const int64_t places[] = {0, 65534, 65535, 65536, 69999};
    std::vector<int64_t> read(s.rows, -1);
    std::vector<int64_t> write(s.rows, -1);
    const std::vector<uint8_t> fresh(s.rows, 0);
    const DeviceBuffer x(static_cast<size_t>(s.rows * s.x_stride() * 2));
    const DeviceBuffer y(static_cast<size_t>(s.rows * s.y_stride() * 2));
    Must(cudaMemset(x.get(), 0xff, x.bytes()));
    Must(cudaMemset(y.get(), 0xff, y.bytes()));
    for (int i = 0; i < 5; ++i) {
      read[places[i]] = expected_from.read[i];
      write[places[i]] = expected_from.write[i];
      Must(cudaMemcpy(x.get<char>() + places[i] * s.x_stride() * 2,
                      static_cast<const char*>(host.x.data()) + i * s.x_stride() * 2,
                      s.x_stride() * 2, cudaMemcpyHostToDevice));
    }
    const DeviceBuffer reads(read);
    const DeviceBuffer writes(write);
    const DeviceBuffer fresh_flags(fresh);
    DeviceCall device(host);
    device.args.rows = s.rows;
    device.args.x = x.get();
    device.args.y = y.get();
    device.args.read_index = reads.get<int64_t>();
    device.args.write_index = writes.get<int64_t>();
    device.args.fresh = fresh_flags.get<uint8_t>();
    ASSERT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
    device.state.Download(host.state.data());
    device.conv_state.Download(host.conv_state.data());
    EXPECT_TRUE(host.state.bytes() == expected.state.bytes());
    EXPECT_TRUE(host.conv_state.bytes() == expected.conv_state.bytes());
    const std::vector<uint8_t> all = y.Bytes();
    int64_t wrong = 0;
    for (int64_t row = 0, next = 0; row < s.rows; ++row) {
      const bool real = next < 5 && row == places[next];
      for (int64_t i = 0; i < s.y_stride() * 2; ++i) {
        const uint8_t wanted = i >= s.values() * 2 ? 0xff
                               : real              ? expected.y.bytes()[next * s.y_stride() * 2 + i]
                                                   : 0;
        wrong += all[row * s.y_stride() * 2 + i] != wanted;
      }
      if (real) ++next;
    }
    EXPECT_EQ(wrong, 0);
  }
}

// A state that is not aligned for wide accesses takes the generic kernel, not a misread.
TEST_F(FusedDecodeSlots, MisalignedStrides) {
  FusedShape s;
  s.rows = 5;
  for (int damage = 0; damage < 5; ++damage) {
    SCOPED_TRACE(damage);
    FusedShape odd = s;
    if (damage == 0) odd.state_pad = 1;
    if (damage == 1) odd.conv_pad = 1;
    if (damage == 2) odd.x_pad = 1;
    if (damage == 4) odd.y_pad = 1;
    FusedCall before(odd);
    FusedCall host = before;
    DeviceCall device(host);
    const DeviceBuffer shifted(device.state.bytes() + 4);
    if (damage == 3) {
      Must(cudaMemcpy(shifted.get<char>() + 4, host.state.data(), device.state.bytes(),
                      cudaMemcpyHostToDevice));
      Must(cudaDeviceSynchronize());
      device.args.state = shifted.get<char>() + 4;
    }
    int tiling = 0;
    ASSERT_EQ(cuda::ChooseDecodeTiling(device.args, &tiling), GDN_OK);
    EXPECT_EQ(tiling, kGenericTiling);
    ASSERT_EQ(RunOnDevice(device), GDN_OK) << gdn_last_error();
    device.Download(host);
    if (damage == 3) {
      Must(cudaMemcpy(host.state.data(), shifted.get<char>() + 4, device.state.bytes(),
                      cudaMemcpyDeviceToHost));
    }
    const FusedErrors errors = Compare(before, host, RefResult(before));
    EXPECT_LE(errors.y, 2e-3);
    EXPECT_LE(errors.state, 5e-4);
    EXPECT_EQ(errors.slots_touched + errors.pads_touched + errors.conv_differs, 0);
  }
}

// A captured graph follows the indices and flags that the device holds when it is replayed.
TEST_F(FusedDecodeSlots, GraphReplaysFollowTheIndices) {
  for (int64_t rows : {1, 8, 40}) {
    SCOPED_TRACE(rows);
    FusedShape s;
    s.rows = rows;
    s.special_rows = false;
    FusedCall capture_from(s);
    FusedCall host = capture_from;
    DeviceCall device(host);
    const Stream stream;
    const gdn_exec exec = stream.Exec();
    const CapturedGraph graph(stream, [&] {
      ASSERT_EQ(gdn_fused_decode(&exec, &device.args), GDN_OK) << gdn_last_error();
    });
    for (uint32_t seed : {1u, 2u, 3u}) {
      FusedShape changed = s;
      changed.seed = seed;
      changed.special_rows = seed != 1;
      const FusedCall before(changed);
      device.Upload(before);
      graph.Launch();
      stream.Synchronize();
      FusedCall replayed = before;
      device.Download(replayed);
      ExpectSameBits(replayed, CudaResult(before));
    }
  }
}

// One launch does everything, whatever its shape. Captured, not run: the buffers are one row's.
TEST_F(FusedDecodeSlots, AStepIsOneKernel) {
  for (int64_t value_dim : {128, 100}) {
    for (gdn_dtype state_dtype : {GDN_F32, GDN_BF16}) {
      for (int64_t tokens : {1, 4}) {
        FusedShape s;
        s.rows = 1;
        s.tokens = tokens;
        s.value_dim = value_dim;
        s.state_dtype = state_dtype;
        FusedCall host(s);
        DeviceCall device(host);
        const Stream stream;
        const gdn_exec exec = stream.Exec();
        for (int64_t rows : {1, 8, 64, 512, 70000}) {
          for (int32_t early_start : {0, 1}) {
            SCOPED_TRACE("V " + std::to_string(value_dim) + ", state " +
                         std::to_string(state_dtype) + ", tokens " + std::to_string(tokens) +
                         ", rows " + std::to_string(rows));
            device.args.rows = rows;
            device.args.early_start = early_start;
            const CapturedGraph graph(stream, [&] {
              ASSERT_EQ(gdn_fused_decode(&exec, &device.args), GDN_OK) << gdn_last_error();
            });
            const std::vector<cudaGraphNode_t> nodes = graph.Nodes();
            ASSERT_EQ(nodes.size(), 1u);
            cudaGraphNodeType type;
            Must(cudaGraphNodeGetType(nodes[0], &type));
            EXPECT_EQ(type, cudaGraphNodeTypeKernel);
          }
        }
      }
    }
  }
}

// Layers chained through x: with early_start each kernel may begin while the one before it, which
// writes its x, still runs. Bits as without it, from a graph and from plain launches.
TEST_F(FusedDecodeSlots, EarlyStartKeepsTheOrder) {
  for (int64_t rows : {1, 3, 20, 70}) {
    SCOPED_TRACE(rows);
    const bool many = rows == 70;  // More blocks than run at once.
    const int layers = many ? 3 : 10;
    FusedShape s;
    s.rows = rows;
    s.key_heads = 4;
    s.special_rows = rows == 3;
    if (many) s.state_dtype = GDN_BF16;
    std::vector<FusedCall> hosts;
    for (int layer = 0; layer < layers; ++layer) {
      s.seed = static_cast<uint32_t>(layer + 1);
      hosts.emplace_back(s);
      // One step's layers share the indices.
      hosts[layer].read = hosts[0].read;
      hosts[layer].write = hosts[0].write;
      hosts[layer].fresh = hosts[0].fresh;
      hosts[layer].state = hosts[0].state;
      hosts[layer].conv_state = hosts[0].conv_state;
    }
    std::vector<std::vector<uint8_t>> results[3];
    for (int mode = 0; mode < 3; ++mode) {
      std::vector<std::unique_ptr<DeviceCall>> devices;
      for (FusedCall& host : hosts) devices.push_back(std::make_unique<DeviceCall>(host));
      const Stream stream;
      const gdn_exec exec = stream.Exec();
      const auto enqueue = [&] {
        for (int layer = 0; layer < layers; ++layer) {
          gdn_fused_decode_args& args = devices[layer]->args;
          args.early_start = mode > 0;
          if (layer + 1 < layers) {  // y becomes the v columns of the next layer.
            const gdn_fused_decode_args& next = devices[layer + 1]->args;
            args.y = static_cast<uint16_t*>(const_cast<void*>(next.x)) + next.v_offset;
            args.y_token_stride = next.x_token_stride;
          }
          ASSERT_EQ(gdn_fused_decode(&exec, &args), GDN_OK) << gdn_last_error();
        }
      };
      std::optional<CapturedGraph> graph;
      if (mode == 2) {
        graph.emplace(stream, enqueue);
        graph->Launch();
      } else {
        enqueue();
      }
      stream.Synchronize();
      for (const auto& device : devices) {
        results[mode].push_back(device->state.Bytes());
        results[mode].push_back(device->conv_state.Bytes());
      }
      results[mode].push_back(devices.back()->y.Bytes());
    }
    EXPECT_TRUE(results[0] == results[1]);
    EXPECT_TRUE(results[0] == results[2]);
  }
}

TEST_F(FusedDecodeSlots, NoRowsAndOnlyPaddingRows) {
  FusedShape s;
  s.rows = 4;
  FusedCall before(s);
  for (int64_t i = 0; i < s.rows; ++i) (i % 2 == 0 ? before.read : before.write)[i] = -1;
  for (int tiling : {kAutoTiling, kGenericTiling}) {
    const FusedErrors errors = Compare(before, CudaResult(before, tiling), RefResult(before));
    EXPECT_EQ(errors.padding_not_zero + errors.gaps_touched + errors.slots_touched, 0);
    FusedCall none = before;
    DeviceCall device(none);
    device.args.rows = 0;
    EXPECT_EQ(RunOnDevice(device, tiling), GDN_OK) << gdn_last_error();
    device.Download(none);
    ExpectSameBits(none, before);
  }
}

}  // namespace
}  // namespace gdn::kernels
