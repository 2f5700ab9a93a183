// A seeded call of the fused prefill, and the ways to run it, for its tests on a GPU.
#ifndef KERNELS_CUDA_FUSED_PREFILL_TEST_UTIL_H_
#define KERNELS_CUDA_FUSED_PREFILL_TEST_UTIL_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/fused_prefill.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/cuda/fused_prefill.h"

namespace gdn::kernels {

// A fused call whose rows are sequences, with lines for all their tokens and a few behind them.
struct PrefillCall : FusedCall {
  static constexpr int64_t kTrailing = 3;

  PrefillCall(FusedShape s, const std::vector<int32_t>& lengths)
      : FusedCall(WithRows(std::move(s), lengths)), cu_seqlens(1, 0) {
    for (int32_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    const int64_t lines = tokens() + kTrailing;
    x = Tensor(shape.dtype, lines * shape.x_stride());
    Random random(shape.seed + 1);
    // Draws from these: a sum of uniforms for each element takes seconds for long calls.
    std::vector<float> normals(1 << 16);
    for (float& v : normals) v = shape.x_gain * random.Normal();
    const auto any = static_cast<uint32_t>(normals.size());
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t wide = shape.channels() + shape.values();
      for (int64_t i = 0; i < wide; ++i) {
        x.Set(line * shape.x_stride() + i, normals[random.Integer(any)]);
      }
      for (int64_t i = wide; i < wide + 2 * shape.value_heads(); ++i) {
        x.Set(line * shape.x_stride() + i, random.Uniform(shape.a_low, shape.a_high));
      }
    }
    y = Tensor(shape.dtype, lines * shape.y_stride());
  }
  static FusedShape WithRows(FusedShape s, const std::vector<int32_t>& lengths) {
    s.rows = static_cast<int64_t>(lengths.size());
    return s;
  }
  int64_t tokens() const { return cu_seqlens.back(); }
  int64_t Length(int64_t i) const { return cu_seqlens[i + 1] - cu_seqlens[i]; }

  // The same call with the columns of x in another order: z|v|b|a|k|q.
  void ReverseColumns() {
    const gdn_fused_decode_args from = Args();
    columns_reversed = true;
    const gdn_fused_decode_args to = PrefillArgs().layer;
    const FusedShape& s = shape;
    const int64_t keys = s.key_heads * s.key_dim;
    const Tensor old = x;
    const auto move = [&](int64_t before, int64_t after, int64_t count) {
      for (int64_t line = 0; line < old.size() / s.x_stride(); ++line) {
        for (int64_t i = 0; i < count; ++i) {
          x.Set(line * s.x_stride() + after + i, old.Get(line * s.x_stride() + before + i));
        }
      }
    };
    move(from.q_offset, to.q_offset, keys);
    move(from.k_offset, to.k_offset, keys);
    move(from.v_offset, to.v_offset, s.values());
    move(from.z_offset, to.z_offset, s.values());
    move(from.b_offset, to.b_offset, s.value_heads());
    move(from.a_offset, to.a_offset, s.value_heads());
  }

  // With the arguments of the layer in `layer`, of the host or of the device.
  gdn_fused_prefill_args PrefillArgs(const gdn_fused_decode_args& layer) const {
    gdn_fused_prefill_args args{};
    args.tokens = tokens() + spare_tokens;
    args.cu_seqlens = cu_seqlens.data();
    args.layer = layer;
    if (columns_reversed) {
      args.layer.z_offset = 0;
      args.layer.v_offset = shape.values();
      args.layer.b_offset = 2 * shape.values();
      args.layer.a_offset = args.layer.b_offset + shape.value_heads();
      args.layer.k_offset = args.layer.a_offset + shape.value_heads();
      args.layer.q_offset = args.layer.k_offset + shape.key_heads * shape.key_dim;
    }
    args.checkpoint_every = checkpoint_every;
    args.checkpoint_begin = checkpoint_begin.data();
    args.checkpoint_slots = checkpoint_slots.data();
    return args;
  }
  gdn_fused_prefill_args PrefillArgs() { return PrefillArgs(Args()); }

