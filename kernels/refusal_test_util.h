// Every damaged argument is refused with its status and a message that names it, and no output is
// touched.
#ifndef KERNELS_REFUSAL_TEST_UTIL_H_
#define KERNELS_REFUSAL_TEST_UTIL_H_

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {

inline const auto kBadDtype = static_cast<gdn_dtype>(3);

template <typename Args>
struct Misuse {
  const char* name;  // occurs in the message
  gdn_status status;
  std::function<void(Args&)> damage;
};

// `call` runs an op on a copy of `good`; `outputs` must keep their bytes whenever it fails.
template <typename Args>
void ExpectRefusals(const Args& good, const std::vector<Tensor*>& outputs,
                    gdn_status (*call)(const gdn_exec*, const Args*),
                    const std::vector<Misuse<Args>>& cases,
                    const std::vector<gdn_backend>& backends = {GDN_BACKEND_REF, GDN_BACKEND_CPU}) {
  std::vector<std::vector<uint8_t>> before;
  for (const Tensor* output : outputs) before.push_back(output->bytes());
  for (gdn_backend backend : backends) {
    Execution execution({"", backend, 0});
    execution.SetWorkspace(1 << 20);
    for (const Misuse<Args>& misuse : cases) {
      Args args = good;
      misuse.damage(args);
      EXPECT_EQ(call(execution.exec(), &args), misuse.status) << misuse.name;
      EXPECT_NE(std::string(gdn_last_error()).find(misuse.name), std::string::npos)
          << misuse.name << ": " << gdn_last_error();
      for (size_t i = 0; i < outputs.size(); ++i) {
        ASSERT_EQ(outputs[i]->bytes(), before[i]) << misuse.name;
      }
    }
    EXPECT_EQ(call(nullptr, &good), GDN_INVALID_ARGUMENT);
    EXPECT_NE(std::string(gdn_last_error()).find("exec"), std::string::npos);
    EXPECT_EQ(call(execution.exec(), nullptr), GDN_INVALID_ARGUMENT);
    EXPECT_NE(std::string(gdn_last_error()).find("args"), std::string::npos);
    gdn_exec unknown = *execution.exec();
    const int no_backend = 77;
    std::memcpy(&unknown.backend, &no_backend, sizeof(no_backend));
    EXPECT_EQ(call(&unknown, &good), GDN_BACKEND_UNAVAILABLE);
    EXPECT_NE(std::string(gdn_last_error()).find("77"), std::string::npos);
    for (size_t i = 0; i < outputs.size(); ++i) ASSERT_EQ(outputs[i]->bytes(), before[i]);
  }
  // The undamaged call is accepted, or the refusals above prove nothing.
  Execution execution({"", GDN_BACKEND_CPU, 0});
  execution.SetWorkspace(1 << 20);
  EXPECT_EQ(call(execution.exec(), &good), GDN_OK) << gdn_last_error();
}

// An op that CUDA does not have yet refuses it by name, before anything is written.
template <typename Args>
void ExpectNoCuda(const Args& good, gdn_status (*call)(const gdn_exec*, const Args*)) {
  gdn_exec exec{};
  exec.backend = GDN_BACKEND_CUDA;
  EXPECT_EQ(call(&exec, &good), GDN_BACKEND_UNAVAILABLE);
  EXPECT_NE(std::string(gdn_last_error()).find("CUDA back end"), std::string::npos)
      << gdn_last_error();
}

}  // namespace gdn::kernels

#endif  // KERNELS_REFUSAL_TEST_UTIL_H_
