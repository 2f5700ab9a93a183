#include "gdn/kernels/causal_conv.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {
namespace {

struct ConvShape {
  std::vector<int32_t> lengths = {1};
  int64_t channels = 100;
  int32_t width = 4;
  bool silu = true;
  gdn_dtype x = GDN_F32;
  gdn_dtype y = GDN_F32;
  int64_t pad = 0;
  int64_t trailing_tokens = 0;
};

// Slots 1, 3, 5, ... are the sequences'; those between are canaries.
struct ConvCall {
  ConvShape shape;
  std::vector<int32_t> cu = {0};
  Tensor x, y, state;
  std::vector<float> weight;
  std::vector<int64_t> read, write;
  std::vector<uint8_t> fresh;
  int64_t slots;

  int64_t stride() const { return shape.channels + shape.pad; }
  int64_t state_size() const { return (shape.width - 1) * shape.channels; }
  int64_t slot_stride() const { return state_size() + shape.pad; }
  int64_t tokens() const { return cu.back(); }

  ConvCall(const ConvShape& s, uint32_t seed) : shape(s) {
    Random random(seed);
    for (int32_t length : s.lengths) cu.push_back(cu.back() + length);
    const int64_t all = tokens() + s.trailing_tokens;
    x = Tensor(s.x, all * stride());
    y = Tensor(s.y, all * stride());
    for (int64_t t = 0; t < tokens(); ++t) {
      for (int64_t c = 0; c < s.channels; ++c) x.Set(t * stride() + c, 2.0f * random.Normal());
    }
    for (int64_t i = 0; i < s.channels * s.width; ++i) weight.push_back(random.Normal());
    const auto n = static_cast<int64_t>(s.lengths.size());
    slots = 2 * n + 1;
    state = Tensor(s.x, slots * slot_stride());
    for (int64_t i = 0; i < n; ++i) {
      read.push_back(2 * (n - 1 - i) + 1);
      for (int64_t j = 0; j < state_size(); ++j) {
        state.Set(read[i] * slot_stride() + j, random.Normal());
      }
    }
    write = read;
    fresh.assign(static_cast<size_t>(n), 0);
  }

  gdn_causal_conv_args Args() {
    gdn_causal_conv_args args{};
    args.sequences = static_cast<int64_t>(read.size());
    args.cu_seqlens = cu.data();
    args.channels = shape.channels;
    args.width = shape.width;
    args.silu = shape.silu;
    args.x = x.data();
    args.x_dtype = shape.x;
    args.x_token_stride = args.y_token_stride = stride();
    args.weight = weight.data();
    args.y = y.data();
    args.y_dtype = shape.y;
    args.state = state.data();
    args.state_slot_stride = slot_stride();
    args.read_index = read.data();
    args.write_index = write.data();
    args.fresh = fresh.data();
    return args;
  }
};

ConvCall RunConv(const Backend& backend, ConvCall call) {
  Execution execution(backend);
  const gdn_causal_conv_args args = call.Args();
  EXPECT_EQ(gdn_causal_conv(execution.exec(), &args), GDN_OK) << gdn_last_error();
  return call;
}

std::vector<Backend> AllBackends() {
  std::vector<Backend> all = BackendsUnderTest();
  all.push_back(kRef);
  return all;
}

// The definition on the padded column of a channel: history, then the tokens.
void ExpectMatchesDefinition(const ConvCall& before, const ConvCall& got, double bound) {
  RelativeL2 error;
  const int32_t history = before.shape.width - 1;
  for (size_t i = 0; i < before.read.size(); ++i) {
    const bool padding = before.read[i] < 0 || before.write[i] < 0;
    const int32_t length = before.cu[i + 1] - before.cu[i];
    for (int64_t c = 0; c < before.shape.channels; ++c) {
      std::vector<float> column;
      for (int32_t j = 0; j < history && !padding; ++j) {
        column.push_back(before.fresh[i] ? 0.0f
                                         : before.state.Get(before.read[i] * before.slot_stride() +
                                                            j * before.shape.channels + c));
      }
      for (int32_t t = 0; t < length && !padding; ++t) {
        column.push_back(before.x.Get((before.cu[i] + t) * before.stride() + c));
      }
      for (int32_t t = 0; t < length; ++t) {
        double sum = 0;
        for (int32_t j = 0; j <= history && !padding; ++j) {
          sum += double{before.weight[c * (history + 1) + j]} * double{column[t + j]};
        }
        const double y = before.shape.silu ? sum / (1 + std::exp(-sum)) : sum;
        const float value = got.y.Get((before.cu[i] + t) * before.stride() + c);
        error.Add(value, y);
        if (padding) {
          ASSERT_EQ(value, 0.0f);
        }
      }
      for (int32_t j = 0; j < history && !padding; ++j) {
        if (length == 0 && before.read[i] == before.write[i]) break;
        ASSERT_EQ(got.state.Get(got.write[i] * got.slot_stride() + j * got.shape.channels + c),
                  column[column.size() - history + j]);
      }
    }
  }
  EXPECT_LE(error.value(), bound);
}

// Slots that no sequence writes and outputs outside the rows are what they were.
void ExpectRestUntouched(const ConvCall& before, const ConvCall& got) {
  for (int64_t slot = 0; slot < got.slots; ++slot) {
    bool written = false;
    for (size_t i = 0; i < got.write.size(); ++i) {
      const bool moves = got.cu[i + 1] > got.cu[i] || got.read[i] != got.write[i];
      written |= got.write[i] == slot && got.read[i] >= 0 && moves;
    }
    const int64_t begin = slot * got.slot_stride() + (written ? got.state_size() : 0);
    EXPECT_EQ(got.state.Slice(begin, (slot + 1) * got.slot_stride()),
              before.state.Slice(begin, (slot + 1) * got.slot_stride()))
        << slot;
  }
  for (int64_t t = 0; t < got.tokens() + got.shape.trailing_tokens; ++t) {
    const int64_t begin = t * got.stride() + (t < got.tokens() ? got.shape.channels : 0);
    EXPECT_EQ(got.y.Slice(begin, (t + 1) * got.stride()),
              before.y.Slice(begin, (t + 1) * got.stride()));
  }
}

TEST(CausalConv, EveryTypeWidthAndActivation) {
  for (gdn_dtype x : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype y : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (int32_t width = 2; width <= 8; ++width) {
        ConvShape shape;
        shape.lengths = {5, 1, 0, 2, 3, 20};
        shape.channels = 45;
        shape.width = width;
        shape.silu = width % 3 != 0;
        shape.x = x;
        shape.y = y;
        shape.pad = 3;
        shape.trailing_tokens = 2;
        ConvCall before(shape, 3);
        before.fresh[3] = 1;
        for (int64_t j = 0; j < before.state_size(); ++j) {
          before.state.Set(before.read[3] * before.slot_stride() + j, NAN);
        }
        for (const Backend& backend : AllBackends()) {
          const ConvCall got = RunConv(backend, before);
          ExpectMatchesDefinition(before, got, RoundingBound(y));
          ExpectRestUntouched(before, got);
        }
      }
    }
  }
}

