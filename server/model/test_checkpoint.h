// For tests: folders and checkpoints made on the spot, whole or broken in one chosen way.
#ifndef SERVER_MODEL_TEST_CHECKPOINT_H_
#define SERVER_MODEL_TEST_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace gdn::model::testing {

// A folder that goes with the object.
class TempFolder {
 public:
  TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder();

  const std::string& path() const { return path_; }
  std::string Write(const std::string& file, const std::string& bytes) const;

 private:
  std::string path_;
};

struct TestTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

// A file of that header text and data, with a right or a given length field.
std::string SafetensorsBytes(const std::string& header, const std::string& data);
std::string SafetensorsBytes(uint64_t length, const std::string& header, const std::string& data);
// The tensors one behind the other; `padding` spaces after the header move the data.
std::string SafetensorsBytes(const std::vector<TestTensor>& tensors, int padding = 0);

// Value of element `i` of the tiny checkpoint's tensor of that name: exact in BF16, small.
float TinyValue(const std::string& name, int64_t i);
TestTensor Bf16Tensor(const std::string& name, const std::vector<int64_t>& shape);
TestTensor F32Tensor(const std::string& name, const std::vector<int64_t>& shape);
TestTensor F16Tensor(const std::string& name, const std::vector<int64_t>& shape);

// Two layers, hidden 4, MLP 5, vocabulary 6, H 1, HV 2, K 2, V 3, W 2, untied. `overrides` maps
// keys to JSON text; "" removes the key.
std::string TinyConfig(const std::map<std::string, std::string>& overrides = {});
// Its tensors in BF16, the layers' names under `prefix` ("model." or "model.language_model.").
std::vector<TestTensor> TinyTensors(const std::string& prefix = "model.");
// The same sizes as model_type gdn2: layer 0 gdn2, layer 1 linear_attention.
std::string TinyGdn2Config(const std::map<std::string, std::string>& overrides = {});
std::vector<TestTensor> TinyGdn2Tensors();

// Expects the code, and each fragment in the message.
void ExpectError(const absl::Status& status, absl::StatusCode code,
                 const std::vector<std::string>& fragments);

}  // namespace gdn::model::testing

#endif  // SERVER_MODEL_TEST_CHECKPOINT_H_
