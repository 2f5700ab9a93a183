#include "server/engine/outbox.h"

namespace gdn::engine {

void Outbox::Send(Observer* observer) {
  for (const Entry& entry : events_) {
    switch (entry.event) {
      case Event::kQueueTime:
        observer->OnQueueTime(entry.value);
        break;
      case Event::kFirstToken:
        observer->OnFirstToken(entry.value);
        break;
      case Event::kInterToken:
        observer->OnInterToken(entry.value);
        break;
      case Event::kStreamStarted:
        observer->OnStreamStarted();
        break;
      case Event::kStreamEnded:
        observer->OnStreamEnded(static_cast<StreamEnd>(entry.value));
        break;
      case Event::kCallEnded:
        observer->OnCallEnded(entry.value, entry.second);
        break;
      case Event::kCancelled:
        observer->OnCancelled(static_cast<CancelPhase>(entry.value));
        break;
      case Event::kRejected:
        observer->OnRejected(static_cast<RejectionReason>(entry.value));
        break;
      case Event::kEvicted:
        observer->OnEvicted(static_cast<EvictionReason>(entry.value));
        break;
      case Event::kNonFinite:
        observer->OnNonFinite();
        break;
      case Event::kStepFailed:
        observer->OnStepFailed();
        break;
      case Event::kStreamBlocked:
        observer->OnStreamBlocked(entry.value);
        break;
    }
  }
  events_.clear();
  for (const std::shared_ptr<Waiter>& waiter : ready_) waiter->NotifyReady();
  ready_.clear();
}

}  // namespace gdn::engine
