// The registry and a cached reference to every child in it.
#ifndef SERVER_METRICS_FAMILIES_H_
#define SERVER_METRICS_FAMILIES_H_

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/rpc/observer.h"

namespace gdn::metrics {

// Label values, each list in the order of the enum it stands for.
inline constexpr std::array<std::string_view, 3> kPhaseNames = {"prefill", "decode", "mixed"};
inline constexpr std::array<std::string_view, 2> kTokenPhaseNames = {"prefill", "decode"};
inline constexpr std::array<std::string_view, 4> kSlotStateNames = {"free", "live", "in_flight",
                                                                    "reserved"};
inline constexpr std::array<std::string_view, 1> kEvictionNames = {"ttl"};
inline constexpr std::array<std::string_view, 3> kRejectionNames = {"queue_full", "no_slot",
                                                                    "draining"};
inline constexpr std::array<std::string_view, 3> kCancelPhaseNames = {"queued", "prefill",
                                                                      "decode"};
inline constexpr std::array<std::string_view, 4> kStreamEndNames = {"stop", "length", "cancelled",
                                                                    "failed"};
inline constexpr std::array<std::string_view, 2> kReplayNames = {"hit", "miss"};
inline constexpr std::array<std::string_view, 3> kMemoryNames = {"weights", "states", "workspace"};

template <typename Metric, size_t n>
using Children = std::array<Metric*, n>;

struct Families {
  explicit Families(const std::string& version);

  prometheus::Registry registry;

  Children<prometheus::Counter, rpc::kRpcNames.size()> started;
  std::array<Children<prometheus::Counter, rpc::kCodeNames.size()>, rpc::kRpcNames.size()> requests;
  Children<prometheus::Histogram, rpc::kRpcNames.size()> request_duration;

  prometheus::Histogram* first_token;
  prometheus::Histogram* inter_token;
  prometheus::Counter* streams_started;
  Children<prometheus::Counter, kStreamEndNames.size()> streams_finished;
  prometheus::Gauge* running_streams;
  prometheus::Gauge* blocked_streams;
  prometheus::Counter* stream_blocked;

  prometheus::Gauge* queue_depth;
  prometheus::Gauge* queue_tokens;
  prometheus::Histogram* queue_duration;
  prometheus::Histogram* compute_duration;
  prometheus::Histogram* call_duration;
  Children<prometheus::Counter, kRejectionNames.size()> rejections;
  Children<prometheus::Counter, kCancelPhaseNames.size()> cancellations;

  Children<prometheus::Counter, kTokenPhaseNames.size()> tokens;
  Children<prometheus::Histogram, kTokenPhaseNames.size()> batch_size;
  Children<prometheus::Histogram, kPhaseNames.size()> step_duration;

  prometheus::Gauge* sessions;
  Children<prometheus::Gauge, kSlotStateNames.size()> slots;
  Children<prometheus::Gauge, kSlotStateNames.size()> state_bytes;
  prometheus::Counter* checksum_failures;
  Children<prometheus::Counter, kEvictionNames.size()> evictions;
  prometheus::Counter* nonfinite;
  prometheus::Counter* step_failed_sessions;

  Children<prometheus::Counter, kPhaseNames.size()> gpu_busy;
  Children<prometheus::Counter, kReplayNames.size()> graph_replays;
  prometheus::Counter* padding_rows;
  prometheus::Counter* decode_state_bytes;
  Children<prometheus::Gauge, kMemoryNames.size()> memory;

  prometheus::Gauge* ready;
  prometheus::Gauge* drain_seconds;
  prometheus::Gauge* drain_timeout;
  prometheus::Family<prometheus::Gauge>* model_info;
  prometheus::Family<prometheus::Histogram>* kernel_duration;
};

}  // namespace gdn::metrics

#endif  // SERVER_METRICS_FAMILIES_H_
