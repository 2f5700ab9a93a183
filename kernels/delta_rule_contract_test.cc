// What the delta rule promises beyond its values: slots, splits, neighbours, threads, repeats.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "gdn/kernels/delta_rule.h"
#include "gtest/gtest.h"
#include "kernels/delta_rule_test_util.h"

namespace gdn::kernels {
namespace {

std::vector<Backend> AllBackends() {
  std::vector<Backend> all = BackendsUnderTest();
  all.push_back(kRef);
  return all;
}

// The bytes of sequence i's outputs and state.
std::vector<uint8_t> ResultOf(const DeltaCall& call, int64_t i) {
  std::vector<uint8_t> bytes = call.o.Slice(call.cu_seqlens[i] * call.value_stride(),
                                            call.cu_seqlens[i + 1] * call.value_stride());
  const int64_t slot = call.write[i] * call.slot_stride();
  const std::vector<uint8_t> state =
      call.state.Slice(slot, slot + call.value_heads() * call.head_size());
  bytes.insert(bytes.end(), state.begin(), state.end());
  return bytes;
}

DeltaShape SmallShape(std::vector<int32_t> lengths) {
  DeltaShape shape;
  shape.lengths = std::move(lengths);
  shape.key_dim = 32;
  shape.value_dim = 20;
  return shape;
}

// Runs tokens [begin, end) of sequence 0 of `call`, which keeps the state and the outputs.
void RunPart(Execution& execution, DeltaCall& call, DeltaOp op, int32_t begin, int32_t end) {
  std::vector<int32_t> cu;
  const gdn_delta_rule_args args = call.ArgsOf(0, begin, end, &cu);
  ASSERT_EQ(RunDelta(op, execution, args), GDN_OK) << gdn_last_error();
}

TEST(DeltaRuleContract, PrefillEqualsSteppingAtEverySplitOf130Tokens) {
  DeltaShape shape;
  shape.lengths = {130};
  shape.key_heads = 1;
  const DeltaCall before(shape, 21);
  for (const Backend& backend : BackendsUnderTest()) {
    Execution execution(backend);
    DeltaCall stepped = before;
    for (int32_t t = 0; t < 130; ++t) RunPart(execution, stepped, DeltaOp::kStep, t, t + 1);
    const DeltaCall whole = RunDelta(DeltaOp::kPrefill, backend, before);
    EXPECT_LE(OutputError(whole, stepped), 1e-5) << backend.name;
    EXPECT_LE(StateError(whole, stepped), 1e-5) << backend.name;
    for (int32_t split = 0; split <= 130; ++split) {
      DeltaCall parts = before;
      RunPart(execution, parts, DeltaOp::kPrefill, 0, split);
      RunPart(execution, parts, DeltaOp::kPrefill, split, 130);
      EXPECT_LE(OutputError(parts, whole), 1e-5) << backend.name << ", split at " << split;
      EXPECT_LE(StateError(parts, whole), 1e-5) << backend.name << ", split at " << split;
      EXPECT_LE(OutputError(parts, stepped), 1e-5) << backend.name << ", split at " << split;
      EXPECT_LE(StateError(parts, stepped), 1e-5) << backend.name << ", split at " << split;
    }
  }
}

TEST(DeltaRuleContract, Bf16StateIsRoundedOncePerCall) {
  DeltaShape shape = SmallShape({40});
  shape.state = GDN_BF16;
  const DeltaCall before(shape, 4);
  const DeltaCall expected = RunDelta(DeltaOp::kPrefill, kRef, before);
  for (int32_t split : {6, 17}) {  // the first call steps, or runs chunks
    for (const Backend& backend : BackendsUnderTest()) {
      Execution execution(backend);
      DeltaCall first = before;
      DeltaCall first_ref = before;
      Execution ref(kRef);
      RunPart(execution, first, DeltaOp::kPrefill, 0, split);
      RunPart(ref, first_ref, DeltaOp::kPrefill, 0, split);
      // Outputs come from the unrounded state: FP32 accuracy although the state is BF16.
      RelativeL2 error;
      for (int64_t i = 0; i < split * before.value_stride(); ++i) {
        error.Add(first.o.Get(i), first_ref.o.Get(i));
      }
      EXPECT_LE(error.value(), 4e-6) << backend.name << ", " << split;
      RunPart(execution, first, DeltaOp::kPrefill, split, 40);
      EXPECT_LE(StateError(first, expected), 8e-3) << backend.name << ", " << split;
    }
  }
}

TEST(DeltaRuleContract, ReadSlotKeepsItsBitsInAFork) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    for (DeltaOp op : {DeltaOp::kStep, DeltaOp::kPrefill}) {
      DeltaShape shape = SmallShape(op == DeltaOp::kStep ? std::vector<int32_t>{1, 1}
                                                         : std::vector<int32_t>{3, 40});
      shape.state = state;
      const DeltaCall in_place(shape, 6);
      DeltaCall fork = in_place;
      for (int64_t& slot : fork.write) slot -= 1;
      for (const Backend& backend : AllBackends()) {
        const DeltaCall expected = RunDelta(op, backend, in_place);
        const DeltaCall got = RunDelta(op, backend, fork);
        for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(ResultOf(got, i), ResultOf(expected, i));
        ExpectRestUntouched(got, fork);  // the read slots among them
      }
    }
  }
}

