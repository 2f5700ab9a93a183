#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/model/config.h"
#include "server/model/mapped_file.h"
#include "server/model/status_macros.h"
#include "server/model/weight_sources.h"
#include "server/model/weights.h"

namespace gdn::model {
namespace {

struct ModelPaths {
  std::string folder;
  std::string config;
  std::string name;
};

// `path` is a checkpoint's folder, or a configuration file in it.
absl::StatusOr<ModelPaths> ResolvePaths(const std::string& path) {
  if (path.empty()) return absl::InvalidArgumentError("the model's path is empty");
  std::error_code error;
  std::filesystem::path full = std::filesystem::absolute(path, error).lexically_normal();
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot resolve ", path));
  if (!full.has_filename()) full = full.parent_path();  // Of a trailing slash.
  const std::filesystem::file_status status = std::filesystem::status(full, error);
  if (!std::filesystem::exists(status)) {
    return absl::NotFoundError(absl::StrCat(
        "--model=", path,
        ": there is no such file or folder; give the folder of a checkpoint, with config.json "
        "and safetensors"));
  }
  ModelPaths paths;
  if (std::filesystem::is_directory(status)) {
    paths = {full.string(), (full / "config.json").string(), full.filename().string()};
  } else {
    const std::filesystem::path folder = full.parent_path();
    const bool usual_name = full.filename() == "config.json";
    paths = {folder.string(), full.string(),
             usual_name ? folder.filename().string() : full.stem().string()};
  }
  return paths;
}

absl::StatusOr<ParsedConfig> ReadConfig(const ModelPaths& paths) {
  GDN_ASSIGN_OR_RETURN(const std::shared_ptr<const MappedFile> config,
                       MappedFile::Open(paths.config));
  const auto generation = MappedFile::Open(absl::StrCat(paths.folder, "/generation_config.json"));
  std::optional<Document> generation_document;
  if (generation.ok()) {
    generation_document = Document{(*generation)->path(), (*generation)->text()};
  } else if (!absl::IsNotFound(generation.status())) {
    return generation.status();
  }
  return ParseConfig({config->path(), config->text()}, generation_document);
}

absl::StatusOr<LayerRange> ResolveRange(const std::optional<LayerRange>& wanted,
                                        const ModelSpec& spec) {
  const LayerRange range = wanted.value_or(LayerRange{0, spec.num_layers});
  if (range.first < 0 || range.first >= range.last || range.last > spec.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--layers=", range.first, ":", range.last, ": expected a:b with 0 <= a < b <= ",
        spec.num_layers, ", the number of the model's layers"));
  }
  return range;
}

}  // namespace

absl::StatusOr<Model> LoadModel(const LoadOptions& options) {
  GDN_ASSIGN_OR_RETURN(const ModelPaths paths, ResolvePaths(options.path));
  GDN_ASSIGN_OR_RETURN(ParsedConfig config, ReadConfig(paths));
  Model model;
  model.name = paths.name;
  GDN_ASSIGN_OR_RETURN(model.layers, ResolveRange(options.layers, config.spec));
  if (options.random_weights.has_value()) {
    GDN_ASSIGN_OR_RETURN(model.weights,
                         MakeRandomWeights(config.spec, model.layers, *options.random_weights));
  } else {
    GDN_ASSIGN_OR_RETURN(model.weights, LoadCheckpointWeights(paths.folder, model.layers, &config));
  }
  model.spec = std::move(config.spec);
  model.unknown_config_keys = std::move(config.unknown_keys);
  model.weights.fingerprint = Fingerprint(model.spec, model.layers, model.weights);
  return model;
}

}  // namespace gdn::model
