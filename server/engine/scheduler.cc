#include "server/engine/scheduler.h"

#include <algorithm>

namespace gdn::engine {

void Scheduler::Add(Work* work) {
  if (work->queued || work->pending.empty()) return;
  work->queued = true;
  queue(work->work_class).push_back(work);
}

void Scheduler::Remove(Work* work) {
  if (!work->queued) return;
  work->queued = false;
  std::vector<Work*>& works = queue(work->work_class);
  works.erase(std::find(works.begin(), works.end(), work));
}

void Scheduler::Drop(Work* work, int64_t sequence) {
  std::erase_if(work->pending, [&](const Work::Sequence& s) { return s.index == sequence; });
  if (work->pending.empty()) Remove(work);
}

bool Scheduler::empty() const {
  return std::all_of(queues_.begin(), queues_.end(), [](const auto& q) { return q.empty(); });
}

void Scheduler::Next(std::vector<BatchItem>* batch) {
  batch->clear();
  prefill_tokens_ = 0;
  int64_t waiting = 0;  // Classes with work.
  for (const auto& q : queues_) waiting += q.empty() ? 0 : 1;
  int64_t rows = limits_.max_rows;
  const bool scarce = rows < waiting;
  const int first = scarce ? first_class_ : 0;
  for (int i = 0; i < kNumWorkClasses && rows > 0; ++i) {
    const auto work_class = static_cast<WorkClass>((first + i) % kNumWorkClasses);
    if (queue(work_class).empty()) continue;
    --waiting;
    // One row stays for each class still to come.
    const int64_t share = scarce ? 1 : rows - waiting;
    rows -= Serve(work_class, share, batch);
    if (scarce) first_class_ = (static_cast<int>(work_class) + 1) % kNumWorkClasses;
  }
}

int64_t Scheduler::Serve(WorkClass work_class, int64_t rows, std::vector<BatchItem>* batch) {
  std::vector<Work*>& works = queue(work_class);
  served_.clear();
  int64_t used = 0;
  auto keep = works.begin();
  for (auto it = works.begin(); it != works.end(); ++it) {
    Work* work = *it;
    const int64_t n = used < rows ? ServeWork(work, rows - used, batch) : 0;
    used += n;
    if (n == 0) {
      *keep++ = work;
    } else if (work->pending.empty()) {
      work->queued = false;
    } else {
      served_.push_back(work);
    }
  }
  works.erase(keep, works.end());
  works.insert(works.end(), served_.begin(), served_.end());
  return used;
}

int64_t Scheduler::ServeWork(Work* work, int64_t rows, std::vector<BatchItem>* batch) {
  std::vector<Work::Sequence>& pending = work->pending;
  advanced_.clear();
  int64_t used = 0;
  auto keep = pending.begin();
  for (auto it = pending.begin(); it != pending.end(); ++it) {
    Work::Sequence sequence = *it;
    const int64_t tokens = std::min(sequence.remaining, limits_.chunk_tokens);
    bool fits = used < rows;
    if (work->work_class == WorkClass::kPrefill && prefill_tokens_ > 0) {
      fits = fits && prefill_tokens_ + tokens <= limits_.prefill_token_budget;
    }
    if (!fits) {
      *keep++ = sequence;
      continue;
    }
    batch->push_back({work, sequence.index, tokens, work->work_class});
    ++used;
    if (work->work_class == WorkClass::kPrefill) prefill_tokens_ += tokens;
    sequence.remaining -= tokens;
    if (sequence.remaining > 0) advanced_.push_back(sequence);
  }
  pending.erase(keep, pending.end());
  pending.insert(pending.end(), advanced_.begin(), advanced_.end());
  return used;
}

}  // namespace gdn::engine
