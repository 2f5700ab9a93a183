// What is logged, kept for a test to look at.
#ifndef SERVER_RPC_TESTING_CAPTURED_LOG_H_
#define SERVER_RPC_TESTING_CAPTURED_LOG_H_

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace gdn::rpc {

// Of all levels, while it lives. Threads that log must start later and end before.
class CapturedLog {
 public:
  CapturedLog() : sink_(std::make_shared<Sink>()), before_(spdlog::default_logger()) {
    auto logger = std::make_shared<spdlog::logger>("test", sink_);
    logger->set_level(spdlog::level::debug);
    spdlog::set_default_logger(std::move(logger));
  }
  ~CapturedLog() { spdlog::set_default_logger(before_); }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;

  // False if it is not logged within 20 s.
  bool WaitFor(const std::string& part) { return sink_->WaitFor(part); }
  // Everything so far, a line a message.
  std::string text() { return sink_->text(); }

 private:
  class Sink final : public spdlog::sinks::base_sink<std::mutex> {
   public:
    bool WaitFor(const std::string& part) {
      std::unique_lock lock(text_mutex_);
      return grown_.wait_for(lock, std::chrono::seconds(20),
                             [&] { return text_.find(part) != std::string::npos; });
    }

    std::string text() {
      std::lock_guard lock(text_mutex_);
      return text_;
    }

   private:
    void sink_it_(const spdlog::details::log_msg& message) override {
      std::lock_guard lock(text_mutex_);
      text_.append(message.payload.data(), message.payload.size()).append("\n");
      grown_.notify_all();
    }
    void flush_() override {}

    std::mutex text_mutex_;
    std::condition_variable grown_;
    std::string text_;
  };

  std::shared_ptr<Sink> sink_;
  std::shared_ptr<spdlog::logger> before_;
};

}  // namespace gdn::rpc

#endif  // SERVER_RPC_TESTING_CAPTURED_LOG_H_
