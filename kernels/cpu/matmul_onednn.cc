// Products by oneDNN, for processors that multiply BF16 natively. The pool's threads each run
// single-threaded primitives on a slice of the columns; oneDNN starts no thread of its own.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "gdn/kernels/cpu_pool.h"
#include "kernels/common/check.h"
#include "kernels/common/convert.h"
#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"

// From libgomp, oneDNN's thread runtime. <omp.h> would need -fopenmp with some compilers.
extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads(void);

namespace gdn::cpu {
namespace {

using dnnl::memory;

constexpr size_t kAlignment = 64;
// Columns of a slice are a multiple of this, so that oneDNN's column blocks stay whole.
constexpr int64_t kSliceColumns = 64;
// Rows per primitive; a product is cut into these, the rest padded to the next. Steps of at most
// 1.5 bound the padding.
constexpr std::array<int64_t, 15> kRowBuckets = {1,  2,  4,  6,  8,   12,  16, 24,
                                                 32, 48, 64, 96, 128, 192, 256};

// oneDNN sizes its work by the calling thread's OpenMP setting, at creation and at execution.
class SingleThreadScope {
 public:
  SingleThreadScope() : saved_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreadScope() { omp_set_num_threads(saved_); }
  SingleThreadScope(const SingleThreadScope&) = delete;
  SingleThreadScope& operator=(const SingleThreadScope&) = delete;

 private:
  int saved_;
};

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// One primitive with the memory objects it runs on; their data pointers change per call.
struct Product {
  dnnl::matmul primitive;
  memory source;
  memory result;
  memory scratchpad;
  std::unordered_map<int, memory> args;
  size_t scratchpad_bytes = 0;
};

// Columns [begin, begin + count) of the weight.
struct Slice {
  int64_t begin = 0;
  int64_t count = 0;
  memory weights;
  std::vector<Product> products;  // one per bucket
  // A weight may be shared by engines, the memory objects above may not. Never contended within
  // one.
  std::mutex mutex;
};

struct OnednnWeight final : CpuWeight {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  memory::data_type type = memory::data_type::bf16;
  size_t element_bytes = 2;
  std::vector<int64_t> buckets;
  mutable std::vector<std::unique_ptr<Slice>> slices;
  int64_t max_slice_columns = 0;
  size_t max_scratchpad_bytes = 0;

  size_t BucketOf(int64_t rows) const {
    for (size_t i = 0; i < buckets.size(); ++i) {
      if (buckets[i] >= rows) return i;
    }
    return buckets.size() - 1;
  }

  size_t SourceBytes(int64_t bucket) const {
    return Aligned(static_cast<size_t>(bucket * k) * element_bytes);
  }
  size_t SliceBytes(int64_t bucket) const {
    return Aligned(static_cast<size_t>(bucket * max_slice_columns) * sizeof(float)) +
           Aligned(max_scratchpad_bytes);
  }

  size_t Workspace(int64_t rows) const override {
    const int64_t bucket = buckets[BucketOf(rows)];
    return SourceBytes(bucket) + slices.size() * SliceBytes(bucket);
  }

