// What is asked of every tensor of PyTorch that is saved. Nothing here is linked to it: the module comes from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <utility>

#include "ebbtide/stats.h"
#include "native_calls.h"

namespace ebbtide::bindings {

// While it lives, dispatch modes do not see what this thread does. For plain tensors only.
class Unobserved {
 public:
  Unobserved(const Function& modes_entered, const Function& disable);
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;
  ~Unobserved();

 private:
  nanobind::object guard_;
};

// The methods of ebbtide.framework.Framework that are called for every tensor: the base class of
// ebbtide.torch.framework.TorchFramework, which has what is asked rarely. Thread safe as that is.
class TorchTensors {
 public:
  // `helpers` has as attributes the functions and types that ebbtide.torch.framework puts there.
  TorchTensors(const nanobind::object& torch, const nanobind::object& device_type, const nanobind::object& helpers);
  TorchTensors(const TorchTensors&) = delete;
  TorchTensors& operator=(const TorchTensors&) = delete;

  [[nodiscard]] nanobind::object keep_reason(nanobind::handle tensor, nanobind::handle weights);
  [[nodiscard]] std::uint64_t nbytes(nanobind::handle tensor) const;
  [[nodiscard]] nanobind::object keep(nanobind::handle tensor, KeepReason reason) const;
  [[nodiscard]] nanobind::object view_meta(nanobind::handle tensor);
  [[nodiscard]] nanobind::object storage_bytes(nanobind::handle tensor) const;
  [[nodiscard]] nanobind::object storage_ref(nanobind::handle storage) const;
  [[nodiscard]] bool unmoved(nanobind::handle storage, nanobind::handle ref) const;
  [[nodiscard]] nanobind::object weak(nanobind::handle storage) const;
  [[nodiscard]] nanobind::object lock(nanobind::handle weak) const;
  [[nodiscard]] nanobind::object holders(nanobind::handle held) const;
  [[nodiscard]] nanobind::object allocate(std::uint64_t nbytes, std::uint64_t residue, std::int64_t device);
  [[nodiscard]] nanobind::object counter_owner(nanobind::handle tensor) const;
  [[nodiscard]] nanobind::object witness(nanobind::handle tensor);
  [[nodiscard]] std::uint64_t current_pass() const;
  [[nodiscard]] bool recomputes() const;
  [[nodiscard]] nanobind::object make_view(nanobind::handle storage, nanobind::handle view, nanobind::handle witness);

 private:
  [[nodiscard]] nanobind::object self() const { return nanobind::find(this); }
  [[nodiscard]] bool is_weight(nanobind::handle tensor) const { return is_true(is_weight_(tensor)); }
  [[nodiscard]] bool is_own(nanobind::handle device);
  [[nodiscard]] bool is_lazy(nanobind::handle tensor) const;
  [[nodiscard]] nanobind::object new_storage(std::uint64_t nbytes, const nanobind::object& where) const;
  [[nodiscard]] std::int64_t index_of(nanobind::handle storage) const;
  [[nodiscard]] const nanobind::object& empty_of(nanobind::handle dtype, std::int64_t index, nanobind::handle on);

  const nanobind::object device_type_;
  const bool is_cpu_;
  const nanobind::object tensor_type_, strided_, storage_ref_type_, view_meta_type_, cast_dtypes_;
  const Attribute base_, layout_, is_nested_, is_quantized_, on_cpu_, device_, dtype_, data_, is_leaf_, requires_grad_;
  const Function detach_, set_, is_conj_, is_neg_, is_zero_, numel_, storage_offset_, element_size_, size_, stride_,
      get_device_, untyped_storage_;
  const Attribute storage_device_, storage_cdata_, device_index_, device_kind_;
  const Function data_ptr_, storage_nbytes_, resizable_, weak_ref_, lock_;
  const nanobind::object free_weak_ref_;
  const nanobind::str module_name_{"__name__"}, checkpoint_{"torch.utils.checkpoint"};
  const Function modes_entered_, disable_, is_wrapped_, capturing_, inference_, use_count_, is_weight_, is_weight_cast_,
      graph_task_id_;
  const nanobind::object storage_type_;
  const Function new_storage_;
  const nanobind::tuple device_keyword_ = nanobind::make_tuple("device");
  std::map<std::int64_t, nanobind::object> where_;  // devices by index
  nanobind::object devices_;                        // of this type, seen so far
  nanobind::dict kinds_;                            // of dtypes: the numbers in a ViewMeta
  // Empty tensors by dtype, which lives for ever, and device index.
  std::map<std::pair<PyObject*, std::int64_t>, nanobind::object> empty_;
};

}  // namespace ebbtide::bindings
