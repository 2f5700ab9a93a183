// Element types that a safetensors header can name.
#ifndef SERVER_MODEL_DTYPE_H_
#define SERVER_MODEL_DTYPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/model/weights.h"

namespace gdn::model {

struct Dtype {
  const char* name = "";              // As in the header: "BF16".
  uint32_t bits = 0;                  // Of one element.
  std::optional<ElementType> weight;  // The server's own type, where weights may have it.
};

// Null for a name the format does not have.
const Dtype* FindDtype(std::string_view name);
// "BOOL, F4, ..."
std::string DtypeNames();

}  // namespace gdn::model

#endif  // SERVER_MODEL_DTYPE_H_