  void AddSlice(int64_t begin, int64_t count, const std::vector<std::byte>& rows);
  Product MakeProduct(int64_t bucket, int64_t columns, const memory::desc& weights_desc,
                      memory::desc* chosen) const;
  void ConvertRow(const gdn_matmul_args& args, int64_t row, std::byte* out) const;
  void RunSlice(const gdn_matmul_args& args, int64_t first_row, int64_t rows, size_t bucket,
                Slice& slice, std::byte* source, std::byte* scratch) const;
  gdn_status Run(const gdn_exec& exec, const gdn_matmul_args& args) const override;
};

Product OnednnWeight::MakeProduct(int64_t bucket, int64_t columns, const memory::desc& weights_desc,
                                  memory::desc* chosen) const {
  const memory::desc source_desc({bucket, k}, type, memory::format_tag::ab);
  const memory::desc result_desc({bucket, columns}, memory::data_type::f32, memory::format_tag::ab);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(source_desc, weights_desc, result_desc),
                                        attr, engine);
  Product product;
  product.primitive = dnnl::matmul(pd);
  product.source = memory(source_desc, engine, nullptr);
  product.result = memory(result_desc, engine, nullptr);
  product.scratchpad = memory(pd.scratchpad_desc(), engine, nullptr);
  product.scratchpad_bytes = pd.scratchpad_desc().get_size();
  *chosen = pd.weights_desc();
  return product;
}

void OnednnWeight::AddSlice(int64_t begin, int64_t count, const std::vector<std::byte>& rows) {
  auto slice = std::make_unique<Slice>();
  slice->begin = begin;
  slice->count = count;
  // The largest bucket chooses the layout that all of them read.
  memory::desc desc;
  MakeProduct(buckets.back(), count, memory::desc({k, count}, type, memory::format_tag::any),
              &desc);
  slice->weights = memory(desc, engine);
  memory plain(
      memory::desc({k, count}, type, memory::format_tag::ba), engine,
      const_cast<std::byte*>(rows.data()) + static_cast<size_t>(begin * k) * element_bytes);
  dnnl::stream stream(engine);
  dnnl::reorder(plain, slice->weights).execute(stream, plain, slice->weights);
  stream.wait();
  bytes += desc.get_size();
  for (const int64_t bucket : buckets) {
    memory::desc chosen;
    Product product = MakeProduct(bucket, count, desc, &chosen);
    product.args = {{DNNL_ARG_SRC, product.source},
                    {DNNL_ARG_WEIGHTS, slice->weights},
                    {DNNL_ARG_DST, product.result},
                    {DNNL_ARG_SCRATCHPAD, product.scratchpad}};
    max_scratchpad_bytes = std::max(max_scratchpad_bytes, product.scratchpad_bytes);
    slice->products.push_back(std::move(product));
  }
  max_slice_columns = std::max(max_slice_columns, count);
  slices.push_back(std::move(slice));
}

void OnednnWeight::ConvertRow(const gdn_matmul_args& args, int64_t row, std::byte* out) const {
  const float* x = args.x + row * args.x_row_stride;
  if (type == memory::data_type::f32) {
    std::memcpy(out, x, static_cast<size_t>(k) * sizeof(float));
    return;
  }
  auto* half = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < k; ++i) half[i] = kernels::F32ToBf16(x[i]);
}

void OnednnWeight::RunSlice(const gdn_matmul_args& args, int64_t first_row, int64_t rows,
                            size_t bucket, Slice& slice, std::byte* source,
                            std::byte* scratch) const {
  auto* result = reinterpret_cast<float*>(scratch);
  {
    std::lock_guard<std::mutex> lock(slice.mutex);
    Product& product = slice.products[bucket];
    product.source.set_data_handle(source);
    product.result.set_data_handle(result);
    if (product.scratchpad_bytes > 0) {
      product.scratchpad.set_data_handle(
          scratch +
          Aligned(static_cast<size_t>(buckets[bucket] * max_slice_columns) * sizeof(float)));
    }
    dnnl::stream stream(engine);
    product.primitive.execute(stream, product.args);
    stream.wait();
  }
  for (int64_t m = 0; m < rows; ++m) {
    float* y = args.y + (first_row + m) * args.y_row_stride + slice.begin;
    const float* sums = result + m * slice.count;
    if (args.accumulate) {
      for (int64_t i = 0; i < slice.count; ++i) y[i] += sums[i];
    } else {
      std::copy_n(sums, slice.count, y);
    }
  }
}