TEST(CausalConv, EveryNumberOfChannels) {
  for (int64_t channels : {1, 2, 7, 8, 9, 31, 64, 511, 512, 513, 1030, 2048}) {
    for (bool step : {false, true}) {
      ConvShape shape;
      shape.lengths = step ? std::vector<int32_t>{1, 1, 1} : std::vector<int32_t>{2, 9};
      shape.channels = channels;
      const ConvCall before(shape, 4);
      for (const Backend& backend : BackendsUnderTest()) {
        ConvCall got = before;
        gdn_causal_conv_args args = got.Args();
        if (step) args.cu_seqlens = nullptr;
        Execution execution(backend);
        ASSERT_EQ(gdn_causal_conv(execution.exec(), &args), GDN_OK);
        ExpectMatchesDefinition(before, got, 2e-6);
        ExpectRestUntouched(before, got);
      }
    }
  }
}

TEST(CausalConv, LargeSumsAndNan) {
  ConvShape shape;
  shape.channels = 24;
  ConvCall before(shape, 4);
  for (int64_t c = 0; c < 24; ++c) before.x.Set(c, (c % 2 == 0 ? 1e3f : -1e3f) * float(c * c));
  before.x.Set(5, NAN);
  for (const Backend& backend : AllBackends()) {
    const ConvCall got = RunConv(backend, before);
    for (int64_t c = 0; c < 24; ++c) EXPECT_EQ(std::isnan(got.y.Get(c)), c == 5) << backend.name;
  }
}

TEST(CausalConv, ForksPaddingAndEmptySequences) {
  ConvShape shape;
  shape.lengths = {1, 6, 0, 0, 2, 3, 0, 1};
  for (gdn_dtype x : {GDN_F32, GDN_BF16}) {
    shape.x = x;
    ConvCall before(shape, 5);
    for (int64_t i : {0, 1, 2, 3}) before.write[i] = before.read[i] - 1;
    before.fresh[3] = 1;  // no token and another write slot: becomes zeros
    before.read[4] = -1;
    before.write[5] = -1;
    before.read[7] = before.write[7] = -3;
    for (const Backend& backend : AllBackends()) {
      const ConvCall got = RunConv(backend, before);
      ExpectMatchesDefinition(before, got, 2e-6);
      ExpectRestUntouched(before, got);
    }
  }
}

