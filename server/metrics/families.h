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
inline constexpr std::array<std::string_view, 2> kFinishNames = {"stop", "length"};

template <typename Metric, size_t n>
using Children = std::array<Metric*, n>;

struct Families {
  explicit Families(const std::string& version);

  prometheus::Registry registry;

  std::array<Children<prometheus::Counter, rpc::kCodeNames.size()>, rpc::kRpcNames.size()> requests;
  Children<prometheus::Histogram, rpc::kRpcNames.size()> request_duration;

  prometheus::Histogram* first_token;
  prometheus::Histogram* inter_token;
  Children<prometheus::Counter, kFinishNames.size()> finished;
  prometheus::Gauge* running_streams;
  prometheus::Gauge* blocked_streams;
  prometheus::Counter* stream_blocked;

  prometheus::Gauge* queue_depth;
  prometheus::Gauge* queue_tokens;
  prometheus::Histogram* queue_duration;
  Children<prometheus::Counter, kRejectionNames.size()> rejections;
  Children<prometheus::Counter, kCancelPhaseNames.size()> cancellations;

  Children<prometheus::Counter, kTokenPhaseNames.size()> tokens;
  Children<prometheus::Histogram, kTokenPhaseNames.size()> batch_size;
  Children<prometheus::Histogram, kPhaseNames.size()> step_duration;

  prometheus::Gauge* sessions;
  Children<prometheus::Gauge, kSlotStateNames.size()> slots;
  prometheus::Gauge* state_bytes;
  Children<prometheus::Counter, kEvictionNames.size()> evictions;
  prometheus::Counter* nonfinite;
  prometheus::Counter* step_failed_sessions;

  prometheus::Family<prometheus::Gauge>* model_info;
  prometheus::Family<prometheus::Histogram>* kernel_duration;
};

}  // namespace gdn::metrics

#endif  // SERVER_METRICS_FAMILIES_H_
