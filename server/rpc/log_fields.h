// Fields of a log line. They travel behind its message as one string, which the log's formatter
// takes apart: text appends them as name=value, JSON makes them members.
#ifndef SERVER_RPC_LOG_FIELDS_H_
#define SERVER_RPC_LOG_FIELDS_H_

#include <concepts>
#include <string>
#include <string_view>

namespace gdn::rpc {

// Begins a field: this, its name, '=' or ':' (a number), its value. No message has it.
inline constexpr char kFieldMark = '\x1f';

inline void AddField(std::string* line, std::string_view name, std::string_view value) {
  line->push_back(kFieldMark);
  line->append(name).push_back('=');
  for (const char c : value) line->push_back(c == kFieldMark ? ' ' : c);
}

template <std::integral Number>
void AddField(std::string* line, std::string_view name, Number value) {
  line->push_back(kFieldMark);
  line->append(name).push_back(':');
  line->append(std::to_string(value));
}

}  // namespace gdn::rpc

#endif  // SERVER_RPC_LOG_FIELDS_H_
