// Device tensors seen as CPU tensors over the same bytes, for one call of a CPU kernel.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch_shell.h"

namespace ebbtide::device {

// The bytes between the first and the last element; none for a tensor without elements.
std::optional<Access> extent(const at::Tensor& tensor, bool write);

// The CPU generator behind one of the device's; any other generator as it is.
at::Generator cpu_generator(const at::Generator& generator);

// Storages shared among the device tensors are shared among their aliases, so that views, overlaps and identity are to
// the CPU kernel what they are on the device. Not thread safe; lives no longer than the call.
class CpuAliases {
 public:
  // Throws when `tensor` is on another device than those before.
  at::Tensor alias(const at::Tensor& tensor, bool write);
  // `tensor` is on the CPU itself and stays as it is.
  void keep(const at::Tensor& tensor);

  [[nodiscard]] const std::vector<Access>& accesses() const { return accesses_; }

  // After the CPU kernel. Device tensors whose alias was given another size or storage follow it; call before `back`.
  void follow_resized();
  // The device tensor that stands for a CPU result: the argument itself, a view of an argument, or a new tensor of the
  // current device. New memory is filled by `fill_new`.
  at::Tensor back(const at::Tensor& result);
  void fill_new(const std::string& name, Stream stream);

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor cpu;
    bool write = false;
  };
  struct Fill {
    c10::Storage device;
    c10::Storage cpu;
  };

  c10::DeviceIndex index_ = -1;
  std::vector<Access> accesses_;
  std::vector<Pair> pairs_;
  std::vector<Fill> fills_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> cpu_storages_;     // by device storage
  std::unordered_map<const c10::StorageImpl*, c10::Storage> device_storages_;  // by CPU storage
};

}  // namespace ebbtide::device
