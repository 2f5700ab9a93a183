// File: metrics.h
//
// Everything the server measures, and the HTTP endpoint it is scraped from. docs/metrics.md says
// what each family means; all children exist from the start, with label values of closed sets.
//
// Thread-safety: the observer methods may be called from any thread and take tens of nanoseconds.
#ifndef SERVER_METRICS_METRICS_H_
#define SERVER_METRICS_METRICS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/engine/observer.h"
#include "server/pipeline/pipeline.h"
#include "server/rpc/observer.h"

namespace gdn::metrics {

// What the model adds: labels of gdn_model_info, the ops, and the size of a state.
struct ModelLabels {
  std::string name;
  std::string architecture;
  std::string fingerprint;
  std::string device;
  std::string precision;
  std::string state_type;
  int64_t state_bytes_per_slot = 0;
  // Held on the device for good.
  int64_t weight_bytes = 0;
  int64_t pool_bytes = 0;
  int64_t workspace_bytes = 0;
};

class Metrics final : public engine::Observer,
                      public pipeline::KernelTimer,
                      public rpc::RpcObserver {
 public:
  // `version` is the server's. Nothing is listened on yet.
  explicit Metrics(const std::string& version);
  ~Metrics() override;
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Serves /metrics on host:port (port 0: any free one). UNAVAILABLE names address and cure.
  absl::Status Listen(const std::string& address);
  int port() const;  // 0: not listening.

  // Before the engine starts.
  void SetModel(const ModelLabels& labels, std::span<const std::string_view> ops);
  // Asked at each scrape, so that gauges are never older than it. Null before the source dies;
  // when this returns, the source is not being asked any more.
  void SetLevelsSource(std::function<engine::Levels()> source);

  void SetDrainTimeout(int64_t seconds);
  // Health is SERVING from SetReady() until BeginDrain().
  void SetReady();
  void BeginDrain();

  // The page as it is scraped, without the exposer's own families.
  std::string Text() const;

  void OnStep(const engine::StepStats& stats) override;
  void OnLevels(const engine::Levels& levels) override;
  void OnQueueTime(int64_t ns) override;
  void OnFirstToken(int64_t ns) override;
  void OnInterToken(int64_t ns) override;
  void OnStreamStarted() override;
  void OnStreamEnded(engine::StreamEnd end) override;
  void OnCallEnded(int64_t total_ns, std::optional<int64_t> compute_ns) override;
  void OnCancelled(engine::CancelPhase phase) override;
  void OnRejected(engine::RejectionReason reason) override;
  void OnEvicted(engine::EvictionReason reason) override;
  void OnNonFinite() override;
  void OnStepFailed() override;
  void OnStreamBlocked(int64_t ns) override;

  void OnKernel(std::string_view op, pipeline::Phase phase, int64_t duration_ns) override;
  void OnDecodeStateBytes(int64_t bytes) override;
  void OnGpuBusy(pipeline::Phase phase, int64_t duration_ns) override;
  void OnGraphReplay(bool hit, int64_t padding_rows) override;

  void OnCallStarted(rpc::Rpc rpc) override;
  void OnCallDone(rpc::Rpc rpc, int code, int64_t duration_ns) override;

 private:
  struct Impl;
  const std::shared_ptr<Impl> impl_;  // The exposer refers to it weakly.
};

}  // namespace gdn::metrics

#endif  // SERVER_METRICS_METRICS_H_
