// What GetModel reports beyond the engine's limits; plain data, filled where the server is put
// together.
#ifndef SERVER_RPC_MODEL_FACTS_H_
#define SERVER_RPC_MODEL_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gdn::rpc {

struct ModelFacts {
  std::string name;
  std::string architecture;
  std::string fingerprint;
  std::string device;
  std::string precision;
  std::string state_type;
  bool batch_invariant = false;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t first_layer = 0;
  int64_t last_layer = 0;
  bool has_embedding = false;
  bool has_head = false;
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  int64_t state_bytes_per_session = 0;
  int64_t num_parameters = 0;
  std::vector<int32_t> eos_token_ids;
  std::optional<int32_t> bos_token_id;
  bool byte_vocabulary = false;
  int64_t max_sessions = 0;
  std::string server_version;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_MODEL_FACTS_H_
