// The head and the greedy sampler, one after the other.
#include "gdn/kernels/linear_argmax.h"

#include <vector>

#include "gdn/kernels/linear.h"
#include "gdn/kernels/sampling.h"
#include "kernels/common/convert.h"
#include "kernels/common/linear_plan.h"
#include "kernels/common/validate.h"

namespace gdn::ref {

gdn_status LinearArgmax(const gdn_exec& exec, const gdn_linear_argmax_args& args) {
  gdn_linear_plan plan;
  plan.shape.n = args.n;
  plan.shape.k = args.k;
  plan.shape.weight_dtype = args.weight_dtype;
  plan.shape.y_dtype = GDN_F32;
  // A row at a time: the logits of all rows may be more than the host has.
  plan.shape.max_rows = 1;
  std::vector<float> logits(static_cast<size_t>(args.n));
  gdn_linear_args product{};
  product.plan = &plan;
  product.rows = 1;
  product.x_dtype = args.x_dtype;
  product.x_row_stride = args.x_row_stride;
  product.norm_weight = args.norm_weight;
  product.norm_eps = args.norm_eps;
  product.weight = args.weight;
  product.y = logits.data();
  product.y_row_stride = args.n;

  gdn_sampling_params greedy{};
  greedy.top_p = 1.0f;
  greedy.repetition_penalty = 1.0f;
  gdn_sampling_args sample{};
  sample.rows = 1;
  sample.vocab = args.n;
  sample.logits = logits.data();
  sample.logits_row_stride = args.n;
  sample.params = &greedy;
  std::vector<char> workspace(SampleWorkspace(exec, sample));
  gdn_exec with_workspace = exec;
  with_workspace.workspace = workspace.data();
  with_workspace.workspace_bytes = workspace.size();
  for (int64_t row = 0; row < args.rows; ++row) {
    product.x =
        static_cast<const char*>(args.x) + row * args.x_row_stride * kernels::SizeOf(args.x_dtype);
    sample.position = args.position + row;
    sample.token = args.token + row;
    sample.logprob = args.logprob == nullptr ? nullptr : args.logprob + row;
    GDN_RETURN_IF_ERROR(Linear(exec, product));
    GDN_RETURN_IF_ERROR(Sample(with_workspace, sample));
  }
  return GDN_OK;
}

}  // namespace gdn::ref
