// The linear op on a GPU: against REF over shapes and rows, its bits, and from a graph.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_test_util.h"
#include "kernels/linear_op_test_util.h"

namespace gdn::kernels {
namespace {

using LinearCuda = CudaTest;

// A call on the device, with a plan, a workspace of exactly the size asked for, and a guard behind
// y, which is poisoned like everything that must not be written.
class OnDevice {
 public:
  explicit OnDevice(LinearCall& call, int64_t max_rows = 0)
      : x_(call.x), weight_(call.weight), norm_weight_(call.norm_weight), y_(call.y) {
    gdn_linear_shape shape = call.shape.Shape();
    if (max_rows > 0) shape.max_rows = max_rows;
    plan_ = MakePlan(GDN_BACKEND_CUDA, shape);
    args_ = call.Args(plan_.get());
    args_.x = x_.get();
    args_.weight = weight_.get();
    if (args_.norm_weight != nullptr) args_.norm_weight = norm_weight_.get<float>();
    args_.y = y_.get();
    const gdn_exec exec = stream_.Exec();
    size_t bytes = 0;
    EXPECT_EQ(gdn_linear_workspace(&exec, &args_, &bytes), GDN_OK) << gdn_last_error();
    workspace_ = std::make_unique<DeviceBuffer>(std::vector<uint8_t>(bytes, 0xff));
  }

  gdn_status Enqueue() const {
    const gdn_exec exec = Exec();
    return gdn_linear(&exec, &args_);
  }
  void Run(LinearCall& call) const {
    ASSERT_EQ(Enqueue(), GDN_OK) << gdn_last_error();
    stream_.Synchronize();
    y_.Download(call.y.data());
  }
  gdn_exec Exec() const {
    gdn_exec exec = stream_.Exec();
    exec.workspace = workspace_->bytes() == 0 ? nullptr : workspace_->get();
    exec.workspace_bytes = workspace_->bytes();
    return exec;
  }
  gdn_linear_args& args() { return args_; }
  const Stream& stream() const { return stream_; }
  const DeviceBuffer& y() const { return y_; }