  std::vector<int32_t> cu_seqlens;
  int64_t spare_tokens = 0;
  bool columns_reversed = false;
  int64_t checkpoint_every = 0;
  std::vector<int64_t> checkpoint_begin;
  std::vector<int64_t> checkpoint_slots;
};

// Of a call that the tuned kernels cover.
inline FusedShape TunedShape(int64_t key_heads = 2, int64_t ratio = 2) {
  FusedShape shape;
  shape.key_heads = key_heads;
  shape.ratio = ratio;
  shape.x_pad = 8 + (8 - 2 * shape.value_heads() % 8) % 8;
  shape.y_pad = 8;
  shape.state_pad = 8;
  shape.conv_pad = 8;
  return shape;
}

// Ways to divide a call; Auto is the library's own.
inline constexpr cuda::PrefillPlan kAuto = {-1, false};
inline constexpr cuda::PrefillPlan kInTurn = {0, false};
inline constexpr cuda::PrefillPlan kWalkConvolves = {0, true};
inline constexpr cuda::PrefillPlan kStream = {2, false};
inline constexpr cuda::PrefillPlan kWideStream = {41, false};  // Not in pairs.

inline std::string NameOf(const cuda::PrefillPlan& plan) {
  return plan.walk_convolves ? "the walk convolves"
                             : "stream " + std::to_string(plan.stream_blocks);
}

// exec has the workspace.
inline void Enqueue(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                    const cuda::PrefillPlan& plan) {
  if (plan.stream_blocks < 0) {
    ASSERT_EQ(gdn_fused_prefill(&exec, &args), GDN_OK) << gdn_last_error();
    return;
  }
  cuda::Device device;
  ASSERT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  ASSERT_TRUE(cuda::CoversFusedPrefill(device, args));
  cuda::PreparedChunks chunks;
  cuda::FusedPrefillChunks(args, exec.workspace, &chunks);
  ASSERT_EQ(cuda::LaunchWayIn(exec, args, chunks, plan), GDN_OK) << gdn_last_error();
  ASSERT_EQ(cuda::LaunchWalk(exec, device, args, chunks, plan), GDN_OK) << gdn_last_error();
}

// A workspace of NaNs for a call, on the device.
class PrefillWorkspace {
 public:
  PrefillWorkspace(const gdn_exec& exec, const gdn_fused_prefill_args& args)
      : exec_(exec), buffer_(Bytes(exec, args)) {
    exec_.workspace = buffer_.get();
    exec_.workspace_bytes = buffer_.bytes();
    Poison();
  }
  const gdn_exec& exec() const { return exec_; }
  void Poison() const {
    Must(cudaMemsetAsync(buffer_.get(), 0xff, buffer_.bytes(),
                         static_cast<cudaStream_t>(exec_.stream)));
  }

 private:
  static size_t Bytes(const gdn_exec& exec, const gdn_fused_prefill_args& args) {
    size_t bytes = 0;
    EXPECT_EQ(gdn_fused_prefill_workspace(&exec, &args, &bytes), GDN_OK) << gdn_last_error();
    return bytes;
  }
  gdn_exec exec_;
  const DeviceBuffer buffer_;
};

inline void Launch(const gdn_fused_prefill_args& args, const cuda::PrefillPlan& plan = kAuto) {
  const Stream stream;
  const PrefillWorkspace workspace(stream.Exec(), args);
  Enqueue(workspace.exec(), args, plan);
  stream.Synchronize();
}

// A PrefillCall on the device.
struct DevicePrefill : DeviceCall {
  explicit DevicePrefill(PrefillCall& call)
      : DeviceCall(call),
        cu_seqlens(call.cu_seqlens),
        checkpoint_begin(call.checkpoint_begin),
        checkpoint_slots(call.checkpoint_slots),
        prefill(call.PrefillArgs(args)) {
    prefill.cu_seqlens = cu_seqlens.get<int32_t>();
    prefill.checkpoint_begin = checkpoint_begin.get<int64_t>();
    prefill.checkpoint_slots = checkpoint_slots.get<int64_t>();
  }
  void Upload(const PrefillCall& call) {
    DeviceCall::Upload(call);
    cu_seqlens.Upload(call.cu_seqlens.data());
  }

