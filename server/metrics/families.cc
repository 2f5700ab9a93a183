#include "server/metrics/families.h"

#include "server/metrics/buckets.h"

namespace gdn::metrics {
namespace {

using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

Counter* AddCounter(Registry& registry, const char* name, const char* help) {
  return &prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}

Gauge* AddGauge(Registry& registry, const char* name, const char* help) {
  return &prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}

Histogram* AddHistogram(Registry& registry, const char* name, const char* help,
                        const std::vector<double>& buckets) {
  return &prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, buckets);
}

// One child for each value of the label.
template <typename Metric, size_t n, typename... Args>
Children<Metric, n> AddChildren(prometheus::Family<Metric>& family, const char* label,
                                const std::array<std::string_view, n>& values, Args&&... args) {
  Children<Metric, n> children{};
  for (size_t i = 0; i < n; ++i) {
    children[i] = &family.Add({{label, std::string(values[i])}}, args...);
  }
  return children;
}

}  // namespace

// Help texts are one line each: the text format has no escape for more.
Families::Families(const std::string& version) {
  started = AddChildren(prometheus::BuildCounter()
                            .Name("gdn_requests_started_total")
                            .Help("Calls that have arrived, by method.")
                            .Register(registry),
                        "rpc", rpc::kRpcNames);
  auto& requests_family = prometheus::BuildCounter()
                              .Name("gdn_requests_total")
                              .Help("Calls that are over, by method and status code.")
                              .Register(registry);
  for (size_t i = 0; i < rpc::kRpcNames.size(); ++i) {
    for (size_t j = 0; j < rpc::kCodeNames.size(); ++j) {
      requests[i][j] = &requests_family.Add(
          {{"rpc", std::string(rpc::kRpcNames[i])}, {"code", std::string(rpc::kCodeNames[j])}});
    }
  }
  request_duration = AddChildren(prometheus::BuildHistogram()
                                     .Name("gdn_request_duration_seconds")
                                     .Help("From the arrival of a call to its end.")
                                     .Register(registry),
                                 "rpc", rpc::kRpcNames, kRequestSeconds);

  first_token =
      AddHistogram(registry, "gdn_time_to_first_token_seconds",
                   "From the admission of a Generate call to its first token.", kTokenSeconds);
  inter_token = AddHistogram(registry, "gdn_inter_token_latency_seconds",
                             "Between successive tokens of a Generate call.", kTokenSeconds);
  streams_started = AddCounter(registry, "gdn_streams_started_total", "Generate calls admitted.");
  streams_finished = AddChildren(prometheus::BuildCounter()
                                     .Name("gdn_streams_finished_total")
                                     .Help("Admitted Generate calls that are over, by reason.")
                                     .Register(registry),
                                 "reason", kStreamEndNames);
  running_streams =
      AddGauge(registry, "gdn_running_streams", "Generate calls admitted and not finished.");
  blocked_streams = AddGauge(registry, "gdn_blocked_streams",
                             "Running streams that are paused because their reader lags.");
  stream_blocked = AddCounter(registry, "gdn_stream_blocked_seconds_total",
                              "Time streams were paused because their readers lagged.");

  queue_depth = AddGauge(registry, "gdn_queue_depth", "Calls waiting for their first step.");
  queue_tokens =
      AddGauge(registry, "gdn_queue_tokens", "Input tokens of the calls that are waiting.");
  queue_duration = AddHistogram(registry, "gdn_queue_duration_seconds",
                                "From the admission of a call to the first step that works for it.",
                                kDurationSeconds);
  compute_duration =
      AddHistogram(registry, "gdn_compute_duration_seconds",
                   "Time of the steps that worked for a call, once a call.", kDurationSeconds);
  call_duration =
      AddHistogram(registry, "gdn_call_duration_seconds",
                   "From the admission of a call to its end in the engine.", kDurationSeconds);
  rejections = AddChildren(prometheus::BuildCounter()
                               .Name("gdn_rejections_total")
                               .Help("Calls refused for want of room, by reason.")
                               .Register(registry),
                           "reason", kRejectionNames);
  cancellations = AddChildren(
      prometheus::BuildCounter()
          .Name("gdn_cancellations_total")
          .Help("Calls given up by their client or their deadline, by the phase they were in.")
          .Register(registry),
      "phase", kCancelPhaseNames);

  tokens = AddChildren(prometheus::BuildCounter()
                           .Name("gdn_tokens_total")
                           .Help("Tokens run through the model, by phase.")
                           .Register(registry),
                       "phase", kTokenPhaseNames);
  batch_size =
      AddChildren(prometheus::BuildHistogram()
                      .Name("gdn_batch_size")
                      .Help("Sequences of a step, by phase; steps without any not counted.")
                      .Register(registry),
                  "phase", kTokenPhaseNames, kBatchSizes);
  step_duration = AddChildren(prometheus::BuildHistogram()
                                  .Name("gdn_step_duration_seconds")
                                  .Help("Duration of a step of the model, by what was in it.")
                                  .Register(registry),
                              "phase", kPhaseNames, kDurationSeconds);
  kernel_duration = &prometheus::BuildHistogram()
                         .Name("gdn_kernel_duration_seconds")
                         .Help("Duration of one run of an op, by op and phase of its step.")
                         .Register(registry);

  gpu_busy = AddChildren(prometheus::BuildCounter()
                             .Name("gdn_gpu_busy_seconds_total")
                             .Help("Time for which the GPU worked on steps, by phase.")
                             .Register(registry),
                         "phase", kPhaseNames);
  graph_replays = AddChildren(prometheus::BuildCounter()
                                  .Name("gdn_graph_replays_total")
                                  .Help("Decode steps on a GPU, by whether a captured graph ran.")
                                  .Register(registry),
                              "result", kReplayNames);
  padding_rows = AddCounter(registry, "gdn_batch_padding_rows_total",
                            "Rows of decode graphs that no sequence used.");
  decode_state_bytes =
      AddCounter(registry, "gdn_decode_state_bytes_total",
                 "State bytes that timed runs of the decode kernel read and wrote.");
  memory = AddChildren(prometheus::BuildGauge()
                           .Name("gdn_device_memory_bytes")
                           .Help("Memory the model holds on its device, by use.")
                           .Register(registry),
                       "use", kMemoryNames);

  sessions = AddGauge(registry, "gdn_sessions", "Sessions alive.");
  slots = AddChildren(prometheus::BuildGauge()
                          .Name("gdn_state_slots")
                          .Help("State slots, by what they are used for.")
                          .Register(registry),
                      "state", kSlotStateNames);
  state_bytes = AddChildren(prometheus::BuildGauge()
                                .Name("gdn_state_bytes")
                                .Help("Bytes of the state slots, by what they are used for.")
                                .Register(registry),
                            "state", kSlotStateNames);
  evictions = AddChildren(prometheus::BuildCounter()
                              .Name("gdn_session_evictions_total")
                              .Help("Sessions ended by the server, by reason.")
                              .Register(registry),
                          "reason", kEvictionNames);
  checksum_failures = AddCounter(registry, "gdn_state_checksum_failures_total",
                                 "Snapshots refused because a checksum did not hold.");
  nonfinite = AddCounter(registry, "gdn_nonfinite_states_total",
                         "Sessions removed because their state became NaN or infinite.");
  step_failed_sessions = AddCounter(registry, "gdn_step_failed_sessions_total",
                                    "Sessions removed because a step that ran them failed.");

  ready = AddGauge(registry, "gdn_ready", "1 while health is SERVING, else 0.");
  drain_seconds =
      AddGauge(registry, "gdn_drain_seconds", "Time since the drain began; 0 before it.");
  drain_timeout = AddGauge(registry, "gdn_drain_timeout_seconds",
                           "How long running calls may go on during a drain.");
  prometheus::BuildGauge()
      .Name("gdn_build_info")
      .Help("Always 1; the label says what is running.")
      .Register(registry)
      .Add({{"version", version}})
      .Set(1);
  model_info = &prometheus::BuildGauge()
                    .Name("gdn_model_info")
                    .Help("Always 1; the labels say what is served.")
                    .Register(registry);
}

}  // namespace gdn::metrics
