// linear_argmax on a GPU: against REF, ties and damaged rows, its bits, and from a graph.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "gdn/kernels/linear_argmax.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/linear_argmax_test_util.h"

namespace gdn::kernels {
namespace {

using LinearArgmaxCuda = CudaTest;

// A call on the device, its outputs poisoned.
class OnDevice {
 public:
  explicit OnDevice(ArgmaxCall& call)
      : x_(call.linear.x),
        weight_(call.linear.weight),
        norm_weight_(call.linear.norm_weight),
        position_(call.position),
        token_(call.token),
        logprob_(call.logprob),
        args_(call.Args()) {
    args_.x = x_.get();
    args_.weight = weight_.get();
    if (args_.norm_weight != nullptr) args_.norm_weight = norm_weight_.get<float>();
    args_.position = position_.get<int64_t>();
    args_.token = token_.get<int32_t>();
    args_.logprob = logprob_.get<float>();
    const gdn_exec exec = stream_.Exec();
    size_t bytes = 0;
    EXPECT_EQ(gdn_linear_argmax_workspace(&exec, &args_, &bytes), GDN_OK) << gdn_last_error();
    workspace_ = std::make_unique<DeviceBuffer>(std::vector<uint8_t>(bytes, 0xff));
  }
  gdn_exec Exec() const {
    gdn_exec exec = stream_.Exec();
    exec.workspace = workspace_->get();
    exec.workspace_bytes = workspace_->bytes();
    return exec;
  }
  gdn_status Enqueue() const { return EnqueueOn(Exec()); }
  gdn_status EnqueueOn(const gdn_exec& exec) const { return gdn_linear_argmax(&exec, &args_); }
  void Run(ArgmaxCall& call) const {
    ASSERT_EQ(Enqueue(), GDN_OK) << gdn_last_error();
    Fetch(call);
  }
  void Fetch(ArgmaxCall& call) const {
    stream_.Synchronize();
    token_.Download(call.token.data());
    logprob_.Download(call.logprob.data());
  }
  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
  DeviceBuffer x_;
  DeviceBuffer weight_;
  DeviceBuffer norm_weight_;
  DeviceBuffer position_;
  DeviceBuffer token_;
  DeviceBuffer logprob_;
  gdn_linear_argmax_args args_;
  std::unique_ptr<DeviceBuffer> workspace_;
};

void ExpectMatchesRef(const LinearCase& c) {
  SCOPED_TRACE(c.Name());
  ArgmaxCall got(c);
  // Some rows are padding.
  for (size_t row = 2; row < got.position.size(); row += 5) got.position[row] = -1;
  OnDevice(got).Run(got);
  ExpectGreedy(got);
}

TEST_F(LinearArgmaxCuda, MatchesRefForEveryNumberOfRows) {
  for (const int64_t rows : {1, 2, 7, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256}) {
    for (const int64_t n : {1, 63, 64, 65, 257, 999, 20000}) {
      if (n == 20000 && rows != 33 && rows != 65) continue;  // REF takes long.
      LinearCase c;
      c.rows = rows;
      c.n = n;
      c.k = 128;
      c.dtype = rows % 2 == 0 ? GDN_BF16 : GDN_F16;
      c.norm = n % 2 == 1;
      c.x_dtype = c.norm ? GDN_F32 : c.dtype;
      c.early_start = rows % 3 == 0;
      ExpectMatchesRef(c);
    }
  }
}

TEST_F(LinearArgmaxCuda, MatchesRefForEveryK) {
  for (const auto& [rows, k] : {std::pair<int64_t, int64_t>{64, 8},
                                {64, 64},
                                {40, 72},
                                {64, 1000},
                                {64, 1024},
                                {20, 2048},
                                {16, 4096},
                                {3, 4088},
                                {64, 2560},  // From here on n streams.
                                {256, 1024},
                                {100, 72},
                                {2, 5120}}) {
    LinearCase c;
    c.rows = rows;
    c.n = 3001;
    c.k = k;
    c.x_dtype = GDN_F32;
    c.norm = true;
    ExpectMatchesRef(c);
  }
}

// The vocabulary of a model: more tiles than blocks, and a last one that is cut.
TEST_F(LinearArgmaxCuda, MatchesRefForALargeVocabulary) {
  LinearCase c;
  c.n = 151669;
  c.k = 8;
  for (const int64_t rows : {33, 130}) {
    c.rows = rows;
    ExpectMatchesRef(c);
  }
}

TEST_F(LinearArgmaxCuda, TheLowestOfEqualLogitsWins) {
  LinearCase c;
  c.n = 10000;
  c.k = 64;
  for (const int64_t rows : {5, 70}) {
    c.rows = rows;
    for (const auto& [low, high] : {std::pair<int64_t, int64_t>{3, 11},  // One thread's two rows.
                                    {5, 6},
                                    {16, 40},
                                    {100, 9000},
                                    {64, 64 + 132 * 64},
                                    {9998, 9999}}) {
      ArgmaxCall call(c);
      // Far above all others in every row of x: along x itself, summed.
      for (const int64_t at : {low, high}) {
        for (int64_t k = 0; k < c.k; ++k) {
          float sum = 0.0f;
          for (int64_t row = 0; row < c.rows; ++row) {
            sum += call.linear.x.Get(row * c.x_stride() + k);
          }
          call.linear.weight.Set(at * c.k + k, 4.0f * sum);
        }
      }
      OnDevice(call).Run(call);
      ArgmaxCall ref = call;
      RunRef(ref);
      EXPECT_EQ(call.token, ref.token) << low << " and " << high;
      EXPECT_NE(std::count(ref.token.begin(), ref.token.end(), static_cast<int32_t>(low)), 0);
    }
  }
}

TEST_F(LinearArgmaxCuda, DamagedRowsSayNoTokenAndLeaveTheOthersAlone) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const int64_t rows : {9, 90}) {
    LinearCase c;
    c.rows = rows;
    c.n = 700;
    c.k = 64;
    ArgmaxCall clean(c);
    OnDevice(clean).Run(clean);
    for (const float damage : {std::numeric_limits<float>::quiet_NaN(), kInf, -kInf}) {
      ArgmaxCall call(c);
      call.linear.x.Set(4 * c.x_stride() + 7, damage);
      OnDevice(call).Run(call);
      for (int64_t row = 0; row < c.rows; ++row) {
        const auto at = static_cast<size_t>(row);
        if (row == 4) {
          EXPECT_EQ(call.token[at], -1) << damage;
          EXPECT_TRUE(std::isnan(call.logprob[at])) << damage;
        } else {
          EXPECT_EQ(call.token[at], clean.token[at]);
          EXPECT_EQ(call.logprob[at], clean.logprob[at]);
        }
      }
    }
  }
}

