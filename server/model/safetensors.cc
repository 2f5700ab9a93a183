#include "server/model/safetensors.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/model/json.h"
#include "server/model/json_fields.h"
#include "server/model/quote.h"
#include "server/model/status_macros.h"

namespace gdn::model {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxHeaderDepth = 16;
constexpr const char* kMetadataKey = "__metadata__";

// One header entry before its bytes are cut out of the file.
struct Entry {
  TensorInfo info;
  uint64_t begin = 0;  // Relative to the end of the header.
  uint64_t end = 0;
};

absl::Status Malformed(const std::string& name, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", what));
}

absl::StatusOr<uint64_t> ReadHeaderBytes(std::span<const std::byte> file, const std::string& name) {
  if (file.size() < kLengthBytes) {
    return Malformed(
        name, absl::StrCat("a safetensors file has at least 8 bytes, this one has ", file.size()));
  }
  uint64_t header_bytes = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    header_bytes |= static_cast<uint64_t>(file[i]) << (8 * i);
  }
  if (header_bytes > kMaxHeaderBytes) {
    return Malformed(
        name, absl::StrCat("header length: expected at most ", kMaxHeaderBytes, " bytes, got ",
                           header_bytes, "; is this a safetensors file?"));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return Malformed(name, absl::StrCat("header length: ", header_bytes, " bytes do not fit in ",
                                        file.size(), " bytes of file; the file is truncated"));
  }
  return header_bytes;
}

absl::StatusOr<std::vector<int64_t>> ReadShape(const JsonObject& object) {
  const Json* member = object.Find("shape");
  const Json::Array* items = member == nullptr ? nullptr : member->As<Json::Array>();
  if (items == nullptr) return FieldError(object, "shape", "an array of dimensions", member);
  std::vector<int64_t> shape;
  shape.reserve(items->size());
  for (const Json& item : *items) {
    const int64_t* dimension = item.As<int64_t>();
    if (dimension == nullptr || *dimension < 0) {
      return FieldError(object, "shape", "non-negative integer dimensions", &item);
    }
    shape.push_back(*dimension);
  }
  return shape;
}

absl::Status ReadOffsets(const JsonObject& object, Entry* entry) {
  const Json* member = object.Find("data_offsets");
  const Json::Array* items = member == nullptr ? nullptr : member->As<Json::Array>();
  if (items == nullptr || items->size() != 2) {
    return FieldError(object, "data_offsets", "an array [begin, end]", member);
  }
  uint64_t* const targets[2] = {&entry->begin, &entry->end};
  for (size_t i = 0; i < 2; ++i) {
    const int64_t* offset = (*items)[i].As<int64_t>();
    if (offset == nullptr || *offset < 0) {
      return FieldError(object, "data_offsets", "non-negative integer offsets", &(*items)[i]);
    }
    *targets[i] = static_cast<uint64_t>(*offset);
  }
  return absl::OkStatus();
}

// Bytes of a dense tensor. Overflow is looked for from left to right, as the format does.
absl::StatusOr<uint64_t> DenseBytes(const TensorInfo& info, const std::string& where) {
  uint64_t bits = 1;
  bool overflow = false;
  for (const int64_t dimension : info.shape) {
    overflow |= __builtin_mul_overflow(bits, static_cast<uint64_t>(dimension), &bits);
  }
  overflow |= __builtin_mul_overflow(bits, uint64_t{info.dtype->bits}, &bits);
  if (overflow) {
    return Malformed(where, absl::StrCat("shape ", ShapeString(info.shape), " of ",
                                         info.dtype->name, " overflows 64 bits"));
  }
  if (bits % 8 != 0) {
    return Malformed(where, absl::StrCat("shape ", ShapeString(info.shape), " of ",
                                         info.dtype->name, " is not a whole number of bytes"));
  }
  return bits / 8;
}

absl::StatusOr<Entry> ReadEntry(const JsonMember& member, const std::string& file_name) {
  const JsonObject object{&member.value, absl::StrCat(file_name, ": tensor ", Quoted(member.key))};
  if (member.value.As<Json::Object>() == nullptr) {
    return Malformed(object.name,
                     absl::StrCat("expected an object with dtype, shape and data_offsets, got ",
                                  member.value.Describe()));
  }
  Entry entry;
  entry.info.name = member.key;
  GDN_ASSIGN_OR_RETURN(const std::string dtype, GetStringOr(object, "dtype", ""));
  entry.info.dtype = FindDtype(dtype);
  if (entry.info.dtype == nullptr) {
    return FieldError(object, "dtype", absl::StrCat("one of ", DtypeNames()), object.Find("dtype"));
  }
  GDN_ASSIGN_OR_RETURN(entry.info.shape, ReadShape(object));
  GDN_RETURN_IF_ERROR(ReadOffsets(object, &entry));
  if (entry.end < entry.begin) {
    return Malformed(object.name, absl::StrCat("data_offsets: expected begin <= end, got [",
                                               entry.begin, ", ", entry.end, "]"));
  }
  GDN_ASSIGN_OR_RETURN(const uint64_t bytes, DenseBytes(entry.info, object.name));
  if (entry.end - entry.begin != bytes) {
    return Malformed(object.name,
                     absl::StrCat("data_offsets [", entry.begin, ", ", entry.end, "]: expected ",
                                  bytes, " bytes for shape ", ShapeString(entry.info.shape), " of ",
                                  entry.info.dtype->name, ", got ", entry.end - entry.begin));
  }
  return entry;
}

