#include "gdn/kernels/matmul.h"

#include <memory>

#include "kernels/common/packed_weight.h"
#include "kernels/cpu/matmul_weight.h"

namespace gdn::cpu {

std::unique_ptr<gdn_packed_weight> PackWeight(const kernels::PackRequest& request) {
  if (request.math == GDN_MATH_BF16 && OnednnHasNativeBf16()) {
    // A product that oneDNN lacks falls to the panels; the weight's kind says which it was.
    if (auto packed = PackOnednn(request, OnednnElement::kBf16)) return packed;
  }
  return PackPanels(request);
}

gdn_status Matmul(const gdn_exec& exec, const gdn_matmul_args& args) {
  return static_cast<const CpuWeight*>(args.weight)->Run(exec, args);
}

size_t MatmulWorkspace(const gdn_exec&, const gdn_matmul_args& args) {
  return static_cast<const CpuWeight*>(args.weight)->Workspace(args.rows);
}

}  // namespace gdn::cpu