 private:
  Stream stream_;
  DeviceBuffer x_;
  DeviceBuffer weight_;
  DeviceBuffer norm_weight_;
  DeviceBuffer y_;
  LinearPlan plan_;
  gdn_linear_args args_ = {};
  std::unique_ptr<DeviceBuffer> workspace_;
};

double TensorError(const Tensor& got, const Tensor& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) error.Add(got.Get(i), expected.Get(i));
  return error.value();
}

// A norm rounds to the weight's type a value that differs from REF's in its last FP32 bits: now and
// then an element of n falls to the other side.
double Bound(const LinearCase& c) {
  if (c.y_dtype != GDN_F32) return c.dtype == GDN_BF16 ? 3e-3 : 5e-4;
  if (c.norm) return c.dtype == GDN_BF16 ? 1e-3 : 1.3e-4;
  return 1e-5;
}

void ExpectMatchesRef(const LinearCase& c) {
  SCOPED_TRACE(c.Name());
  LinearCall ref(c);
  LinearCall got = ref;
  const LinearCall before = ref;
  RunRef(ref);
  OnDevice(got).Run(got);
  EXPECT_LE(LinearError(got, ref), Bound(c));
  EXPECT_EQ(GapsTouched(got, before.y), 0);
}

// The five products of a model, cut to fewer outputs where REF would take long.
std::vector<LinearCase> ModelCases(int64_t hidden, int64_t values, int64_t mlp) {
  std::vector<LinearCase> cases;
  LinearCase in;
  in.k = hidden;
  in.n = 3 * values + 32;
  in.x_dtype = GDN_F32;
  in.norm = true;
  cases.push_back(in);
  LinearCase out;
  out.k = values;
  out.n = hidden;
  out.y_dtype = GDN_F32;
  out.accumulate = true;
  cases.push_back(out);
  LinearCase gate = in;
  gate.kind = GDN_LINEAR_SILU_MUL;
  gate.n = 2 * mlp;
  cases.push_back(gate);
  LinearCase down = out;
  down.k = mlp;
  cases.push_back(down);
  LinearCase head = in;
  head.n = 999;
  head.y_dtype = GDN_F32;
  cases.push_back(head);
  return cases;
}

TEST_F(LinearCuda, MatchesRefForEveryNumberOfRows) {
  for (const int64_t rows :
       {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 65, 96, 128, 130, 256, 300, 800}) {
    for (LinearCase c : ModelCases(128, 64, 96)) {
      c.rows = rows;
      for (const bool early : {false, true}) {
        c.early_start = early;
        c.dtype = early ? GDN_F16 : GDN_BF16;
        if (c.x_dtype != GDN_F32) c.x_dtype = c.dtype;
        if (c.y_dtype != GDN_F32) c.y_dtype = c.dtype;
        c.batch_invariant = rows % 2 == 1 && !early;
        ExpectMatchesRef(c);
      }
    }
  }
}

// Blocks of 256 rows, several along both sides, and more rows than a pass takes.
TEST_F(LinearCuda, MatchesRefForManyRows) {
  for (const gdn_linear_kind kind : {GDN_LINEAR_PLAIN, GDN_LINEAR_SILU_MUL}) {
    LinearCase c;
    c.kind = kind;
    c.rows = 1300;
    c.n = 400;
    c.k = 520;
    c.batch_invariant = kind == GDN_LINEAR_PLAIN;
    ExpectMatchesRef(c);
    c.rows = 8200;
    c.n = 48;
    c.k = 16;
    c.x_dtype = GDN_F32;
    c.norm = true;
    c.early_start = true;
    ExpectMatchesRef(c);
  }
}

// Every combination of types, norm, gate and sum, with N and strides that no vector divides.
TEST_F(LinearCuda, MatchesRefForEveryCombination) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (const int64_t rows : {3, 13, 40}) {
      for (const int64_t k : {8, 64, 72, 1000}) {
        for (int bits = 0; bits < 32; ++bits) {
          LinearCase c;
          c.dtype = dtype;
          c.rows = rows;
          c.k = k;
          c.n = (bits & 1) != 0 ? 34 : 33;
          c.kind = (bits & 1) != 0 ? GDN_LINEAR_SILU_MUL : GDN_LINEAR_PLAIN;
          c.x_dtype = (bits & 2) != 0 ? GDN_F32 : dtype;
          c.norm = (bits & 4) != 0;
          c.y_dtype = (bits & 8) != 0 ? GDN_F32 : dtype;
          c.accumulate = (bits & 1) == 0 && (bits & 8) != 0;
          c.x_pad = (bits & 16) != 0 ? 24 : 0;
          c.y_pad = (bits & 16) != 0 ? 7 : 0;
          c.seed = static_cast<uint32_t>(bits + 1);
          ExpectMatchesRef(c);
          c.batch_invariant = true;
          c.early_start = true;
          ExpectMatchesRef(c);
        }
      }
    }
  }
}

// The shapes of a 0.8B model, whole: many tiles a block, rings that wrap, all of K = 3584.
TEST_F(LinearCuda, MatchesRefForTheShapesOfAModel) {
  for (const int64_t rows : {1, 5, 16, 48}) {
    for (LinearCase c : ModelCases(1024, 2048, 3584)) {
      if (c.kind == GDN_LINEAR_PLAIN && c.norm && c.y_dtype == GDN_BF16) c.n = 8224;
      c.rows = rows;
      c.early_start = true;
      ExpectMatchesRef(c);
    }
  }
  LinearCase head;  // More groups than any ring has slots.
  head.rows = 2;
  head.n = 40001;
  head.k = 256;
  head.x_dtype = head.y_dtype = GDN_F32;
  head.norm = true;
  ExpectMatchesRef(head);
  LinearCase large;  // A large hidden size: the norm reads x twice; a row of n fills the memory.
  large.n = 70;
  large.norm = true;
  for (const int64_t k : {5120, 12288, 32768}) {
    for (const int64_t rows : {1, 7, 16}) {
      large.k = k;
      large.rows = rows;
      ExpectMatchesRef(large);
    }
  }
}

TEST_F(LinearCuda, PassesOfALongPrefillMeet) {
  for (LinearCase c : ModelCases(64, 64, 64)) {
    c.rows = 2600;
    for (const bool invariant : {false, true}) {
      c.batch_invariant = invariant;
      ExpectMatchesRef(c);
    }
  }
}