  DeviceBuffer cu_seqlens;
  DeviceBuffer checkpoint_begin;
  DeviceBuffer checkpoint_slots;
  gdn_fused_prefill_args prefill;
};

inline PrefillCall Result(const PrefillCall& before, const cuda::PrefillPlan& plan = kAuto) {
  PrefillCall call = before;
  const DevicePrefill device(call);
  Launch(device.prefill, plan);
  device.Download(call);
  return call;
}

// `count` tokens of sequence i from its token `first` on, alone and without checkpoints, from the
// slots that row i reads: the call after that.
inline PrefillCall PartResult(const PrefillCall& before, int64_t i, int64_t first, int64_t count) {
  const FusedShape& s = before.shape;
  const int64_t element = SizeOf(s.dtype);
  const int64_t line = before.cu_seqlens[i] + first;
  PrefillCall call = before;
  const DevicePrefill device(call);
  const DeviceBuffer cu(std::vector<int32_t>{0, static_cast<int32_t>(count)});
  gdn_fused_prefill_args args = device.prefill;
  args.tokens = count;
  args.cu_seqlens = cu.get<int32_t>();
  args.checkpoint_every = 0;
  args.layer.rows = 1;
  args.layer.x = device.x.get<char>() + line * s.x_stride() * element;
  args.layer.y = device.y.get<char>() + line * s.y_stride() * element;
  args.layer.read_index += i;
  args.layer.write_index += i;
  args.layer.fresh += i;
  Launch(args);
  device.Download(call);
  return call;
}

// The contents of a slot, without what lies between slots.
inline std::vector<uint8_t> StateOf(const FusedCall& call, int64_t slot) {
  const int64_t at = slot * call.shape.state_stride();
  return call.state.Slice(at, at + call.shape.values() * call.shape.key_dim);
}
inline std::vector<uint8_t> ConvStateOf(const FusedCall& call, int64_t slot) {
  const int64_t at = slot * call.shape.conv_stride();
  return call.conv_state.Slice(at, at + (call.shape.conv_width - 1) * call.shape.channels());
}

inline PrefillCall RefResult(const PrefillCall& before) {
  PrefillCall ref = before;
  const gdn_exec exec{};
  const gdn_fused_prefill_args args = ref.PrefillArgs();
  EXPECT_EQ(gdn_fused_prefill(&exec, &args), GDN_OK) << gdn_last_error();
  return ref;
}

// Of the lines of all sequences.
inline double OutputError(const PrefillCall& got, const PrefillCall& expected) {
  RelativeL2 error;
  for (int64_t t = 0; t < got.tokens(); ++t) {
    for (int64_t j = 0; j < got.shape.values(); ++j) {
      const int64_t at = t * got.shape.y_stride() + j;
      error.Add(got.y.Get(at), expected.y.Get(at));
    }
  }
  return error.value();
}

// Rows of padding are zeros; gaps and lines behind the last sequence keep their bits.
inline void ExpectRestOfOutputUntouched(const PrefillCall& before, const PrefillCall& got) {
  const FusedShape& s = before.shape;
  for (int64_t i = 0; i < s.rows; ++i) {
    for (int64_t t = before.cu_seqlens[i]; t < before.cu_seqlens[i + 1]; ++t) {
      for (int64_t j = 0; before.Padding(i) && j < s.values(); ++j) {
        ASSERT_EQ(got.y.Get(t * s.y_stride() + j), 0.0f);
      }
      const int64_t gap = t * s.y_stride() + s.values();
      ASSERT_EQ(got.y.Slice(gap, gap + s.y_pad), before.y.Slice(gap, gap + s.y_pad));
    }
  }
  EXPECT_EQ(got.y.Slice(before.tokens() * s.y_stride(), got.y.size()),
            before.y.Slice(before.tokens() * s.y_stride(), got.y.size()));
}

inline void ExpectLikeRef(const PrefillCall& before, double y_bound = 5e-3,
                          double state_bound = 3e-3) {
  const PrefillCall got = Result(before);
  const PrefillCall ref = RefResult(before);
  const FusedErrors errors = Compare(before, got, ref);
  EXPECT_LE(errors.state, state_bound);
  EXPECT_EQ(errors.slots_touched + errors.conv_differs + errors.pads_touched, 0);
  const double y = OutputError(got, ref);
  EXPECT_LE(y, y_bound);
  ExpectRestOfOutputUntouched(before, got);
  if (std::getenv("GDN_TEST_PRINT") != nullptr) {
    std::printf("  y %.2e, state %.2e\n", y, errors.state);
  }
}

// A call that the tuned kernels cover: with any plan the same bits, close to REF's.
inline void ExpectTunedLikeRef(const PrefillCall& before) {
  const PrefillCall in_turn = Result(before, kInTurn);
  for (const cuda::PrefillPlan& plan : {kAuto, kWalkConvolves, kStream, kWideStream}) {
    SCOPED_TRACE(NameOf(plan));
    ExpectSameBits(Result(before, plan), in_turn);
  }
  ExpectLikeRef(before);
}

}  // namespace gdn::kernels

#endif  // KERNELS_CUDA_FUSED_PREFILL_TEST_UTIL_H_
