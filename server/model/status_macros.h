// Early returns over absl::Status and absl::StatusOr.
#ifndef SERVER_MODEL_STATUS_MACROS_H_
#define SERVER_MODEL_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define GDN_RETURN_IF_ERROR(expression)        \
  do {                                         \
    absl::Status gdn_status_ = (expression);   \
    if (!gdn_status_.ok()) return gdn_status_; \
  } while (false)

#define GDN_STATUS_CONCAT_INNER(a, b) a##b
#define GDN_STATUS_CONCAT(a, b) GDN_STATUS_CONCAT_INNER(a, b)

// GDN_ASSIGN_OR_RETURN(const int64_t n, GetInt(...)); declares or assigns the left side.
// NOLINTBEGIN(bugprone-macro-parentheses): a declaration cannot stand in any.
#define GDN_ASSIGN_OR_RETURN(left, expression) \
  GDN_ASSIGN_OR_RETURN_INNER(GDN_STATUS_CONCAT(gdn_result_, __LINE__), left, expression)
#define GDN_ASSIGN_OR_RETURN_INNER(result, left, expression) \
  auto result = (expression);                                \
  if (!result.ok()) return std::move(result).status();       \
  left = *std::move(result)
// NOLINTEND(bugprone-macro-parentheses)

#endif  // SERVER_MODEL_STATUS_MACROS_H_
