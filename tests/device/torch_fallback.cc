// Every operator that has a CPU kernel, run by that kernel on CPU aliases of device memory.
//
// The kernel is registered for each of them by name: a mere backend fallback would lose to composite kernels, whose
// bits differ from those of the CPU's own.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_set>

#include "torch_alias.h"

namespace ebbtide::device {
namespace {

using Stack = torch::jit::Stack;

// torch_operators.cc and torch_copy.cc have these.
const std::unordered_set<std::string_view> kOwn = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::as_strided",
    "aten::view",
    "aten::_reshape_alias",
    "aten::unfold",
    "aten::view_as_real",
    "aten::view_as_complex",
    "aten::set_",
    "aten::set_.source_Tensor",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::resize_",
    "aten::record_stream",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
};

// Composite for the CPU, refused or done otherwise by the composite kernel when it meets a PrivateUse1 tensor.
constexpr const char* kAsOnCpu[] = {"aten::convolution", "aten::convolution_backward"};

// Arguments that are written although the schema does not say so.
bool written_unsaid(std::string_view name, std::size_t argument) {
  return name == "aten::native_batch_norm" && (argument == 3 || argument == 4);
}

// Accelerators take CPU tensors with dimensions only as indices.
bool takes_cpu_tensors(std::string_view name) {
  return name.starts_with("aten::index") || name.starts_with("aten::_index_put") ||
         name.starts_with("aten::_unsafe_index") || name.starts_with("aten::repeat_interleave");
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), stack_(stack), name_(c10::toString(op.operator_name())), schema_(op.schema()) {}

  void run() {
    const std::size_t first = stack_.size() - schema_.arguments().size();
    find_device(first);
    const c10::OptionalDeviceGuard guard(device_);
    for (std::size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      const bool write = (alias != nullptr && alias->isWrite()) || written_unsaid(name_, i);
      stack_[first + i] = to_cpu(stack_[first + i], write);
    }
    const Stream stream = current_stream(current_index());
    the_device().kernel(name_, stream, aliases_.accesses(), [this] {
      const at::AutoDispatchBelowADInplaceOrView below;
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.callBoxed(stack_);
    });
    aliases_.follow_resized();
    bool host_reads = false;
    for (std::size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i) {
      stack_[i] = to_device(stack_[i]);
      host_reads |= !stack_[i].isTensor() && !stack_[i].isTensorList();
    }
    aliases_.fill_new(name_, stream);
    if (host_reads) the_device().synchronize(stream);
  }

 private:
  void find_device(std::size_t first) {
    const auto take = [this](const at::Tensor& tensor) {
      if (any_tensor_ || !tensor.defined() || tensor.device().type() != kTide) return;
      device_ = tensor.device();
      any_tensor_ = true;
    };
    for (std::size_t i = first; i < stack_.size(); ++i) {
      const c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        take(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorList()) take(tensor);
      } else if (value.isOptionalTensorList()) {
        for (const auto& tensor : value.toOptionalTensorVector()) {
          if (tensor) take(*tensor);
        }
      } else if (!any_tensor_ && value.isDevice() && value.toDevice().type() == kTide && value.toDevice().has_index()) {
        device_ = value.toDevice();
      }
    }
  }

  at::Tensor to_cpu(const at::Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() == kTide) return aliases_.alias(tensor, write);
    TORCH_CHECK(tensor.dim() == 0 || !any_tensor_ || takes_cpu_tensors(name_), name_,
                ": Expected all tensors to be on the same device, but found ", *device_, " and ", tensor.device());
    aliases_.keep(tensor);
    return tensor;
  }

  c10::IValue to_cpu(const c10::IValue& value, bool write) {
    if (value.isTensor()) return to_cpu(value.toTensor(), write);
    if (value.isTensorList()) {
      c10::List<at::Tensor> cpu;
      for (const at::Tensor& tensor : value.toTensorVector()) cpu.push_back(to_cpu(tensor, write));
      return cpu;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> cpu;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        cpu.push_back(tensor ? std::optional(to_cpu(*tensor, write)) : std::nullopt);
      }
      return cpu;
    }
    if (value.isDevice() && value.toDevice().type() == kTide) return c10::Device(c10::kCPU);
    if (value.isGenerator()) return cpu_generator(value.toGenerator());
    return value;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor()) return aliases_.back(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> device;
      for (const at::Tensor& tensor : value.toTensorVector()) device.push_back(aliases_.back(tensor));
      return device;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  Stack& stack_;
  std::string name_;
  const c10::FunctionSchema& schema_;
  std::optional<c10::Device> device_;
  bool any_tensor_ = false;
  CpuAliases aliases_;
};

void run_on_cpu_aliases(const c10::OperatorHandle& op, Stack* stack) { Call(op, *stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_aliases>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::") || kOwn.contains(c10::toString(name))) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_aliases>());
  }
  for (const char* name : kAsOnCpu) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_aliases>());
  }
}

}  // namespace
}  // namespace ebbtide::device
