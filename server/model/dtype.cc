#include "server/model/dtype.h"

#include "absl/strings/str_cat.h"

namespace gdn::model {
namespace {

constexpr Dtype kDtypes[] = {
    {"BOOL", 8, {}},
    {"F4", 4, {}},
    {"F6_E2M3", 6, {}},
    {"F6_E3M2", 6, {}},
    {"U8", 8, {}},
    {"I8", 8, {}},
    {"F8_E5M2", 8, {}},
    {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},
    {"F8_E4M3FNUZ", 8, {}},
    {"F8_E5M2FNUZ", 8, {}},
    {"I16", 16, {}},
    {"U16", 16, {}},
    {"F16", 16, ElementType::kF16},
    {"BF16", 16, ElementType::kBF16},
    {"I32", 32, {}},
    {"U32", 32, {}},
    {"F32", 32, ElementType::kF32},
    {"C64", 64, {}},
    {"F64", 64, {}},
    {"I64", 64, {}},
    {"U64", 64, {}},
};

}  // namespace

const Dtype* FindDtype(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
}

std::string DtypeNames() {
  std::string names;
  for (const Dtype& dtype : kDtypes) absl::StrAppend(&names, names.empty() ? "" : ", ", dtype.name);
  return names;
}

}  // namespace gdn::model
