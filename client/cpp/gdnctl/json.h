// Wire messages as JSON objects with the field names of the .proto files. 64-bit hashes and seeds
// are strings, which every JSON reader keeps exact.
#ifndef CLIENT_CPP_GDNCTL_JSON_H_
#define CLIENT_CPP_GDNCTL_JSON_H_

#include <nlohmann/json.hpp>
#include <string>

#include "gdn/v1/inference.pb.h"
#include "gdn/v1/sessions.pb.h"

namespace gdn::gdnctl {

using Json = nlohmann::ordered_json;

Json ToJson(const v1::ModelInfo& model);
Json ToJson(const v1::Session& session);
Json ToJson(const v1::Token& token);
// {"shape": [..], "data": [..]}; null data where the tensor is malformed.
Json ToJson(const v1::Tensor& tensor);
Json ToJson(const v1::Usage& usage);
Json ToJson(const v1::Timings& timings);

// One line; invalid UTF-8 in names is replaced.
std::string Line(const Json& json);

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_JSON_H_
