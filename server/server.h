// File: server.h
//
// A whole server in one object: model, pipeline, engine, transport and metrics, put together in
// order and taken down in the opposite one.
//
// Thread-safety: RequestStop() and the const methods may be called from any thread; the rest
// belongs to the thread that created the server.
#ifndef SERVER_SERVER_H_
#define SERVER_SERVER_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/clock.h"
#include "server/engine/engine.h"
#include "server/memory_trimmer.h"
#include "server/metrics/metrics.h"
#include "server/options.h"
#include "server/pipeline/pipeline.h"
#include "server/rpc/rpc_server.h"

namespace gdn {

class Server {
 public:
  // Listens on all addresses; health is NOT_SERVING and calls are UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<Server>> Create(const ServerOptions& options);
  ~Server();  // Stops at once if Run() has not.
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Loads and warms the model; health turns SERVING.
  absl::Status Load();
  // Waits for RequestStop(), then drains: running calls may finish until the drain timeout.
  void Run();
  void RequestStop();

  bool ready() const { return ready_; }
  const std::string& address() const { return rpc_->address(); }
  int port() const { return rpc_->port(); }
  int metrics_port() const { return metrics_->port(); }

 private:
  explicit Server(const ServerOptions& options) : options_(options) {}
  void Drain();
  void TakeDown(int64_t grace_ms);

  const ServerOptions options_;
  Device device_ = Device::kCpu;
  engine::SystemClock clock_;
  std::unique_ptr<metrics::Metrics> metrics_;
  std::unique_ptr<pipeline::Pipeline> pipeline_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<rpc::RpcServer> rpc_;
  std::unique_ptr<MemoryTrimmer> trimmer_;
  std::atomic<bool> ready_ = false;

  std::mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_requested_ = false;
};

}  // namespace gdn

#endif  // SERVER_SERVER_H_
