// What a batch amounts to, for the observer.
#ifndef SERVER_ENGINE_STEP_STATS_H_
#define SERVER_ENGINE_STEP_STATS_H_

#include <cstdint>
#include <span>

#include "server/engine/observer.h"
#include "server/engine/scheduler.h"

namespace gdn::engine {

inline StepStats MakeStepStats(std::span<const BatchItem> batch, int64_t duration_ns) {
  StepStats stats;
  stats.duration_ns = duration_ns;
  for (const BatchItem& item : batch) {
    if (item.work_class == WorkClass::kPrefill) {
      stats.prefill_tokens += item.tokens;
      ++stats.prefill_sequences;
    } else {
      stats.decode_tokens += item.tokens;
      ++stats.decode_sequences;
    }
  }
  if (stats.decode_sequences == 0) {
    stats.phase = pipeline::Phase::kPrefill;
  } else {
    stats.phase = stats.prefill_sequences == 0 ? pipeline::Phase::kDecode : pipeline::Phase::kMixed;
  }
  return stats;
}

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_STEP_STATS_H_