TEST_F(LinearArgmaxCuda, RepeatsAndGraphReplaysGiveTheSameBits) {
  for (const int64_t rows : {64, 200}) {
    LinearCase c;
    c.rows = rows;
    c.n = 9001;
    c.k = 256;
    c.x_dtype = GDN_F32;
    c.norm = true;
    c.early_start = true;
    ArgmaxCall first(c);
    OnDevice device(first);
    device.Run(first);
    ExpectGreedy(first);
    const CapturedGraph graph(device.stream(), [&] {
      for (int i = 0; i < 10; ++i) ASSERT_EQ(device.Enqueue(), GDN_OK) << gdn_last_error();
    });
    for (int repeat = 0; repeat < 100; ++repeat) {
      graph.Launch();
      ArgmaxCall again(c);
      device.Fetch(again);
      ASSERT_EQ(again.token, first.token) << repeat;
      ASSERT_EQ(again.logprob, first.logprob) << repeat;
    }
  }
}

// The calls find their parts in different places of the workspace, and some blocks have no tile.
TEST_F(LinearArgmaxCuda, CallsThatShareAWorkspaceDoNotMeet) {
  for (const auto& [large, small] : {std::pair<int64_t, int64_t>{64, 16}, {200, 150}}) {
    LinearCase c;
    c.n = 4000;
    c.k = 256;
    c.x_dtype = GDN_F32;
    c.norm = true;
    c.early_start = true;
    c.rows = large;
    ArgmaxCall first(c);
    OnDevice first_device(first);
    first_device.Run(first);
    c.rows = small;
    ArgmaxCall second(c);
    OnDevice second_device(second);
    second_device.Run(second);
    const gdn_exec exec = first_device.Exec();  // Large enough for both.
    for (int repeat = 0; repeat < 200; ++repeat) {
      for (int i = 0; i < 5; ++i) {
        ASSERT_EQ(second_device.EnqueueOn(exec), GDN_OK) << gdn_last_error();
        ASSERT_EQ(first_device.EnqueueOn(exec), GDN_OK) << gdn_last_error();
      }
      ASSERT_EQ(second_device.EnqueueOn(exec), GDN_OK) << gdn_last_error();
      ArgmaxCall again = first;
      first_device.Fetch(again);
      ASSERT_EQ(again.token, first.token) << large << ", " << repeat;
      ASSERT_EQ(again.logprob, first.logprob) << large << ", " << repeat;
    }
  }
}

// A log-probability is never above 0, and no finite logit is too large.
TEST_F(LinearArgmaxCuda, LogitsOfAnySizeHaveALogProbability) {
  for (const int64_t rows : {16, 100, 200}) {
    for (const float factor : {1.0f, 37.37f, 1e4f, 1e8f, 1e12f}) {
      LinearCase c;
      c.rows = rows;
      c.n = 3001;
      c.k = 64;
      ArgmaxCall call(c);
      for (int64_t i = 0; i < call.linear.weight.size(); ++i) {
        call.linear.weight.Set(i, factor * call.linear.weight.Get(i));
      }
      OnDevice(call).Run(call);
      for (int64_t row = 0; row < rows; ++row) {
        EXPECT_GE(call.token[static_cast<size_t>(row)], 0) << rows << " " << factor;
        EXPECT_LE(call.logprob[static_cast<size_t>(row)], 0.0f) << rows << " " << factor;
      }
    }
  }
}

TEST_F(LinearArgmaxCuda, RefusesWhatDoesNotFit) {
  const Stream stream;
  const gdn_exec exec = stream.Exec();
  for (const auto& [rows, k] : {std::pair<int64_t, int64_t>{257, 64}, {1, 12}}) {
    gdn_linear_argmax_args args{};
    args.rows = rows;
    args.n = 100;
    args.k = k;
    args.x_dtype = GDN_F32;
    args.weight_dtype = GDN_BF16;
    size_t bytes = 0;
    EXPECT_EQ(gdn_linear_argmax_workspace(&exec, &args, &bytes), GDN_UNSUPPORTED_SHAPE)
        << rows << " " << k;
  }
}

}  // namespace
}  // namespace gdn::kernels