TEST(CausalConv, EverySplitAndSteppingGiveTheSameBits) {
  ConvShape shape;
  shape.lengths = {11};
  shape.channels = 70;
  const ConvCall before(shape, 6);
  for (const Backend& backend : AllBackends()) {
    const ConvCall whole = RunConv(backend, before);
    Execution execution(backend);
    auto run_part = [&](ConvCall& call, int32_t begin, int32_t end) {
      gdn_causal_conv_args args = call.Args();
      const std::vector<int32_t> cu = {0, end - begin};
      args.cu_seqlens = cu.data();
      args.x = static_cast<const float*>(call.x.data()) + begin * call.stride();
      args.y = static_cast<float*>(call.y.data()) + begin * call.stride();
      ASSERT_EQ(gdn_causal_conv(execution.exec(), &args), GDN_OK);
    };
    for (int32_t split = 0; split <= 11; ++split) {
      ConvCall parts = before;
      run_part(parts, 0, split);
      run_part(parts, split, 11);
      EXPECT_EQ(parts.y.bytes(), whole.y.bytes()) << backend.name << split;
      EXPECT_EQ(parts.state.bytes(), whole.state.bytes()) << backend.name << split;
    }
    ConvCall stepped = before;
    for (int32_t t = 0; t < 11; ++t) run_part(stepped, t, t + 1);
    EXPECT_EQ(stepped.y.bytes(), whole.y.bytes()) << backend.name;
    EXPECT_EQ(stepped.state.bytes(), whole.state.bytes()) << backend.name;
  }
}

TEST(CausalConv, ASequenceDoesNotSeeItsNeighboursOrTheThreads) {
  ConvShape shape;
  shape.lengths = {4, 1, 17, 2, 3};
  shape.channels = 1100;
  const ConvCall before(shape, 7);
  const ConvCall batch = RunConv({"cpu", GDN_BACKEND_CPU, 0}, before);
  for (int32_t threads : {1, 2, 5}) {
    const Backend backend{"cpu", GDN_BACKEND_CPU, threads};
    for (int repeat = 0; repeat < 20; ++repeat) {
      const ConvCall got = RunConv(backend, before);
      ASSERT_EQ(got.y.bytes(), batch.y.bytes());
      ASSERT_EQ(got.state.bytes(), batch.state.bytes());
    }
    ConvCall alone = before;
    Execution execution(backend);
    for (size_t i = 0; i < shape.lengths.size(); ++i) {
      gdn_causal_conv_args args = alone.Args();
      const std::vector<int32_t> cu = {0, shape.lengths[i]};
      args.sequences = 1;
      args.cu_seqlens = cu.data();
      args.x = static_cast<const float*>(alone.x.data()) + alone.cu[i] * alone.stride();
      args.y = static_cast<float*>(alone.y.data()) + alone.cu[i] * alone.stride();
      args.read_index += i;
      args.write_index += i;
      args.fresh += i;
      ASSERT_EQ(gdn_causal_conv(execution.exec(), &args), GDN_OK);
    }
    EXPECT_EQ(alone.y.bytes(), batch.y.bytes());
    EXPECT_EQ(alone.state.bytes(), batch.state.bytes());
  }
}

TEST(CausalConv, SlotsBeyondFourGibibytes) {
  ConvShape shape;
  shape.lengths = {2, 5};
  ConvCall near(shape, 8);
  const int64_t stride = int64_t{1} << 20;
  const std::vector<int64_t> far_slots = {2100, 600};
  const size_t bytes = static_cast<size_t>(2200 * stride) * sizeof(float);
  void* pool = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(pool, MAP_FAILED);
  const size_t size = static_cast<size_t>(near.state_size()) * sizeof(float);
  auto far = [&](int i) { return static_cast<float*>(pool) + far_slots[i] * stride; };
  auto near_state = [&](const ConvCall& call, int i) {
    return static_cast<const float*>(call.state.data()) + call.read[i] * call.slot_stride();
  };
  for (const Backend& backend : AllBackends()) {
    for (int i : {0, 1}) std::memcpy(far(i), near_state(near, i), size);
    ConvCall got = near;
    gdn_causal_conv_args args = got.Args();
    args.state = pool;
    args.state_slot_stride = stride;
    args.read_index = args.write_index = far_slots.data();
    Execution execution(backend);
    ASSERT_EQ(gdn_causal_conv(execution.exec(), &args), GDN_OK);
    const ConvCall expected = RunConv(backend, near);
    EXPECT_EQ(got.y.bytes(), expected.y.bytes());
    for (int i : {0, 1}) EXPECT_EQ(std::memcmp(far(i), near_state(expected, i), size), 0);
  }
  munmap(pool, bytes);
}

}  // namespace
}  // namespace gdn::kernels
