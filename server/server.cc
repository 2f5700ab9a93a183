#include "server/server.h"

#include <spdlog/spdlog.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/device.h"
#include "server/memory.h"
#include "server/model/weights.h"
#include "server/rpc/model_facts.h"
#include "server/rpc/utf8.h"

namespace gdn {
namespace {

// What calls have after the drain timeout to write their last status.
constexpr int64_t kShutdownGraceMs = 1000;

// Whole or not at all, since scripts poll for it.
absl::Status WritePortFile(const std::string& path, int port) {
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary);
  file << port << '\n';
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--port-file=", path, ": cannot be written; name a file in a writable folder"));
  }
  return absl::OkStatus();
}

// Byte-level checkpoints have the 256 bytes and a few special ids, and no tokenizer's files.
bool HasByteVocabulary(const model::ModelSpec& spec, const std::string& path) {
  constexpr int64_t kMaxSpecialIds = 64;
  if (spec.vocab_size < 256 || spec.vocab_size > 256 + kMaxSpecialIds) return false;
  for (const char* name : {"tokenizer.json", "tokenizer.model", "vocab.json"}) {
    if (std::filesystem::exists(std::filesystem::path(path) / name)) return false;
  }
  return true;
}

rpc::ModelFacts Facts(const model::Model& model, const ServerOptions& options, Device device) {
  const model::ModelSpec& spec = model.spec;
  const bool float32 = options.device.precision == pipeline::Precision::kFloat32;
  const bool float32_state = options.device.state_type == pipeline::StateType::kFloat32;
  rpc::ModelFacts facts;
  facts.name = options.model.name.empty() ? model.name : options.model.name;
  facts.architecture = spec.architecture;
  facts.fingerprint = model.weights.fingerprint;
  facts.device = device == Device::kCuda ? "cuda" : "cpu";
  facts.precision = float32 ? "float32" : "bfloat16";
  facts.state_type = float32_state ? "float32" : "bfloat16";
  facts.batch_invariant = options.device.batch_invariant;
  facts.vocab_size = spec.vocab_size;
  facts.hidden_size = spec.hidden_size;
  facts.num_layers = spec.num_layers;
  facts.first_layer = model.layers.first;
  facts.last_layer = model.layers.last;
  facts.has_embedding = model.layers.has_embedding();
  facts.has_head = model.layers.has_head(spec);
  facts.key_heads = spec.gdn.key_heads;
  facts.value_heads = spec.gdn.value_heads;
  facts.key_dim = spec.gdn.key_dim;
  facts.value_dim = spec.gdn.value_dim;
  facts.num_parameters = model.weights.num_parameters;
  facts.eos_token_ids = spec.eos_token_ids;
  facts.bos_token_id = spec.bos_token_id;
  facts.byte_vocabulary = HasByteVocabulary(spec, options.model.load.path);
  facts.server_version = GDN_VERSION;
  return facts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const ServerOptions& options) {
  std::unique_ptr<Server> server(new Server(options));
  auto device = ChooseDevice(options.device);
  if (!device.ok()) return device.status();
  server->device_ = *device;
  server->metrics_ = std::make_unique<metrics::Metrics>(GDN_VERSION);
  server->metrics_->SetDrainTimeout(options.drain_timeout_s);
  if (!options.metrics.listen.empty()) {
    absl::Status status = server->metrics_->Listen(options.metrics.listen);
    if (!status.ok()) return status;
  }
  auto rpc = rpc::RpcServer::Create(options.rpc, &server->clock_, server->metrics_.get());
  if (!rpc.ok()) return rpc.status();
  server->rpc_ = *std::move(rpc);
  if (!options.port_file.empty()) {
    absl::Status status = WritePortFile(options.port_file, server->port());
    if (!status.ok()) return status;
  }
  return server;
}