absl::Status ReadMetadata(const Json& json, const std::string& name,
                          std::map<std::string, std::string>* metadata) {
  if (json.is_null()) return absl::OkStatus();
  const Json::Object* members = json.As<Json::Object>();
  if (members == nullptr) {
    return Malformed(
        name, absl::StrCat("__metadata__: expected an object of strings, got ", json.Describe()));
  }
  for (const JsonMember& member : *members) {
    const std::string* value = member.value.As<std::string>();
    if (value == nullptr) {
      return Malformed(name, absl::StrCat("__metadata__: key ", Quoted(member.key),
                                          ": expected a string, got ", member.value.Describe()));
    }
    metadata->emplace(member.key, *value);
  }
  return absl::OkStatus();
}

// The tensors must cover the data exactly: no gap, no overlap, nothing before, between or behind.
absl::Status CheckCoverage(std::vector<Entry>* entries, uint64_t data_bytes,
                           const std::string& name) {
  std::sort(entries->begin(), entries->end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t covered = 0;
  const Entry* previous = nullptr;
  for (const Entry& entry : *entries) {
    if (entry.begin != covered) {
      return Malformed(
          name, absl::StrCat(
                    "tensor ", Quoted(entry.info.name), ": expected its data to begin at ", covered,
                    ", where ",
                    previous == nullptr ? "the data begins" : Quoted(previous->info.name) + " ends",
                    ", got ", entry.begin,
                    entry.begin < covered ? ": they overlap" : ": there is a hole"));
    }
    covered = entry.end;
    if (covered > data_bytes) {
      return Malformed(name, absl::StrCat("tensor ", Quoted(entry.info.name), ": its data ends at ",
                                          covered, ", the file has ", data_bytes,
                                          " bytes of data; the file is truncated"));
    }
    previous = &entry;
  }
  if (covered != data_bytes) {
    return Malformed(name, absl::StrCat("the tensors take ", covered, " bytes, the file has ",
                                        data_bytes, " bytes of data"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsContents> ParseSafetensors(std::span<const std::byte> file,
                                                     const std::string& name) {
  GDN_ASSIGN_OR_RETURN(const uint64_t header_bytes, ReadHeaderBytes(file, name));
  const std::string_view header(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                                header_bytes);
  if (header.empty() || header.front() != '{') {
    return Malformed(name, "the header does not begin with '{'; is this a safetensors file?");
  }
  GDN_ASSIGN_OR_RETURN(const Json root,
                       ParseJson(header, absl::StrCat(name, ": the header"),
                                 {.max_bytes = kMaxHeaderBytes, .max_depth = kMaxHeaderDepth}));
  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);

  SafetensorsContents contents;
  std::vector<Entry> entries;
  for (const JsonMember& member : *root.As<Json::Object>()) {
    if (member.key == kMetadataKey) {
      GDN_RETURN_IF_ERROR(ReadMetadata(member.value, name, &contents.metadata));
      continue;
    }
    GDN_ASSIGN_OR_RETURN(Entry entry, ReadEntry(member, name));
    entries.push_back(std::move(entry));
  }
  GDN_RETURN_IF_ERROR(CheckCoverage(&entries, data.size(), name));

  contents.tensors.reserve(entries.size());
  for (Entry& entry : entries) {
    entry.info.data = data.subspan(entry.begin, entry.end - entry.begin);
    contents.tensors.push_back(std::move(entry.info));
  }
  std::sort(contents.tensors.begin(), contents.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  return contents;
}

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path) {
  GDN_ASSIGN_OR_RETURN(std::shared_ptr<const MappedFile> file, MappedFile::Open(path));
  GDN_ASSIGN_OR_RETURN(SafetensorsContents contents, ParseSafetensors(file->bytes(), path));
  file->AdviseSequential();
  return std::shared_ptr<const SafetensorsFile>(
      new SafetensorsFile(std::move(file), std::move(contents)));
}

SafetensorsFile::SafetensorsFile(std::shared_ptr<const MappedFile> file,
                                 SafetensorsContents contents)
    : file_(std::move(file)), contents_(std::move(contents)) {}

const TensorInfo* SafetensorsFile::Find(std::string_view name) const {
  const std::vector<TensorInfo>& tensors = contents_.tensors;
  const auto at =
      std::lower_bound(tensors.begin(), tensors.end(), name,
                       [](const TensorInfo& info, std::string_view n) { return info.name < n; });
  return at != tensors.end() && at->name == name ? &*at : nullptr;
}

}  // namespace gdn::model