TEST(DeltaRuleContract, PaddingRowsTouchNoStateAndWriteZeros) {
  for (DeltaOp op : {DeltaOp::kStep, DeltaOp::kPrefill}) {
    const DeltaShape shape = SmallShape(op == DeltaOp::kStep ? std::vector<int32_t>(8, 1)
                                                             : std::vector<int32_t>{3, 20, 1, 9});
    for (int mode = 0; mode < 3; ++mode) {
      DeltaCall before(shape, 6);
      const auto n = static_cast<int64_t>(shape.lengths.size());
      for (int64_t i = 0; i < n; ++i) {
        if (mode == 0 && i % 2 == 0) before.read[i] = -1;
        if (mode == 1 && i % 2 == 0) before.write[i] = -7;
        if (mode == 2) before.read[i] = before.write[i] = -1;
      }
      for (const Backend& backend : AllBackends()) {
        DeltaCall got = RunDelta(op, backend, before);
        const DeltaCall expected = RunDelta(op, kRef, before);
        EXPECT_LE(OutputError(got, expected), 4e-6) << backend.name;
        for (int64_t i = 0; i < n; ++i) {
          if (got.read[i] >= 0 && got.write[i] >= 0) continue;
          got.write[i] = -1;  // its slot, if it names one, must be untouched
          for (int64_t t = got.cu_seqlens[i]; t < got.cu_seqlens[i + 1]; ++t) {
            for (int64_t c = 0; c < got.value_heads() * shape.value_dim; ++c) {
              ASSERT_EQ(got.o.Get(t * got.value_stride() + c), 0.0f) << backend.name;
            }
          }
        }
        ExpectRestUntouched(got, before);
      }
    }
  }
}

TEST(DeltaRuleContract, SlotZeroIsAnOrdinarySlot) {
  DeltaCall before(SmallShape({1, 1}), 6);
  DeltaCall moved = before;
  moved.read = moved.write = {0, 2};
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < before.slot_stride(); ++j) {
      moved.state.Set(moved.read[i] * before.slot_stride() + j,
                      before.state.Get(before.read[i] * before.slot_stride() + j));
    }
  }
  for (const Backend& backend : AllBackends()) {
    const DeltaCall expected = RunDelta(DeltaOp::kStep, backend, before);
    const DeltaCall got = RunDelta(DeltaOp::kStep, backend, moved);
    for (int64_t i = 0; i < 2; ++i) EXPECT_EQ(ResultOf(got, i), ResultOf(expected, i));
  }
}

TEST(DeltaRuleContract, FreshSequencesNeverReadTheirSlot) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    for (DeltaOp op : {DeltaOp::kStep, DeltaOp::kPrefill}) {
      DeltaShape shape = SmallShape(op == DeltaOp::kStep ? std::vector<int32_t>{1, 1, 1}
                                                         : std::vector<int32_t>{1, 8, 50});
      shape.state = state;
      DeltaCall zeros(shape, 6);
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t j = 0; j < zeros.value_heads() * zeros.head_size(); ++j) {
          zeros.state.Set(zeros.read[i] * zeros.slot_stride() + j, 0.0f);
        }
      }
      DeltaCall fresh = zeros;
      fresh.state = Tensor(state, zeros.state.size());  // NaN everywhere
      fresh.fresh = {1, 1, 1};
      for (const Backend& backend : AllBackends()) {
        const DeltaCall expected = RunDelta(op, backend, zeros);
        const DeltaCall got = RunDelta(op, backend, fresh);
        // Signed zeros apart, the same.
        EXPECT_LE(OutputError(got, expected), 1e-7) << backend.name;
        EXPECT_LE(StateError(got, expected), 1e-7) << backend.name;
        ExpectRestUntouched(got, fresh);
      }
    }
  }
}

TEST(DeltaRuleContract, SequencesWithoutTokens) {
  for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
    DeltaShape shape = SmallShape({0, 9, 0, 0, 33, 0});
    shape.state = state;
    DeltaCall before(shape, 6);
    before.write[2] -= 1;  // moves
    before.write[3] -= 1;  // becomes zeros
    before.fresh[3] = 1;
    for (const Backend& backend : AllBackends()) {
      const DeltaCall got = RunDelta(DeltaOp::kPrefill, backend, before);
      const int64_t size = before.value_heads() * before.head_size();
      auto slot = [&](const DeltaCall& call, int64_t index) {
        return call.state.Slice(index * call.slot_stride(), index * call.slot_stride() + size);
      };
      for (int64_t i : {0, 2, 5}) {
        EXPECT_EQ(slot(got, got.write[i]), slot(before, before.read[i])) << backend.name << i;
      }
      for (uint8_t byte : slot(got, got.write[3])) ASSERT_EQ(byte, 0) << backend.name;
      ExpectRestUntouched(got, before);
    }
    DeltaCall nothing(SmallShape({0, 0}), 6);
    for (const Backend& backend : AllBackends()) {
      const DeltaCall got = RunDelta(DeltaOp::kPrefill, backend, nothing);
      EXPECT_EQ(got.state.bytes(), nothing.state.bytes());
    }
  }
}