absl::Status Server::Load() {
  const auto start = std::chrono::steady_clock::now();
  auto model = model::LoadModel(options_.model.load);
  if (!model.ok()) return model.status();
  if (!model->unknown_config_keys.empty()) {
    spdlog::info("config.json has keys that are not used: {}",
                 absl::StrJoin(model->unknown_config_keys, ", "));
  }
  rpc::ModelFacts facts = Facts(*model, options_, device_);
  if (!rpc::IsUtf8(facts.name)) {
    return absl::InvalidArgumentError(
        "the name of the checkpoint's folder is not UTF-8, so no client could be told; give the "
        "model another name with --model-name");
  }
  auto pipeline = CreatePipeline(*std::move(model), options_, device_);
  if (!pipeline.ok()) return pipeline.status();
  pipeline_ = *std::move(pipeline);
  facts.state_bytes_per_session = pipeline_->info().state_bytes_per_slot;
  facts.max_sessions = pipeline_->info().num_slots - 1;  // The engine warms up in one of its own.
  if (device_ == Device::kCpu) {
    auto warning =
        CheckStateMemory(facts.max_sessions, facts.state_bytes_per_session, ReadMemoryLimits());
    if (!warning.ok()) return warning.status();
    if (!warning->empty()) spdlog::warn("{}", *warning);
  }
  metrics_->SetModel(
      {.name = facts.name,
       .architecture = facts.architecture,
       .fingerprint = facts.fingerprint,
       .device = facts.device,
       .precision = facts.precision,
       .state_type = facts.state_type,
       .state_bytes_per_slot = facts.state_bytes_per_session,
       .weight_bytes = pipeline_->info().weight_bytes,
       .pool_bytes = pipeline_->info().num_slots * pipeline_->info().state_bytes_per_slot,
       .workspace_bytes = pipeline_->info().workspace_bytes},
      pipeline_->OpNames());
  auto engine = engine::Engine::Create(options_.engine, pipeline_.get(), &clock_, metrics_.get());
  if (!engine.ok()) return engine.status();
  engine_ = *std::move(engine);
  if (absl::Status status = engine_->WarmUp(); !status.ok()) return status;
  // The warm-up is not typical. On the CPU the timer is of ops alone.
  if (device_ == Device::kCuda || options_.device.kernel_timing_interval > 0) {
    pipeline_->set_kernel_timer(metrics_.get());
  }
  metrics_->SetLevelsSource([engine = engine_.get()] { return engine->levels(); });
  engine_->Start();
  trimmer_ = std::make_unique<MemoryTrimmer>([engine = engine_.get()] {
    const engine::Levels levels = engine->levels();
    return levels.queued_calls == 0 && levels.running_streams == 0 && levels.slots_in_flight == 0;
  });
  rpc_->SetReady(engine_.get(), facts);
  metrics_->SetReady();
  ready_ = true;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  spdlog::info(
      "serving {} ({}, {} parameters, layers {}..{} of {}, {} bytes of state a session) "
      "after {:.2f} s",
      facts.name, facts.architecture, facts.num_parameters, facts.first_layer, facts.last_layer,
      facts.num_layers, facts.state_bytes_per_session, took.count());
  return absl::OkStatus();
}

void Server::RequestStop() {
  std::lock_guard lock(mutex_);
  stop_requested_ = true;
  stop_changed_.notify_all();
}

void Server::Run() {
  {
    std::unique_lock lock(mutex_);
    stop_changed_.wait(lock, [this] { return stop_requested_; });
  }
  Drain();
}

void Server::Drain() {
  spdlog::info("draining; running calls have {} s", options_.drain_timeout_s);
  metrics_->BeginDrain();
  rpc_->BeginDrain();
  const int64_t deadline_ns = clock_.NowNs() + options_.drain_timeout_s * 1'000'000'000;
  if (engine_ != nullptr) {
    engine_->BeginDrain();
    const int64_t ended = engine_->FinishDrain(deadline_ns);
    if (ended > 0) spdlog::warn("ended {} calls at the drain timeout", ended);
  }
  // What the engine has finished may still be on its way to a slow reader.
  rpc_->WaitForCalls((deadline_ns - clock_.NowNs()) / 1'000'000);
  TakeDown(kShutdownGraceMs);
  spdlog::info("stopped");
}

void Server::TakeDown(int64_t grace_ms) {
  ready_ = false;
  // A call ends only when the engine has ended it or it is cancelled, so the transport goes first.
  if (rpc_ != nullptr) rpc_->Shutdown(grace_ms);
  trimmer_ = nullptr;
  if (metrics_ != nullptr) metrics_->SetLevelsSource(nullptr);
  if (engine_ != nullptr) engine_->Stop();
}

Server::~Server() { TakeDown(0); }

}  // namespace gdn
