/*! \file types.h
 *  \brief Types shared by every op: status codes, element types, execution context.
 *
 *  The op headers in this folder are plain C; `gdn_kernels.h` includes them all and is the C ABI.
 *  Under C++ each op also names its back ends (`gdn::ref`, `gdn::cpu`, ...), which take the same
 *  argument struct, so that a caller who knows the device skips the dispatch.
 *
 *  Contract common to all ops
 *  - Pointers live in the memory of the executing device (host memory for REF and CPU). The args
 *    structs and exec are read during the call and may be reused once it returns.
 *  - Strides count elements, not bytes, and are 64-bit; so is every offset formed from them.
 *  - No op allocates, synchronises or queries the device. An op that needs scratch memory has a
 *    `*_workspace` function that returns its size for the given arguments; the caller owns it.
 *  - Arguments are checked once, before any output is written. A failed check returns a status
 *    other than GDN_OK, leaves all outputs untouched, and stores a sentence for gdn_last_error().
 *  - Results are bitwise reproducible, and a row's result does not depend on the rows around it.
 */
#ifndef GDN_KERNELS_TYPES_H_
#define GDN_KERNELS_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/*! \brief Result of every op. */
typedef enum gdn_status {
  GDN_OK = 0,
  GDN_INVALID_ARGUMENT =
      1, /*!< A pointer, extent, stride or index breaks the documented contract. */
  GDN_UNSUPPORTED_SHAPE = 2, /*!< Legal, but no kernel of this back end covers the extents. */
  GDN_UNSUPPORTED_TYPE = 3,  /*!< Legal, but no kernel of this back end covers the element type. */
  GDN_WORKSPACE_TOO_SMALL = 4, /*!< exec.workspace is smaller than the size query's answer. */
  GDN_BACKEND_UNAVAILABLE = 5, /*!< The back end is not compiled in, does not have the op, or its
                                    device is absent. */
  GDN_DEVICE_ERROR = 6,        /*!< The device runtime or a library below reported an error. */
} gdn_status;

/*! \brief Static English name of a status, e.g. "GDN_INVALID_ARGUMENT". Never NULL. */
const char* gdn_status_string(gdn_status status);

/*! \brief What the last failing call on this thread objected to: argument, expectation, value.
 *  Empty if no call on this thread has failed. Valid until the next gdn_* call on this thread. */
const char* gdn_last_error(void);

/*! \brief Element types. bf16 is the upper half of an IEEE-754 binary32. */
typedef enum gdn_dtype { GDN_F32 = 0, GDN_BF16 = 1, GDN_F16 = 2 } gdn_dtype;

/*! \brief Which implementation runs. */
typedef enum gdn_backend {
  GDN_BACKEND_REF = 0, /*!< Plain loops in FP64: the oracle. Slow by intent. */
  GDN_BACKEND_CPU = 1, /*!< Highway and oneDNN. */
  GDN_BACKEND_CUDA =
      2, /*!< NVIDIA GPUs: asynchronous on exec.stream, capturable in a CUDA graph. */
} gdn_backend;

/*! \brief Worker threads of the CPU back end; see cpu_pool.h. */
typedef struct gdn_cpu_pool gdn_cpu_pool;

/*! \brief Where and with what an op runs. Passed by pointer, read only. */
typedef struct gdn_exec {
  gdn_backend backend;
  gdn_cpu_pool* pool; /*!< CPU: worker threads, or NULL to run on the calling thread alone. */
  void*
      workspace; /*!< Scratch of workspace_bytes bytes, 64-byte aligned; NULL if none is needed. */
  size_t workspace_bytes;
  void* stream; /*!< CUDA: the cudaStream_t to launch on, NULL for the default stream. */
} gdn_exec;

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* GDN_KERNELS_TYPES_H_ */
