#include "torch_alias.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace ebbtide::device {
namespace {

void copy_layout(const at::Tensor& from, const at::Tensor& to) {
  c10::TensorImpl* impl = to.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  copy_layout(like, tensor);
  tensor._set_conj(like.is_conj());
  tensor._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

}  // namespace

std::optional<Access> extent(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return std::nullopt;
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return Access{tensor.const_data_ptr(), (static_cast<std::uint64_t>(last) + 1) * tensor.itemsize(), write};
}

at::Tensor CpuAliases::alias(const at::Tensor& tensor, bool write) {
  TORCH_CHECK(tensor.layout() == c10::kStrided, "tide has strided tensors only, not ", tensor.layout());
  TORCH_CHECK(index_ < 0 || index_ == tensor.device().index(),
              "Expected all tensors to be on the same device, but found tide:", static_cast<int>(index_), " and ",
              tensor.device());
  index_ = tensor.device().index();
  if (const auto access = extent(tensor, write)) accesses_.push_back(*access);
  for (Pair& pair : pairs_) {
    if (!pair.device.is_same(tensor)) continue;
    pair.write |= write;
    return pair.cpu;
  }
  const c10::Storage& storage = tensor.storage();
  c10::Storage& cpu_storage = cpu_storages_[storage.unsafeGetStorageImpl()];
  if (!cpu_storage) {
    cpu_storage = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                               c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
                               c10::GetCPUAllocator(), /*resizable=*/true);
    device_storages_.emplace(cpu_storage.unsafeGetStorageImpl(), storage);
  }
  at::Tensor cpu = over(cpu_storage, c10::DispatchKey::CPU, tensor);
  pairs_.push_back({tensor, cpu, write});
  return cpu;
}

void CpuAliases::keep(const at::Tensor& tensor) { pairs_.push_back({tensor, tensor, false}); }

void CpuAliases::follow_resized() {
  for (const Pair& pair : pairs_) {
    if (!pair.write) continue;
    const c10::Storage& device = pair.device.storage();
    const c10::Storage& cpu = pair.cpu.storage();
    if (cpu.data() != device.data()) {
      c10::StorageImpl* impl = device.unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(device_allocator().allocate(cpu.nbytes()));
      impl->set_nbytes(cpu.nbytes());
      fills_.push_back({device, cpu});
    }
    copy_layout(pair.cpu, pair.device);
  }
}

at::Tensor CpuAliases::back(const at::Tensor& result) {
  if (!result.defined()) return result;
  for (const Pair& pair : pairs_) {
    if (pair.cpu.is_same(result)) return pair.device;
  }
  TORCH_CHECK(result.layout() == c10::kStrided, "tide has strided tensors only, not ", result.layout());
  const c10::Storage& cpu = result.storage();
  c10::Storage& device = device_storages_[cpu.unsafeGetStorageImpl()];
  if (!device) {
    device = c10::Storage(c10::Storage::use_byte_size_t(), cpu.nbytes(), device_allocator().allocate(cpu.nbytes()),
                          &device_allocator(), /*resizable=*/true);
    fills_.push_back({device, cpu});
  }
  return over(device, c10::DispatchKey::PrivateUse1, result);
}

void CpuAliases::fill_new(const std::string& name, Stream stream) {
  std::vector<Access> writes;
  for (const Fill& fill : fills_) {
    if (fill.cpu.nbytes() != 0) writes.push_back({fill.device.data(), fill.cpu.nbytes(), true});
  }
  if (writes.empty()) return;
  the_device().kernel(name, stream, writes, [&] {
    for (const Fill& fill : fills_) {
      if (fill.cpu.nbytes() != 0) {
        std::memcpy(const_cast<void*>(fill.device.data()), fill.cpu.data(), fill.cpu.nbytes());
      }
    }
  });
}

}  // namespace ebbtide::device
