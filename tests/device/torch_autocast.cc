// torch.autocast("tide"): PyTorch's own lists of what runs in lower precision and what in full.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace ebbtide::device {
namespace {

using namespace at;  // PyTorch's lists name its types so

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define TIDE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TIDE_FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TIDE_FULL_OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TIDE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TIDE_LOWER)
  AT_FORALL_FP32(TIDE_FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(TIDE_FULL_OPTIONAL)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TIDE_PROMOTE)
}

}  // namespace
}  // namespace ebbtide::device