TEST(DeltaRuleContract, ASequenceDoesNotSeeItsNeighboursOrTheThreads) {
  for (DeltaOp op : {DeltaOp::kStep, DeltaOp::kPrefill}) {
    DeltaShape shape =
        SmallShape(op == DeltaOp::kStep ? std::vector<int32_t>(9, 1)
                                        : std::vector<int32_t>{5, 33, 0, 130, 16, 8, 9});
    shape.key_heads = 1;
    shape.ratio = 3;
    const DeltaCall before(shape, 8);
    const DeltaCall batch = RunDelta(op, {"cpu", GDN_BACKEND_CPU, 0}, before);
    for (int32_t threads : {0, 1, 2, 3, 5}) {
      const Backend backend{"cpu", GDN_BACKEND_CPU, threads};
      const DeltaCall threaded = RunDelta(op, backend, before);
      EXPECT_EQ(threaded.o.bytes(), batch.o.bytes()) << threads;
      EXPECT_EQ(threaded.state.bytes(), batch.state.bytes()) << threads;
      Execution execution(backend);
      DeltaCall alone = before;
      for (int64_t i = 0; i < static_cast<int64_t>(shape.lengths.size()); ++i) {
        std::vector<int32_t> cu;
        const gdn_delta_rule_args args = alone.ArgsOf(i, 0, shape.lengths[i], &cu);
        ASSERT_EQ(RunDelta(op, execution, args), GDN_OK) << gdn_last_error();
      }
      EXPECT_EQ(alone.o.bytes(), batch.o.bytes()) << threads;
      EXPECT_EQ(alone.state.bytes(), batch.state.bytes()) << threads;
    }
  }
}

TEST(DeltaRuleContract, RepeatsAreBitwiseEqual) {
  const DeltaCall steps(SmallShape(std::vector<int32_t>(5, 1)), 8);
  const DeltaCall prefill(SmallShape({37, 4, 100, 16}), 8);
  const Backend backend{"cpu", GDN_BACKEND_CPU, 3};
  const DeltaCall first_step = RunDelta(DeltaOp::kStep, backend, steps);
  const DeltaCall first_prefill = RunDelta(DeltaOp::kPrefill, backend, prefill);
  for (int i = 0; i < 50; ++i) {
    const DeltaCall step = RunDelta(DeltaOp::kStep, backend, steps);
    ASSERT_EQ(step.o.bytes(), first_step.o.bytes());
    ASSERT_EQ(step.state.bytes(), first_step.state.bytes());
    const DeltaCall again = RunDelta(DeltaOp::kPrefill, backend, prefill);
    ASSERT_EQ(again.o.bytes(), first_prefill.o.bytes());
    ASSERT_EQ(again.state.bytes(), first_prefill.state.bytes());
  }
}

// Slots whose byte offset needs more than 32 bits, in a mapping of which only they are touched.
TEST(DeltaRuleContract, SlotsBeyondFourGibibytes) {
  for (DeltaOp op : {DeltaOp::kStep, DeltaOp::kPrefill}) {
    DeltaCall near(
        SmallShape(op == DeltaOp::kStep ? std::vector<int32_t>{1, 1} : std::vector<int32_t>{3, 30}),
        8);
    const int64_t stride = int64_t{1} << 20;             // 4 MiB a slot
    const std::vector<int64_t> far_slots = {600, 2100};  // beyond 2 GiB and beyond 8 GiB
    const size_t bytes = static_cast<size_t>(2200 * stride) * sizeof(float);
    void* pool = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(pool, MAP_FAILED);
    const int64_t size = near.value_heads() * near.head_size();
    for (const Backend& backend : AllBackends()) {
      for (int64_t i = 0; i < 2; ++i) {
        std::memcpy(
            static_cast<float*>(pool) + far_slots[i] * stride,
            static_cast<const float*>(near.state.data()) + near.read[i] * near.slot_stride(),
            static_cast<size_t>(size) * sizeof(float));
      }
      const DeltaCall expected = RunDelta(op, backend, near);
      DeltaCall got = near;
      gdn_delta_rule_args args = got.Args();
      args.state = pool;
      args.state_slot_stride = stride;
      args.read_index = args.write_index = far_slots.data();
      Execution execution(backend);
      ASSERT_EQ(RunDelta(op, execution, args), GDN_OK) << gdn_last_error();
      EXPECT_EQ(got.o.bytes(), expected.o.bytes()) << backend.name;
      for (int64_t i = 0; i < 2; ++i) {
        EXPECT_EQ(std::memcmp(static_cast<float*>(pool) + far_slots[i] * stride,
                              static_cast<const float*>(expected.state.data()) +
                                  near.read[i] * near.slot_stride(),
                              static_cast<size_t>(size) * sizeof(float)),
                  0)
            << backend.name;
      }
    }
    munmap(pool, bytes);
  }
}

}  // namespace
}  // namespace gdn::kernels