// The two parts of a norm, each against REF: what the first leaves, and what the second makes of
// it.
TEST_F(LinearCuda, SplitNormsMatchRef) {
  for (const int64_t rows : {9, 16, 20, 40, 64, 65, 100, 128, 129, 190, 200, 256}) {
    // More rows take these kernels where they fill the device.
    const bool many = rows > 128;
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{128, 64}, {1024, 3592}, {200, 264}, {2304, 64}}) {
      if (many && n != 1024) continue;
      LinearCase out;
      out.rows = rows;
      out.n = n;
      out.k = k;
      out.dtype = rows % 2 == 0 ? GDN_BF16 : GDN_F16;
      out.x_dtype = out.dtype;
      out.y_dtype = GDN_F32;
      out.accumulate = true;
      out.early_start = rows % 3 == 0;
      SCOPED_TRACE(out.Name());
      LinearCall expected(out);
      LinearCall got = expected;
      SplitNorm split(out);
      SplitNorm made = split;
      RunRef(expected, split.First());
      {
        OnDevice device(got);
        ASSERT_NE(gdn_linear_splits_norm(device.args().plan, rows), 0);
        const DeviceBuffer weight(made.weight);
        const DeviceBuffer after_n(made.n);
        const DeviceBuffer squares(made.squares);
        device.args().after_norm = weight.get<float>();
        device.args().after_n = after_n.get();
        device.args().after_squares = squares.get<float>();
        device.Run(got);
        after_n.Download(made.n.data());
        squares.Download(made.squares.data());
      }
      EXPECT_LE(LinearError(got, expected), 1e-5);
      EXPECT_LE(TensorError(made.n, split.n), 1e-3);
      EXPECT_LE(TensorError(made.squares, split.squares), 1e-5);

      for (const gdn_linear_kind kind : {GDN_LINEAR_PLAIN, GDN_LINEAR_SILU_MUL}) {
        LinearCase in;
        in.kind = kind;
        in.rows = rows;
        in.n = n == 2304 ? 2304 : 304;  // Divided among blocks along K, and not.
        if (many && kind == GDN_LINEAR_PLAIN) in.n = 4352;
        in.k = n;
        in.dtype = out.dtype;
        in.x_dtype = in.dtype;
        in.y_dtype = in.dtype;
        in.early_start = !out.early_start;
        SCOPED_TRACE(in.Name());
        LinearCall expected_in(in);
        LinearCall got_in = expected_in;
        RunRef(expected_in, made.Second());
        OnDevice device(got_in);
        ASSERT_NE(gdn_linear_splits_norm(device.args().plan, rows), 0);
        const DeviceBuffer x(made.n);
        const DeviceBuffer squares(made.squares);
        made.Second()(device.args());
        device.args().x = x.get();
        device.args().squares = squares.get<float>();
        device.Run(got_in);
        EXPECT_LE(LinearError(got_in, expected_in), Bound(in));
        EXPECT_EQ(GapsTouched(got_in, LinearCall(in).y), 0);
      }
    }
  }
}

TEST_F(LinearCuda, RefusesASplitNormWhereNoKernelTakesIt) {
  for (const int64_t rows : {2, 257}) {
    LinearCase c;
    c.rows = rows;
    c.y_dtype = GDN_F32;
    c.accumulate = true;
    LinearCall call(c);
    OnDevice device(call);
    EXPECT_EQ(gdn_linear_splits_norm(device.args().plan, rows), 0);
    const DeviceBuffer buffer(size_t{1024});
    device.args().squares = buffer.get<float>();
    EXPECT_EQ(device.Enqueue(), GDN_UNSUPPORTED_SHAPE);
  }
}

TEST_F(LinearCuda, NoRowsLaunchNothing) {
  LinearCase c;
  c.rows = 2;
  LinearCall call(c);
  const Tensor before = call.y;
  OnDevice device(call);
  device.args().rows = 0;
  ASSERT_EQ(device.Enqueue(), GDN_OK) << gdn_last_error();
  device.stream().Synchronize();
  device.y().Download(call.y.data());
  EXPECT_EQ(call.y.bytes(), before.bytes());
}

