#include "server/metrics/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/exposer.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/metrics/buckets.h"
#include "server/metrics/families.h"
#include "server/metrics/process_collector.h"

namespace gdn::metrics {
namespace {

double Seconds(int64_t ns) { return 1e-9 * static_cast<double>(ns); }

// A clock that went backwards must not make a sum decrease, for a rate would then explode.
void ObserveNs(prometheus::Histogram* histogram, int64_t ns) {
  histogram->Observe(Seconds(std::max<int64_t>(ns, 0)));
}

int64_t NowNs() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

size_t Index(auto value) { return static_cast<size_t>(value); }

}  // namespace

struct Metrics::Impl final : prometheus::Collectable {
  explicit Impl(const std::string& version) : families(version) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    {
      std::lock_guard lock(levels_mutex);
      if (levels_source) SetLevels(levels_source());
    }
    const int64_t drain_start_ns = drain_start.load(std::memory_order_relaxed);
    if (drain_start_ns != 0) families.drain_seconds->Set(Seconds(NowNs() - drain_start_ns));
    std::vector<prometheus::MetricFamily> all = families.registry.Collect();
    for (prometheus::MetricFamily& family : CollectProcess()) all.push_back(std::move(family));
    return all;
  }

  void SetLevels(const engine::Levels& levels) const {
    families.queue_depth->Set(static_cast<double>(levels.queued_calls));
    families.queue_tokens->Set(static_cast<double>(levels.queued_tokens));
    families.running_streams->Set(static_cast<double>(levels.running_streams));
    families.blocked_streams->Set(static_cast<double>(levels.blocked_streams));
    families.sessions->Set(static_cast<double>(levels.live_sessions));
    const int64_t slots[] = {levels.slots_free, levels.slots_live, levels.slots_in_flight,
                             levels.slots_reserved};
    for (size_t i = 0; i < kSlotStateNames.size(); ++i) {
      families.slots[i]->Set(static_cast<double>(slots[i]));
      families.state_bytes[i]->Set(static_cast<double>(slots[i] * state_bytes_per_slot));
    }
  }

  Families families;
  int64_t state_bytes_per_slot = 0;
  // The ops and, for each, its children by phase.
  std::vector<std::string_view> ops;
  std::vector<Children<prometheus::Histogram, kPhaseNames.size()>> kernels;

  std::atomic<int64_t> drain_start = 0;  // Monotonic; 0: not begun.

  mutable std::mutex levels_mutex;
  std::function<engine::Levels()> levels_source;

  std::unique_ptr<prometheus::Exposer> exposer;
  int port = 0;
};

Metrics::Metrics(const std::string& version) : impl_(std::make_shared<Impl>(version)) {}

Metrics::~Metrics() { impl_->exposer.reset(); }

absl::Status Metrics::Listen(const std::string& address) {
  // A connection that says nothing holds a thread until it times out. By default there are two
  // threads and half a minute.
  const std::vector<std::string> options = {
      "listening_ports",    address, "num_threads",       "8",
      "request_timeout_ms", "2000",  "enable_keep_alive", "no"};
  try {
    impl_->exposer = std::make_unique<prometheus::Exposer>(options);
    impl_->exposer->RegisterCollectable(impl_);
    impl_->port = impl_->exposer->GetListeningPorts().front();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(
        "cannot serve metrics on ", address, " (", error.what(),
        "): the port is taken, or the address is not one of this machine; choose another with "
        "--metrics-listen, or 'off'"));
  }
}

int Metrics::port() const { return impl_->port; }

void Metrics::SetModel(const ModelLabels& labels, std::span<const std::string_view> ops) {
  impl_->families.model_info
      ->Add({{"name", labels.name},
             {"architecture", labels.architecture},
             {"fingerprint", labels.fingerprint},
             {"device", labels.device},
             {"precision", labels.precision},
             {"state_type", labels.state_type}})
      .Set(1);
  impl_->state_bytes_per_slot = labels.state_bytes_per_slot;
  const int64_t memory[] = {labels.weight_bytes, labels.pool_bytes, labels.workspace_bytes};
  for (size_t i = 0; i < kMemoryNames.size(); ++i) {
    impl_->families.memory[i]->Set(static_cast<double>(memory[i]));
  }
  for (const std::string_view op : ops) {
    auto& children = impl_->kernels.emplace_back();
    for (size_t i = 0; i < kPhaseNames.size(); ++i) {
      children[i] = &impl_->families.kernel_duration->Add(
          {{"op", std::string(op)}, {"phase", std::string(kPhaseNames[i])}}, kKernelSeconds);
    }
    impl_->ops.push_back(op);
  }
}

