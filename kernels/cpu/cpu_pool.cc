#include "gdn/kernels/cpu_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/common/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// A decayed state fills with subnormal numbers, each of which costs some processors a hundred
// cycles an operation. They are below 1.2e-38: inside a region they count as zero.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) {
    _mm_setcsr(saved_ | kFlushToZero | kSubnormalsAreZero);
  }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000;        // results
  static constexpr unsigned kSubnormalsAreZero = 0x0040;  // operands
  unsigned saved_;
#endif
};

// Spins until `done()` or until the budget is used up; returns done().
template <typename Predicate>
bool SpinUntil(std::chrono::microseconds budget, Predicate done) {
  if (done()) return true;
  const auto end = std::chrono::steady_clock::now() + budget;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

// A region is published by incrementing `epoch`; each worker runs its part and decrements
// `remaining`. Sleepers wait on `wake`, the caller on `finished`, both only after spinning.
struct gdn_cpu_pool {
  std::vector<std::thread> threads;
  int32_t num_threads = 1;
  std::chrono::microseconds spin{0};

  gdn::cpu::RegionBody body = nullptr;
  void* context = nullptr;
  int64_t count = 0;
  int32_t parts = 0;

  std::atomic<uint64_t> epoch{0};
  std::atomic<int32_t> remaining{0};
  std::atomic<bool> stop{false};
  std::atomic<int32_t> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable finished;

  void RunPart(int32_t part) {
    const int64_t begin = count * part / parts;
    const int64_t end = count * (part + 1) / parts;
    if (begin >= end) return;
    [[maybe_unused]] const FlushSubnormals flush;
    body(context, begin, end, part);
  }

  void WorkerLoop(int32_t worker) {
    uint64_t seen = 0;
    for (;;) {
      auto changed = [&] { return epoch.load(std::memory_order_seq_cst) != seen || stop.load(); };
      if (!SpinUntil(spin, changed)) {
        std::unique_lock<std::mutex> lock(mutex);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, changed);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (stop.load()) return;
      seen = epoch.load(std::memory_order_acquire);
      if (worker < parts) RunPart(worker);
      if (remaining.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
          caller_sleeps.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(mutex);
        finished.notify_one();
      }
    }
  }

  void Run(int64_t n, int32_t num_parts, gdn::cpu::RegionBody fn, void* ctx) {
    body = fn;
    context = ctx;
    count = n;
    parts = num_parts;
    remaining.store(num_threads - 1, std::memory_order_relaxed);
    epoch.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      wake.notify_all();
    }
    RunPart(0);
    auto done = [&] { return remaining.load(std::memory_order_seq_cst) == 0; };
    if (SpinUntil(spin, done)) return;
    caller_sleeps.store(true, std::memory_order_seq_cst);
    {
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, done);
    }
    caller_sleeps.store(false, std::memory_order_seq_cst);
  }
};

gdn_cpu_pool* gdn_cpu_pool_create(int32_t num_threads, int32_t spin_us) {
  if (num_threads < 1 || num_threads > 1024 || spin_us < 0) {
    gdn::kernels::Fail(GDN_INVALID_ARGUMENT,
                       "cpu pool: num_threads must be in 1..1024 and spin_us >= 0, got %d and %d",
                       num_threads, spin_us);
    return nullptr;
  }
  auto* pool = new (std::nothrow) gdn_cpu_pool;
  if (pool == nullptr) return nullptr;
  pool->num_threads = num_threads;
  pool->spin = std::chrono::microseconds(spin_us);
  try {
    for (int32_t i = 1; i < num_threads; ++i) {
      pool->threads.emplace_back([pool, i] { pool->WorkerLoop(i); });
    }
  } catch (const std::system_error& error) {
    gdn::kernels::Fail(GDN_DEVICE_ERROR, "cpu pool: cannot start thread %d of %d: %s",
                       static_cast<int>(pool->threads.size()) + 1, num_threads, error.what());
    gdn_cpu_pool_destroy(pool);
    return nullptr;
  }
  return pool;
}

void gdn_cpu_pool_destroy(gdn_cpu_pool* pool) {
  if (pool == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->stop.store(true);
  }
  pool->wake.notify_all();
  for (std::thread& thread : pool->threads) thread.join();
  delete pool;
}

int32_t gdn_cpu_pool_threads(const gdn_cpu_pool* pool) {
  return pool == nullptr ? 1 : pool->num_threads;
}

namespace gdn::cpu {

void ParallelFor(gdn_cpu_pool* pool, int64_t count, int64_t grain, RegionBody body, void* context) {
  if (count <= 0) return;
  const int64_t by_grain = std::max<int64_t>(1, count / std::max<int64_t>(1, grain));
  const auto parts = static_cast<int32_t>(std::min<int64_t>(by_grain, gdn_cpu_pool_threads(pool)));
  if (parts <= 1) {
    [[maybe_unused]] const FlushSubnormals flush;
    body(context, 0, count, 0);
    return;
  }
  pool->Run(count, parts, body, context);
}

}  // namespace gdn::cpu