TEST_F(LinearCuda, RepeatsGiveTheSameBits) {
  for (const int64_t rows : {1, 7, 16, 40, 100, 160, 200, 256}) {
    for (LinearCase c : ModelCases(1024, 512, 3584)) {
      if (c.accumulate) c.accumulate = false;  // So that y is the same each time.
      c.rows = rows;
      c.batch_invariant = rows == 200;
      c.early_start = true;
      SCOPED_TRACE(c.Name());
      LinearCall call(c);
      const OnDevice device(call);
      device.Run(call);
      const std::vector<uint8_t> first = call.y.bytes();
      for (int i = 0; i < 100; ++i) {
        device.Run(call);
        ASSERT_TRUE(call.y.bytes() == first) << "repeat " << i;
      }
    }
  }
}

// A row alone, and at the end of and within larger batches.
TEST_F(LinearCuda, BatchInvariantRowsKeepTheirBits) {
  constexpr int64_t kMaxRows = 256;
  for (LinearCase c : ModelCases(1024, 1536, 1792)) {
    c.rows = kMaxRows;
    c.batch_invariant = true;
    LinearCall whole(c);
    const LinearCall before = whole;
    OnDevice(whole, kMaxRows).Run(whole);
    for (const int64_t rows : {1, 2, 3, 8, 17, 64, 65, 255}) {
      for (const int64_t first : {int64_t{0}, int64_t{1}, kMaxRows - rows}) {
        SCOPED_TRACE(c.Name() + ": rows " + std::to_string(first) + " to " +
                     std::to_string(first + rows));
        LinearCall part = before;
        OnDevice device(part, kMaxRows);
        device.args().rows = rows;
        device.args().x =
            static_cast<const char*>(device.args().x) + first * c.x_stride() * SizeOf(c.x_dtype);
        device.args().y =
            static_cast<char*>(device.args().y) + first * c.y_stride() * SizeOf(c.y_dtype);
        device.Run(part);
        const int64_t begin = first * c.y_stride();
        const int64_t end = (first + rows) * c.y_stride();
        ASSERT_TRUE(part.y.Slice(begin, end) == whole.y.Slice(begin, end));
        ASSERT_TRUE(part.y.Slice(0, begin) == before.y.Slice(0, begin));
        ASSERT_TRUE(part.y.Slice(end, whole.y.size()) == before.y.Slice(end, whole.y.size()));
      }
    }
  }
}

// A chain in one stream, with and without an early start: norm and product, gate, and the sum into
// the input of the next round; the residual must be the same whatever overlapped.
class Chain {
 public:
  Chain(int64_t rows, bool invariant, bool early)
      : rows_(rows), early_(early), cases_(ModelCases(kHidden, kMlp, kMlp)) {
    cases_.pop_back();             // The head,
    cases_.erase(cases_.begin());  // and the products of the mixer,
    cases_.erase(cases_.begin());  // do not take part.
    for (LinearCase& c : cases_) {
      c.rows = rows;
      c.batch_invariant = invariant;
      c.y_pad = 0;
      c.x_pad = 0;
    }
    for (int i = 0; i < kLayers; ++i) {
      for (LinearCase& c : cases_) {
        c.seed = static_cast<uint32_t>(7 + i);
        const LinearCall call(c);
        weights_.push_back(std::make_unique<DeviceBuffer>(call.weight));
        norms_.push_back(std::make_unique<DeviceBuffer>(call.norm_weight));
      }
    }
    for (const LinearCase& c : cases_) plans_.push_back(MakePlan(GDN_BACKEND_CUDA, c));
    h_ = std::make_unique<DeviceBuffer>(static_cast<size_t>(rows * kHidden) * 4);
    m_ = std::make_unique<DeviceBuffer>(static_cast<size_t>(rows * kMlp) * 2);
    size_t bytes = 0;
    for (int i = 0; i < 2; ++i) {
      const gdn_exec exec = stream_.Exec();
      const gdn_linear_args args = Args(0, i);
      size_t needed = 0;
      EXPECT_EQ(gdn_linear_workspace(&exec, &args, &needed), GDN_OK);
      bytes = std::max(bytes, needed);
    }
    workspace_ = std::make_unique<DeviceBuffer>(bytes);
  }