void Metrics::SetLevelsSource(std::function<engine::Levels()> source) {
  std::lock_guard lock(impl_->levels_mutex);
  impl_->levels_source = std::move(source);
}

void Metrics::SetDrainTimeout(int64_t seconds) {
  impl_->families.drain_timeout->Set(static_cast<double>(seconds));
}

void Metrics::SetReady() { impl_->families.ready->Set(1); }

void Metrics::BeginDrain() {
  impl_->families.ready->Set(0);
  impl_->drain_start.store(NowNs(), std::memory_order_relaxed);
}

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->Collect());
}

void Metrics::OnStep(const engine::StepStats& stats) {
  const Families& families = impl_->families;
  ObserveNs(families.step_duration[Index(stats.phase)], stats.duration_ns);
  const int64_t tokens[] = {stats.prefill_tokens, stats.decode_tokens};
  const int64_t sequences[] = {stats.prefill_sequences, stats.decode_sequences};
  for (size_t i = 0; i < kTokenPhaseNames.size(); ++i) {
    if (sequences[i] == 0) continue;
    families.tokens[i]->Increment(static_cast<double>(tokens[i]));
    families.batch_size[i]->Observe(static_cast<double>(sequences[i]));
  }
}

void Metrics::OnLevels(const engine::Levels& levels) { impl_->SetLevels(levels); }
void Metrics::OnQueueTime(int64_t ns) { ObserveNs(impl_->families.queue_duration, ns); }
void Metrics::OnFirstToken(int64_t ns) { ObserveNs(impl_->families.first_token, ns); }
// 40 ns a token; a server of 100,000 tokens/s spends 0.4 % of one core here.
void Metrics::OnInterToken(int64_t ns) { ObserveNs(impl_->families.inter_token, ns); }

void Metrics::OnStreamStarted() { impl_->families.streams_started->Increment(); }
void Metrics::OnStreamEnded(engine::StreamEnd end) {
  impl_->families.streams_finished[Index(end)]->Increment();
}
void Metrics::OnCallEnded(int64_t total_ns, std::optional<int64_t> compute_ns) {
  ObserveNs(impl_->families.call_duration, total_ns);
  if (compute_ns) ObserveNs(impl_->families.compute_duration, *compute_ns);
}
void Metrics::OnCancelled(engine::CancelPhase phase) {
  impl_->families.cancellations[Index(phase)]->Increment();
}
void Metrics::OnRejected(engine::RejectionReason reason) {
  impl_->families.rejections[Index(reason)]->Increment();
}
void Metrics::OnEvicted(engine::EvictionReason reason) {
  impl_->families.evictions[Index(reason)]->Increment();
}
void Metrics::OnNonFinite() { impl_->families.nonfinite->Increment(); }
void Metrics::OnStepFailed() { impl_->families.step_failed_sessions->Increment(); }
void Metrics::OnStreamBlocked(int64_t ns) {
  impl_->families.stream_blocked->Increment(Seconds(std::max<int64_t>(ns, 0)));
}

void Metrics::OnKernel(std::string_view op, pipeline::Phase phase, int64_t duration_ns) {
  // A dozen names, the same literals each time: comparing pointers settles it almost always.
  for (size_t i = 0; i < impl_->ops.size(); ++i) {
    if (impl_->ops[i].data() == op.data() || impl_->ops[i] == op) {
      ObserveNs(impl_->kernels[i][Index(phase)], duration_ns);
      return;
    }
  }
}

void Metrics::OnDecodeStateBytes(int64_t bytes) {
  impl_->families.decode_state_bytes->Increment(static_cast<double>(bytes));
}

void Metrics::OnGpuBusy(pipeline::Phase phase, int64_t duration_ns) {
  impl_->families.gpu_busy[Index(phase)]->Increment(Seconds(std::max<int64_t>(duration_ns, 0)));
}

void Metrics::OnGraphReplay(bool hit, int64_t padding_rows) {
  impl_->families.graph_replays[hit ? 0 : 1]->Increment();
  impl_->families.padding_rows->Increment(static_cast<double>(padding_rows));
}

void Metrics::OnCallStarted(rpc::Rpc rpc) { impl_->families.started[Index(rpc)]->Increment(); }

void Metrics::OnCallDone(rpc::Rpc rpc, int code, int64_t duration_ns) {
  // What is not a status code of gRPC counts as UNKNOWN, as on the wire.
  constexpr size_t kUnknown = 2;
  const size_t index = code >= 0 && Index(code) < rpc::kCodeNames.size() ? Index(code) : kUnknown;
  impl_->families.requests[Index(rpc)][index]->Increment();
  ObserveNs(impl_->families.request_duration[Index(rpc)], duration_ns);
}

}  // namespace gdn::metrics