gdn_status OnednnWeight::Run(const gdn_exec& exec, const gdn_matmul_args& args) const {
  auto* source = static_cast<std::byte*>(exec.workspace);
  std::atomic<bool> failed{false};
  for (int64_t row = 0; row < args.rows;) {
    const size_t bucket = BucketOf(args.rows - row);
    const int64_t padded = buckets[bucket];
    const int64_t rows = std::min(padded, args.rows - row);
    const size_t row_bytes = static_cast<size_t>(k) * element_bytes;
    constexpr int64_t kConvertGrain = 16384;
    ParallelFor(exec.pool, padded, std::max<int64_t>(1, kConvertGrain / k),
                [&](int64_t begin, int64_t end, int32_t) {
                  for (int64_t m = begin; m < end; ++m) {
                    std::byte* out = source + static_cast<size_t>(m) * row_bytes;
                    if (m < rows) {
                      ConvertRow(args, row + m, out);
                    } else {
                      std::memset(out, 0, row_bytes);
                    }
                  }
                });
    ParallelFor(exec.pool, static_cast<int64_t>(slices.size()), 1,
                [&](int64_t begin, int64_t end, int32_t) {
                  try {
                    const SingleThreadScope single_thread;
                    for (int64_t i = begin; i < end; ++i) {
                      const auto index = static_cast<size_t>(i);
                      RunSlice(args, row, rows, bucket, *slices[index], source,
                               source + SourceBytes(padded) + index * SliceBytes(padded));
                    }
                  } catch (const std::exception&) {
                    failed.store(true, std::memory_order_relaxed);
                  }
                });
    row += rows;
  }
  if (failed.load(std::memory_order_relaxed)) {
    return kernels::Fail(GDN_DEVICE_ERROR, "matmul: oneDNN failed in a product of %lld rows",
                         static_cast<long long>(args.rows));
  }
  return GDN_OK;
}

// The stacked rows, dense, in the element type of the product.
std::vector<std::byte> StackRows(const kernels::PackRequest& request, OnednnElement element) {
  const size_t element_bytes = element == OnednnElement::kBf16 ? 2 : 4;
  std::vector<std::byte> rows(static_cast<size_t>(request.n * request.k) * element_bytes);
  kernels::ForEachRow(request, [&](int64_t n, const gdn_weight_rows& block, int64_t row) {
    for (int64_t k = 0; k < request.k; ++k) {
      const float value = kernels::Load(block.data, block.dtype, row * request.k + k);
      const uint16_t half = kernels::F32ToBf16(value);
      if (element == OnednnElement::kBf16) {
        reinterpret_cast<uint16_t*>(rows.data())[n * request.k + k] = half;
      } else {
        reinterpret_cast<float*>(rows.data())[n * request.k + k] =
            request.math == GDN_MATH_BF16 ? kernels::Bf16ToF32(half) : value;
      }
    }
  });
  return rows;
}

}  // namespace

bool OnednnHasNativeBf16() {
  // Bit sets: every instruction set from AVX512_BF16 on holds its bits.
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto wanted = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & wanted) == wanted;
}

std::unique_ptr<CpuWeight> PackOnednn(const kernels::PackRequest& request, OnednnElement element) {
  try {
    const SingleThreadScope single_thread;
    auto packed = std::make_unique<OnednnWeight>();
    packed->backend = GDN_BACKEND_CPU;
    packed->n = request.n;
    packed->k = request.k;
    packed->kind = element == OnednnElement::kBf16 ? "onednn-bf16" : "onednn-f32";
    if (element == OnednnElement::kF32) {
      packed->type = memory::data_type::f32;
      packed->element_bytes = 4;
    }
    if (request.row_block > 0) {
      packed->buckets = {request.row_block};
    } else {
      packed->buckets.assign(kRowBuckets.begin(), kRowBuckets.end());
    }
    const std::vector<std::byte> rows = StackRows(request, element);
    const int64_t column_blocks = (request.n + kSliceColumns - 1) / kSliceColumns;
    const int64_t parts = std::min<int64_t>(request.max_threads, column_blocks);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = column_blocks * part / parts * kSliceColumns;
      const int64_t end = std::min(request.n, column_blocks * (part + 1) / parts * kSliceColumns);
      packed->AddSlice(begin, end - begin, rows);
    }
    return packed;
  } catch (const dnnl::error& error) {
    kernels::Fail(GDN_DEVICE_ERROR, "packed_weight_create: oneDNN has no product %lld x %lld: %s",
                  static_cast<long long>(request.n), static_cast<long long>(request.k),
                  error.what());
    return nullptr;
  }
}

}  // namespace gdn::cpu
