// Copies between host and device, within a device, and between devices, as PyTorch's accelerators do them: bytes that
// lie alike on both sides go through Device::copy, all others by way of contiguous temporaries and kernels.
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "torch_alias.h"

namespace ebbtide::device {
namespace {

Stream stream_of(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

bool lie_alike(const at::Tensor& src, const at::Tensor& dst) {
  return src.dtype() == dst.dtype() && src.is_conj() == dst.is_conj() && src.is_neg() == dst.is_neg() &&
         src.is_non_overlapping_and_dense() &&
         (src.strides() == dst.strides() || (src.is_contiguous() && dst.is_contiguous()));
}

void copy_by_kernel(const at::Tensor& src, const at::Tensor& dst) {
  const c10::DeviceGuard guard(dst.device());
  CpuAliases aliases;
  const at::Tensor from = aliases.alias(src, false);
  const at::Tensor to = aliases.alias(dst, true);
  the_device().kernel("aten::copy_", stream_of(dst), aliases.accesses(), [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
}

// On the source's stream, with the destination's stream before and after it.
void copy_across(const at::Tensor& src, const at::Tensor& dst) {
  Device& device = the_device();
  const Stream from = stream_of(src);
  const Stream to = stream_of(dst);
  const EventId event = device.new_event();
  device.record(event, to);
  device.wait(from, event);
  device.copy(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(), from);
  device.record(event, from);
  device.wait(to, event);
  device.destroy_event(event);
}

void copy_alike(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  Device& device = the_device();
  const bool from_host = src.is_cpu();
  if (!from_host && !dst.is_cpu()) {
    if (src.device() != dst.device()) return copy_across(src, dst);
    return device.copy(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(), stream_of(dst));
  }
  const Stream stream = stream_of(from_host ? dst : src);
  void* const host = (from_host ? src : dst).data_ptr();
  device.copy(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(), stream);
  if (!non_blocking) {
    device.synchronize(stream);
  } else if (device.is_pinned(host)) {
    // As PyTorch's pinned memory does: a dropped tensor waits for its copies.
    device.used_on(host, stream);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0 || self.is_same(dst)) return dst;
  const at::Tensor src = self.expand(dst.sizes());
  if (lie_alike(src, dst)) {
    copy_alike(src, dst, non_blocking);
  } else if (src.device() == dst.device()) {
    copy_by_kernel(src, dst);
  } else {
    const at::Tensor alike = src.resolve_conj().resolve_neg().to(dst.scalar_type()).contiguous();
    const bool direct = dst.is_contiguous() && !dst.is_conj() && !dst.is_neg();
    const at::Tensor landing =
        direct ? dst : at::empty_like(alike, dst.options().memory_format(c10::MemoryFormat::Contiguous));
    copy_alike(alike, landing, non_blocking);
    if (!direct) at::Tensor(dst).copy_(landing);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::Tensor(dst).resize_(self.sizes());
  return copy_from(self, dst, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// The kernels above know both bits; resolving them first would end in this very copy again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace ebbtide::device