  void Reset() {
    LinearCase c = cases_[0];
    c.rows = rows_;
    const LinearCall call(c);
    h_->Upload(call.x.data());
  }
  void Enqueue() const {
    gdn_exec exec = stream_.Exec();
    exec.workspace = workspace_->get();
    exec.workspace_bytes = workspace_->bytes();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int i = 0; i < 2; ++i) {
        const gdn_linear_args args = Args(layer, i);
        ASSERT_EQ(gdn_linear(&exec, &args), GDN_OK) << gdn_last_error();
      }
    }
  }
  std::vector<uint8_t> Result() const {
    stream_.Synchronize();
    return h_->Bytes();
  }
  const Stream& stream() const { return stream_; }

 private:
  static constexpr int64_t kHidden = 512;
  static constexpr int64_t kMlp = 1280;
  static constexpr int kLayers = 12;

  gdn_linear_args Args(int layer, int i) const {
    gdn_linear_args args{};
    args.plan = plans_[i].get();
    args.rows = rows_;
    args.x = i == 0 ? h_->get() : m_->get();
    args.x_dtype = i == 0 ? GDN_F32 : GDN_BF16;
    args.x_row_stride = i == 0 ? kHidden : kMlp;
    args.norm_weight = i == 0 ? norms_[layer * 2]->get<float>() : nullptr;
    args.norm_eps = 1e-6f;
    args.weight = weights_[layer * 2 + i]->get();
    args.y = i == 0 ? m_->get() : h_->get();
    args.y_row_stride = i == 0 ? kMlp : kHidden;
    args.early_start = early_;
    return args;
  }

  int64_t rows_;
  bool early_;
  std::vector<LinearCase> cases_;
  std::vector<LinearPlan> plans_;
  std::vector<std::unique_ptr<DeviceBuffer>> weights_;
  std::vector<std::unique_ptr<DeviceBuffer>> norms_;
  std::unique_ptr<DeviceBuffer> h_;
  std::unique_ptr<DeviceBuffer> m_;
  std::unique_ptr<DeviceBuffer> workspace_;
  Stream stream_;
};

TEST_F(LinearCuda, EarlyChainsAndGraphsGiveTheSameBits) {
  for (const int64_t rows : {1, 6, 16, 33, 40, 160, 256}) {
    SCOPED_TRACE("rows " + std::to_string(rows));
    const bool invariant = rows == 33;  // More than 16: the tile product, or cuBLASLt.
    Chain plain(rows, invariant, false);
    plain.Reset();
    plain.Enqueue();
    const std::vector<uint8_t> expected = plain.Result();
    Chain early(rows, invariant, true);
    for (int repeat = 0; repeat < 20; ++repeat) {
      early.Reset();
      early.Enqueue();
      ASSERT_TRUE(early.Result() == expected) << "repeat " << repeat;
    }
    const CapturedGraph graph(early.stream(), [&] { early.Enqueue(); });
    for (int repeat = 0; repeat < 20; ++repeat) {
      early.Reset();
      graph.Launch();
      ASSERT_TRUE(early.Result() == expected) << "graph, repeat " << repeat;
    }
  }
}

TEST_F(LinearCuda, RefusesWhatItCannotRead) {
  LinearCase c;
  c.rows = 40;
  c.k = 64;
  c.norm = true;
  LinearCall call(c);
  OnDevice device(call);
  const auto refused = [&](auto&& change, gdn_status status, const std::string& sentence) {
    gdn_linear_args args = device.args();
    gdn_exec exec = device.Exec();
    change(args, exec);
    EXPECT_EQ(gdn_linear(&exec, &args), status);
    EXPECT_NE(std::string(gdn_last_error()).find(sentence), std::string::npos) << gdn_last_error();
  };
  const auto shift = [](const void* pointer) { return static_cast<const char*>(pointer) + 8; };
  refused([&](auto& a, auto&) { a.x = shift(a.x); }, GDN_INVALID_ARGUMENT, "rows of x must be");
  refused([&](auto& a, auto&) { a.x_row_stride += 1; }, GDN_INVALID_ARGUMENT, "rows of x must be");
  refused([&](auto& a, auto&) { a.weight = shift(a.weight); }, GDN_INVALID_ARGUMENT,
          "weight must be 16-byte");
  refused([&](auto& a, auto&) { a.norm_weight += 1; }, GDN_INVALID_ARGUMENT, "norm_weight must be");
  refused([&](auto&, auto& e) { e.workspace_bytes -= 1; }, GDN_WORKSPACE_TOO_SMALL,
          "linear_workspace");
  device.stream().Synchronize();
  EXPECT_TRUE(device.y().Bytes() == call.y.bytes());
}

}  // namespace
}  // namespace gdn::kernels
