// The functions of cuBLASLt that this library calls, defined here and passed on to the shared
// library, which is loaded at the first call.
//
// Not linked, for two reasons: a server on the CPU needs no cuBLASLt on its machine, and the
// library's 94 KB of thread-local storage would count against the stack of every thread of the
// process, more than some libraries give their threads.
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstddef>

namespace {

void* Open() {
  for (const char* name : {"libcublasLt.so.13", GDN_CUBLASLT_PATH}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL); library != nullptr) return library;
  }
  return nullptr;
}

template <typename Function>
Function* Find(const char* name) {
  static void* const library = Open();
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

}  // namespace

// Passes a call on; CUBLAS_STATUS_NOT_INITIALIZED without the library.
#define GDN_PASS_ON(function, ...)                                \
  static auto* const found = Find<decltype(function)>(#function); \
  return found == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : found(__VA_ARGS__)

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { GDN_PASS_ON(cublasLtCreate, handle); }

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { GDN_PASS_ON(cublasLtDestroy, handle); }

const char* cublasLtGetStatusString(cublasStatus_t status) {
  static auto* const found = Find<decltype(cublasLtGetStatusString)>("cublasLtGetStatusString");
  return found == nullptr ? "libcublasLt.so.13 was not found; install CUDA 13's libcublas, or name "
                            "its folder in "
                            "LD_LIBRARY_PATH"
                          : found(status);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  GDN_PASS_ON(cublasLtMatmul, handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d,
              d_layout, algo, workspace, workspace_bytes, stream);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  GDN_PASS_ON(cublasLtMatmulAlgoGetHeuristic, handle, desc, a, b, c, d, preference, requested,
              results, count);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  GDN_PASS_ON(cublasLtMatmulDescCreate, desc, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  GDN_PASS_ON(cublasLtMatmulDescDestroy, desc);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  GDN_PASS_ON(cublasLtMatmulDescSetAttribute, desc, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  GDN_PASS_ON(cublasLtMatmulPreferenceCreate, preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  GDN_PASS_ON(cublasLtMatmulPreferenceDestroy, preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  GDN_PASS_ON(cublasLtMatmulPreferenceSetAttribute, preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t bytes,
                                                 cudaDataType type, uint64_t rows, uint64_t columns,
                                                 int64_t leading_dimension) {
  GDN_PASS_ON(cublasLtMatrixLayoutInit_internal, layout, bytes, type, rows, columns,
              leading_dimension);
}

}  // extern "C"
