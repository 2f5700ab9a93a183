// What the golden tests on a GPU share.
#ifndef TESTS_GOLDEN_CUDA_TESTING_H_
#define TESTS_GOLDEN_CUDA_TESTING_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/pipeline/cuda/cuda_pipeline.h"
#include "server/pipeline/cuda/device_info.h"
#include "tests/golden/testing.h"

namespace gdn::golden {

inline std::unique_ptr<pipeline::Pipeline> LoadCudaStack(
    const std::string& model_dir, const pipeline::CudaOptions& options,
    std::optional<model::LayerRange> layers = std::nullopt) {
  model::LoadOptions load;
  load.path = model_dir;
  load.layers = layers;
  auto loaded = model::LoadModel(load);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  auto created = pipeline::CreateCudaPipeline(*std::move(loaded), options);
  EXPECT_TRUE(created.ok()) << created.status();
  if (!created.ok()) std::abort();
  return *std::move(created);
}

}  // namespace gdn::golden

// In SetUp: skips, with the reason, where no GPU can be used; fails with GDN_REQUIRE_GPU=1.
#define GDN_NEED_GPU()                                                 \
  do {                                                                 \
    const auto gdn_device = gdn::pipeline::UseDevice(0);               \
    if (gdn_device.ok()) break;                                        \
    const char* gdn_required = std::getenv("GDN_REQUIRE_GPU");         \
    if (gdn_required != nullptr && std::string(gdn_required) == "1") { \
      FAIL() << gdn_device.status() << ", and GDN_REQUIRE_GPU=1";      \
    }                                                                  \
    GTEST_SKIP() << gdn_device.status();                               \
  } while (false)

#endif  // TESTS_GOLDEN_CUDA_TESTING_H_
