// What has to be told to callers and to the observer once the engine's lock is released: filled
// under the lock, sent without it. Reusable, so that a step does not allocate.
#ifndef SERVER_ENGINE_OUTBOX_H_
#define SERVER_ENGINE_OUTBOX_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "server/engine/observer.h"
#include "server/engine/waiter.h"

namespace gdn::engine {

class Outbox {
 public:
  enum class Event {
    kQueueTime,
    kFirstToken,
    kInterToken,
    kStreamStarted,
    kStreamEnded,
    kCallEnded,
    kCancelled,
    kRejected,
    kEvicted,
    kNonFinite,
    kStepFailed,
    kStreamBlocked,
  };

  // `second` is of kCallEnded alone.
  void Add(Event event, int64_t value = 0, std::optional<int64_t> second = std::nullopt) {
    events_.push_back({event, value, second});
  }
  template <typename Enum>
  void AddEnum(Event event, Enum value) {
    Add(event, static_cast<int64_t>(value));
  }
  // At most once per call and step: callers add a call when its step is applied, or when it ends.
  void Ready(std::shared_ptr<Waiter> waiter) { ready_.push_back(std::move(waiter)); }
  bool empty() const { return events_.empty() && ready_.empty(); }

  void Send(Observer* observer);

 private:
  struct Entry {
    Event event;
    int64_t value;
    std::optional<int64_t> second;
  };
  std::vector<Entry> events_;
  std::vector<std::shared_ptr<Waiter>> ready_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_OUTBOX_H_
