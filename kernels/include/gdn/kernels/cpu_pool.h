/*! \file cpu_pool.h
 *  \brief The worker threads that the CPU back end's ops share.
 *
 *  A decode step is some fifty short parallel regions, so workers spin briefly between regions
 *  before they sleep. One region runs at a time: the pool is confined to one calling thread.
 */
#ifndef GDN_KERNELS_CPU_POOL_H_
#define GDN_KERNELS_CPU_POOL_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief Creates a pool in which `num_threads` threads work, the caller's included (1: no extra
 *  thread). \param[in] spin_us  Microseconds a worker spins before it sleeps (0: sleep at once).
 *  \return NULL if num_threads < 1 or a thread cannot be started; see gdn_last_error(). */
gdn_cpu_pool* gdn_cpu_pool_create(int32_t num_threads, int32_t spin_us);

/*! \brief Joins the workers and frees the pool. NULL is ignored. No region may be running. */
void gdn_cpu_pool_destroy(gdn_cpu_pool* pool);

/*! \brief Number of threads that work in a region; 1 for NULL. */
int32_t gdn_cpu_pool_threads(const gdn_cpu_pool* pool);

#ifdef __cplusplus
} /* extern "C" */

#include <memory>
#include <type_traits>

namespace gdn::cpu {

/*! \brief Runs `body(begin, end, worker)` over a static partition of [0, count), blocks until all
 *  parts are done. Worker indices are dense in [0, threads). The partition depends on `count`, the
 *  grain and the number of threads only. Ranges smaller than `grain` per worker use fewer workers;
 *  a NULL pool or a single part runs inline. `body` must not throw and must not start a region. */
using RegionBody = void (*)(void* context, int64_t begin, int64_t end, int32_t worker);
void ParallelFor(gdn_cpu_pool* pool, int64_t count, int64_t grain, RegionBody body, void* context);

template <typename Body>
void ParallelFor(gdn_cpu_pool* pool, int64_t count, int64_t grain, Body&& body) {
  using Fn = std::remove_reference_t<Body>;
  ParallelFor(
      pool, count, grain,
      [](void* context, int64_t begin, int64_t end, int32_t worker) {
        (*static_cast<Fn*>(context))(begin, end, worker);
      },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace gdn::cpu
#endif
#endif /* GDN_KERNELS_CPU_POOL_H_ */
