#include "server/model/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/json_fields.h"
#include "server/model/mapped_file.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kSingleFile = "model.safetensors";
constexpr size_t kMaxIndexBytes = size_t{64} << 20;
constexpr size_t kMaxFileName = 255;

std::string PathIn(const std::string& folder, const std::string& file) {
  return absl::StrCat(folder, "/", file);
}

// A shard lies in the checkpoint's own folder, whatever the index says.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxFileName && name != "." && name != ".." &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos;
}

}  // namespace

absl::StatusOr<WeightMap> ParseShardIndex(std::string_view text, const std::string& name) {
  GDN_ASSIGN_OR_RETURN(const Json root, ParseJson(text, name, {.max_bytes = kMaxIndexBytes}));
  const JsonObject object{&root, name};
  const Json* member = object.Find("weight_map");
  const Json::Object* map = member == nullptr ? nullptr : member->As<Json::Object>();
  if (map == nullptr || map->empty()) {
    return FieldError(object, "weight_map", "an object from tensor names to file names", member);
  }
  WeightMap weight_map;
  for (const JsonMember& entry : *map) {
    const std::string* file = entry.value.As<std::string>();
    if (file == nullptr || !IsPlainFileName(*file)) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, ": weight_map: tensor ", Quoted(entry.key),
          ": expected the name of a file in the same folder, got ", entry.value.Describe()));
    }
    weight_map.emplace_hint(weight_map.end(), entry.key, *file);
  }
  return weight_map;
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const auto index = MappedFile::Open(PathIn(folder, kIndexFile));
  if (index.ok()) {
    GDN_ASSIGN_OR_RETURN(checkpoint.weight_map_,
                         ParseShardIndex((*index)->text(), (*index)->path()));
    return checkpoint;
  }
  if (!absl::IsNotFound(index.status())) return index.status();

  auto file = SafetensorsFile::Open(PathIn(folder, kSingleFile));
  if (absl::IsNotFound(file.status())) {
    return absl::NotFoundError(absl::StrCat(folder, " has neither ", kIndexFile, " nor ",
                                            kSingleFile,
                                            "; a checkpoint in another format must be converted"));
  }
  if (!file.ok()) return file.status();
  for (const TensorInfo& info : (*file)->tensors()) {
    checkpoint.weight_map_.emplace_hint(checkpoint.weight_map_.end(), info.name, kSingleFile);
  }
  checkpoint.shards_.emplace(kSingleFile, *std::move(file));
  return checkpoint;
}

std::vector<std::string> Checkpoint::TensorNames() const {
  std::vector<std::string> names;
  names.reserve(weight_map_.size());
  for (const auto& [tensor, file] : weight_map_) names.push_back(tensor);
  return names;
}

absl::Status Checkpoint::OpenShards(const std::function<bool(const std::string&)>& needed) {
  std::map<std::string, std::string> wanted;  // File -> one tensor that needs it.
  for (const auto& [tensor, file] : weight_map_) {
    if (needed(tensor)) wanted.emplace(file, tensor);
  }
  ProblemList missing;
  for (const auto& [file, tensor] : wanted) {
    if (shards_.count(file) > 0) continue;
    auto shard = SafetensorsFile::Open(PathIn(folder_, file));
    if (absl::IsNotFound(shard.status())) {
      missing.Add(absl::StrCat(Quoted(file), " (with ", Quoted(tensor), ")"));
      continue;
    }
    if (!shard.ok()) return shard.status();
    shards_.emplace(file, *std::move(shard));
  }
  if (!missing.empty()) {
    return absl::NotFoundError(absl::StrCat(folder_, ": ", missing.count(), " shard",
                                            missing.count() == 1 ? "" : "s", " named by ",
                                            kIndexFile, " missing: ", missing.Joined()));
  }
  ProblemList problems;
  for (const auto& [tensor, file] : weight_map_) {
    const auto shard = shards_.find(file);
    if (shard != shards_.end() && shard->second->Find(tensor) == nullptr) {
      problems.Add(absl::StrCat(Quoted(tensor), " is not in ", Quoted(file)));
    }
  }
  for (const auto& [file, shard] : shards_) {
    for (const TensorInfo& info : shard->tensors()) {
      const auto entry = weight_map_.find(info.name);
      if (entry == weight_map_.end()) {
        problems.Add(absl::StrCat(Quoted(file), " holds ", Quoted(info.name),
                                  ", which the index does not name"));
      } else if (entry->second != file) {
        problems.Add(absl::StrCat(Quoted(file), " holds ", Quoted(info.name),
                                  ", which the index has in ", Quoted(entry->second)));
      }
    }
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(PathIn(folder_, kIndexFile), " and its shards disagree: ", problems.Joined()));
}

Checkpoint::Tensor Checkpoint::Get(const std::string& tensor) const {
  const auto entry = weight_map_.find(tensor);
  if (entry == weight_map_.end()) return {};
  const auto shard = shards_.find(entry->second);
  if (shard == shards_.end()) return {};
  return {shard->second->Find(tensor), shard->second};
}

}  // namespace gdn::model
