// The tensors of a checkpoint folder, whichever files they are in.
//
// With model.safetensors.index.json that index alone says which files belong to the checkpoint:
// the folder is never searched. Without it there is one file, model.safetensors.
#ifndef SERVER_MODEL_CHECKPOINT_H_
#define SERVER_MODEL_CHECKPOINT_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/safetensors.h"

namespace gdn::model {

// Tensor name -> name of its shard, a plain file name.
using WeightMap = std::map<std::string, std::string>;

// Validates an index file's text; `name` is its path, in messages.
absl::StatusOr<WeightMap> ParseShardIndex(std::string_view text, const std::string& name);

class Checkpoint {
 public:
  // Reads the index, or the one file.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  bool Contains(const std::string& tensor) const { return weight_map_.count(tensor) > 0; }
  std::vector<std::string> TensorNames() const;

  // Maps the shards that hold a tensor for which `needed` is true, and checks that each holds
  // exactly what the index says. NOT_FOUND names every shard that is missing.
  absl::Status OpenShards(const std::function<bool(const std::string&)>& needed);

  struct Tensor {
    const TensorInfo* info = nullptr;
    std::shared_ptr<const SafetensorsFile> file;
  };
  // Of an opened shard.
  Tensor Get(const std::string& tensor) const;

 private:
  std::string folder_;
  WeightMap weight_map_;
  std::map<std::string, std::shared_ptr<const SafetensorsFile>> shards_;  // By file name.
};

}  // namespace gdn::model

#endif  // SERVER_MODEL_CHECKPOINT_H_
