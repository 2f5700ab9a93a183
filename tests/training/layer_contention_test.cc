// A training step on a GPU that other work keeps busy has the bits that it has alone.
#include <atomic>
#include <thread>

#include "tests/training/layer.h"

namespace gdn::kernels {
namespace {

using TrainingContentionCuda = CudaTest;

// Overwrites device memory on a stream of its own until it is destroyed.
class BusyDevice {
 public:
  BusyDevice() : thread_([this] { Work(); }) {
    while (rounds_ == 0) std::this_thread::yield();
  }
  BusyDevice(const BusyDevice&) = delete;
  BusyDevice& operator=(const BusyDevice&) = delete;
  ~BusyDevice() {
    stop_ = true;
    thread_.join();
  }
  int rounds() const { return rounds_; }

 private:
  void Work() {
    const DeviceBuffer memory(size_t{256} << 20);
    const Stream side;
    while (!stop_) {
      for (int i = 0; i < 8; ++i) {
        Must(cudaMemsetAsync(memory.get(), i, memory.bytes(), side.get()));
      }
      side.Synchronize();
      ++rounds_;
    }
  }

  std::atomic<bool> stop_ = false;
  std::atomic<int> rounds_ = 0;
  std::thread thread_;
};

TEST_F(TrainingContentionCuda, T20T28RepeatsBesideOtherWorkKeepEveryBit) {
  const LayerData data({{1, 127, 129}, 128, 2, 2, 128, 128}, 7);
  for (const gdn_rule_variant route : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
    const Step alone = TrainingStep(Tested(), data, {.norm_route = route});
    const BusyDevice busy;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const int rounds = busy.rounds();
      const Step step = TrainingStep(Tested(), data, {.norm_route = route});
      EXPECT_GT(busy.rounds(), rounds) << "nothing ran beside the step";
      for (const auto& [name, expected] : alone.results) {
        EXPECT_TRUE(step.results.at(name).bytes() == expected.bytes()) << name;
        // NaNs compare equal as bytes.
        for (int64_t i = 0; i < expected.size(); ++i) ASSERT_TRUE(std::isfinite(expected.Get(i)));
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
