#include "torch_tensors.h"

#include <initializer_list>

#include "bindings.h"
#include "ebbtide/stats.h"
#include "made.h"
#include "owned.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

constexpr std::uint64_t kAlignmentBytes = 512;
constexpr long kMaxViewKinds = 4;  // conj and neg bits

// An object of a named tuple, without a call of its class.
nb::object named(const nb::object& type, std::initializer_list<nb::object> fields) {
  auto* of = reinterpret_cast<PyTypeObject*>(type.ptr());
  nb::object made = nb::steal(nb::detail::raise_if_null(of->tp_alloc(of, static_cast<Py_ssize_t>(fields.size()))));
  Py_ssize_t index = 0;
  for (const nb::object& field : fields) PyTuple_SET_ITEM(made.ptr(), index++, nb::object(field).release().ptr());
  return made;
}

nb::handle field(nb::handle tuple, Py_ssize_t index) { return PyTuple_GET_ITEM(tuple.ptr(), index); }

}  // namespace

Unobserved::Unobserved(const Function& modes_entered, const Function& disable) {
  if (!is_true(modes_entered())) return;
  guard_ = disable();
  guard_.attr("__enter__")();
}

Unobserved::~Unobserved() {
  if (!guard_.is_valid()) return;
  in_destructor([this] { guard_.attr("__exit__")(nb::none(), nb::none(), nb::none()); });
}

TorchTensors::TorchTensors(const nb::object& torch, const nb::object& device_type, const nb::object& helpers)
    : device_type_(device_type),
      is_cpu_(nb::cast<nb::str>(device_type).equal(nb::str("cpu"))),
      tensor_type_(torch.attr("Tensor")),
      strided_(torch.attr("strided")),
      storage_ref_type_(helpers.attr("StorageRef")),
      view_meta_type_(helpers.attr("ViewMeta")),
      cast_dtypes_(helpers.attr("cast_dtypes")),
      base_(tensor_type_, "_base"),
      layout_(tensor_type_, "layout"),
      is_nested_(tensor_type_, "is_nested"),
      is_quantized_(tensor_type_, "is_quantized"),
      on_cpu_(tensor_type_, "is_cpu"),
      device_(tensor_type_, "device"),
      dtype_(tensor_type_, "dtype"),
      data_(tensor_type_, "data"),
      is_leaf_(tensor_type_, "is_leaf"),
      requires_grad_(tensor_type_, "requires_grad"),
      detach_(tensor_type_, "detach"),
      set_(tensor_type_, "set_"),
      is_conj_(tensor_type_, "is_conj"),
      is_neg_(tensor_type_, "is_neg"),
      is_zero_(tensor_type_, "_is_zerotensor"),
      numel_(tensor_type_, "numel"),
      storage_offset_(tensor_type_, "storage_offset"),
      element_size_(tensor_type_, "element_size"),
      size_(tensor_type_, "size"),
      stride_(tensor_type_, "stride"),
      get_device_(tensor_type_, "get_device"),
      untyped_storage_(tensor_type_, "untyped_storage"),
      storage_device_(torch.attr("UntypedStorage"), "device"),
      storage_cdata_(torch.attr("UntypedStorage"), "_cdata"),
      device_index_(torch.attr("device"), "index"),
      device_kind_(torch.attr("device"), "type"),
      data_ptr_(torch.attr("UntypedStorage"), "data_ptr"),
      storage_nbytes_(torch.attr("UntypedStorage"), "nbytes"),
      resizable_(torch.attr("UntypedStorage"), "resizable"),
      weak_ref_(torch.attr("UntypedStorage"), "_weak_ref"),
      lock_(torch.attr("UntypedStorage"), "_new_with_weak_ptr"),
      free_weak_ref_(torch.attr("UntypedStorage").attr("_free_weak_ref")),
      modes_entered_(torch.attr("_C"), "_len_torch_dispatch_stack"),
      disable_(torch.attr("_C"), "_DisableTorchDispatch"),
      is_wrapped_(helpers, "is_functorch_wrapped"),
      capturing_(helpers, "capturing"),
      inference_(torch, "is_inference_mode_enabled"),
      use_count_(helpers, "use_count"),
      is_weight_(helpers, "is_weight"),
      is_weight_cast_(helpers, "is_weight_cast"),
      graph_task_id_(helpers, "graph_task_id"),
      storage_type_(torch.attr("UntypedStorage")),
      new_storage_(storage_type_, "__new__"),  // without the call of an empty __init__
      devices_(nb::steal(nb::detail::raise_if_null(PySet_New(nullptr)))) {}

// --- what a tensor is

bool TorchTensors::is_own(nb::handle device) {
  const int known = PySet_Contains(devices_.ptr(), device.ptr());
  if (known < 0) nb::raise_python_error();
  if (known != 0) return true;
  if (!device_kind_.get(device).equal(device_type_)) return false;
  if (PySet_Add(devices_.ptr(), device.ptr()) != 0) nb::raise_python_error();
  return true;
}

nb::object TorchTensors::keep_reason(nb::handle tensor, nb::handle weights) {
  const auto because = [](KeepReason reason) { return nb::cast(reason); };
  if (tensor.type().ptr() != tensor_type_.ptr()) {
    return because(is_weight(tensor) ? KeepReason::kParameter : KeepReason::kUnsupported);
  }
  const nb::object base = base_.get(tensor);
  if (!base.is_none() && is_weight(base)) return because(KeepReason::kParameter);
  if (!layout_.get(tensor).is(strided_) || is_true(is_nested_.get(tensor)) || is_true(is_quantized_.get(tensor)) ||
      is_true(is_wrapped_(tensor)) || is_true(is_zero_(tensor))) {
    return because(KeepReason::kUnsupported);
  }
  if (!(is_cpu_ ? is_true(on_cpu_.get(tensor)) : is_own(device_.get(tensor)))) return because(KeepReason::kDevice);
  if (!capturing_.is_none() && is_true(capturing_())) return because(KeepReason::kCapture);
  const nb::object storage = untyped_storage_(tensor);
  // The memory of others than torch's allocator (parts of a storage, what was taken over from other libraries) cannot
  // be kept from reuse while a stream works on it, nor allocated anew at the same residue.
  if (!is_cpu_ && !(is_true(resizable_(storage)) && unsigned_of(data_ptr_(storage)) % kAlignmentBytes == 0)) {
    return because(KeepReason::kUnsupported);
  }
  const nb::object known = weights.attr("storages");
  if (PyDict_GET_SIZE(known.ptr()) != 0) {
    const int held = PyDict_Contains(known.ptr(), storage_cdata_.get(storage).ptr());
    if (held < 0) nb::raise_python_error();
    if (held != 0) return because(KeepReason::kParameter);
  }
  const int cast = PySet_Contains(cast_dtypes_.ptr(), dtype_.get(tensor).ptr());
  if (cast < 0) nb::raise_python_error();
  if (cast != 0 && is_true(is_weight_cast_(base.is_none() ? tensor : nb::handle(base)))) {
    return because(KeepReason::kParameterCast);
  }
  if (!is_true(numel_(tensor))) return because(KeepReason::kSmall);
  return nb::none();
}

std::uint64_t TorchTensors::nbytes(nb::handle tensor) const {
  try {
    return unsigned_of(numel_(tensor)) * unsigned_of(element_size_(tensor));
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return 0;
  }
}

nb::object TorchTensors::keep(nb::handle tensor, KeepReason reason) const {
  const bool leaf = is_true(is_leaf_.get(tensor));
  if (reason == KeepReason::kSmall && !(leaf && is_true(requires_grad_.get(tensor))) && !is_true(numel_(tensor))) {
    // A view without elements must not pin the storage it came from.
    return self().attr("without_elements")(tensor);
  }
  // No graph hangs at a leaf, and whoever swaps its data wants backward to see the new data.
  if (leaf) return nb::borrow(tensor);
  // The tensor itself would keep its own node alive for ever where it is the node's output.
  return detach_(tensor);
}

bool TorchTensors::is_lazy(nb::handle tensor) const { return is_true(is_conj_(tensor)) || is_true(is_neg_(tensor)); }

nb::object TorchTensors::view_meta(nb::handle tensor) {
  nb::object dtype = dtype_.get(tensor);
  PyObject* known = PyDict_GetItemWithError(kinds_.ptr(), dtype.ptr());
  if (known == nullptr) {
    if (PyErr_Occurred() != nullptr) nb::raise_python_error();
    const nb::int_ next(PyDict_GET_SIZE(kinds_.ptr()) * kMaxViewKinds);
    known = nb::detail::raise_if_null(PyDict_SetDefault(kinds_.ptr(), dtype.ptr(), next.ptr()));
  }
  const long bits = (is_true(is_conj_(tensor)) ? 1 : 0) + (is_true(is_neg_(tensor)) ? 2 : 0);
  nb::object kind = bits == 0 ? nb::borrow(known) : nb::object(nb::int_(signed_of(known) + bits));
  return named(view_meta_type_, {storage_offset_(tensor), element_size_(tensor), std::move(kind), size_(tensor),
                                 stride_(tensor), std::move(dtype)});
}

// --- storages

nb::object TorchTensors::storage_bytes(nb::handle tensor) const { return storage_nbytes_(untyped_storage_(tensor)); }

nb::object TorchTensors::storage_ref(nb::handle storage) const {
  nb::object index = is_cpu_ ? nb::object(nb::int_(0)) : device_index_.get(storage_device_.get(storage));
  return named(storage_ref_type_,
               {std::move(index), storage_cdata_.get(storage), data_ptr_(storage), storage_nbytes_(storage)});
}

bool TorchTensors::unmoved(nb::handle storage, nb::handle ref) const {
  return data_ptr_(storage).equal(field(ref, 2)) && storage_nbytes_(storage).equal(field(ref, 3));
}

nb::object TorchTensors::weak(nb::handle storage) const { return made<Owned>(weak_ref_(storage), free_weak_ref_); }

nb::object TorchTensors::lock(nb::handle weak) const { return lock_(nb::cast<Owned&>(weak).value()); }

nb::object TorchTensors::holders(nb::handle held) const {
  if (use_count_.is_none()) return nb::none();
  const Py_ssize_t size = PyList_GET_SIZE(held.ptr());
  if (size == 0) throw nb::index_error("nothing is held");
  const nb::object storage = nb::borrow(PyList_GET_ITEM(held.ptr(), size - 1));
  // Tensors hold the storage itself; users may also hold the same Python object as the list does and this call.
  const std::uint64_t others = unsigned_of(use_count_(storage_cdata_.get(storage))) - 1;
  const auto of_object = static_cast<std::uint64_t>(Py_REFCNT(storage.ptr()));
  return nb::int_(of_object > 2 ? others + of_object - 2 : others);
}

nb::object TorchTensors::new_storage(std::uint64_t nbytes, const nb::object& where) const {
  return new_storage_.named(device_keyword_, storage_type_, nb::int_(nbytes), where);
}

nb::object TorchTensors::allocate(std::uint64_t nbytes, std::uint64_t residue, std::int64_t device) {
  auto where = where_.find(device);
  if (where == where_.end()) where = where_.try_emplace(device, self().attr("device_of")(device)).first;
  const auto shift_of = [&](nb::handle storage) {
    return (residue - unsigned_of(data_ptr_(storage))) % kAlignmentBytes;
  };
  try {
    nb::object storage = new_storage(nbytes, where->second);
    if (shift_of(storage) == 0) return storage;
    storage = new_storage(nbytes + kAlignmentBytes, where->second);
    const std::uint64_t shift = shift_of(storage);
    return storage[nb::slice(nb::int_(shift), nb::int_(shift + nbytes), nb::none())];
  } catch (nb::python_error& error) {
    const nb::object found = nb::borrow(error.value());
    const nb::object told = self().attr("allocation_error")(found);
    if (told.is(found)) throw;
    PyException_SetCause(told.ptr(), nb::object(found).release().ptr());
    raise(told);
  }
}

// --- in-place counters

nb::object TorchTensors::counter_owner(nb::handle tensor) const {
  nb::object base = base_.get(tensor);
  return base.is_none() ? nb::borrow(tensor) : base;
}

const nb::object& TorchTensors::empty_of(nb::handle dtype, std::int64_t index, nb::handle on) {
  const auto found = empty_.find({dtype.ptr(), index});
  if (found != empty_.end()) return found->second;
  nb::object made = self().attr("empty_of")(dtype, on.attr("device"));
  return empty_.try_emplace({dtype.ptr(), index}, std::move(made)).first->second;
}

nb::object TorchTensors::witness(nb::handle tensor) {
  if (is_lazy(tensor)) return self().attr("witness_of_lazy")(tensor);
  nb::object alias = detach_(tensor);
  data_.set(alias, empty_of(dtype_.get(tensor), is_cpu_ ? 0 : signed_of(get_device_(tensor)), tensor));
  return alias;
}

// --- backward

std::int64_t TorchTensors::index_of(nb::handle storage) const {
  return is_cpu_ ? 0 : signed_of(device_index_.get(storage_device_.get(storage)));
}

std::uint64_t TorchTensors::current_pass() const { return static_cast<std::uint64_t>(signed_of(graph_task_id_()) + 1); }

bool TorchTensors::recomputes() const {
  PyObject* const globals = PyEval_GetGlobals();  // of who has unpack called; autograd's own threads have none
  if (globals == nullptr) return false;
  PyObject* const module = PyDict_GetItemWithError(globals, module_name_.ptr());
  if (module == nullptr && PyErr_Occurred() != nullptr) nb::raise_python_error();
  return module != nullptr && nb::handle(module).equal(checkpoint_);
}

nb::object TorchTensors::make_view(nb::handle storage, nb::handle view, nb::handle witness) {
  const Unobserved unobserved(modes_entered_, disable_);
  if (is_true(inference_()) || signed_of(field(view, 2)) % kMaxViewKinds != 0 || is_lazy(witness)) {
    return self().attr("make_any_view")(storage, view, witness);
  }
  const nb::object data = detach_(empty_of(field(view, 5), index_of(storage), storage));  // cheaper than a new tensor
  set_(data, storage, field(view, 0), field(view, 3), field(view, 4));
  nb::object alias = detach_(witness);
  data_.set(alias, data);
  return alias;
}

void bind_torch_tensors(nb::module_& m) {
  nb::class_<TorchTensors>(m, "TorchTensors")
      .def(nb::init<const nb::object&, const nb::object&, const nb::object&>(), nb::arg("torch"),
           nb::arg("device_type"), nb::arg("helpers"))
      .def("keep_reason", &TorchTensors::keep_reason, nb::arg("tensor"), nb::arg("weights"),
           nb::sig("def keep_reason(self, tensor: typing.Any, weights: typing.Any) -> KeepReason | None"))
      .def("nbytes", &TorchTensors::nbytes, nb::arg("tensor"), nb::sig("def nbytes(self, tensor: typing.Any) -> int"))
      .def("keep", &TorchTensors::keep, nb::arg("tensor"), nb::arg("reason"),
           nb::sig("def keep(self, tensor: typing.Any, reason: KeepReason) -> typing.Any"))
      .def("view_meta", &TorchTensors::view_meta, nb::arg("tensor"),
           nb::sig("def view_meta(self, tensor: typing.Any) -> typing.Any"))
      .def("storage_bytes", &TorchTensors::storage_bytes, nb::arg("tensor"),
           nb::sig("def storage_bytes(self, tensor: typing.Any) -> int"))
      .def("storage_ref", &TorchTensors::storage_ref, nb::arg("storage"),
           nb::sig("def storage_ref(self, storage: typing.Any) -> typing.Any"))
      .def("unmoved", &TorchTensors::unmoved, nb::arg("storage"), nb::arg("ref"),
           nb::sig("def unmoved(self, storage: typing.Any, ref: typing.Any) -> bool"))
      .def("weak", &TorchTensors::weak, nb::arg("storage"), nb::sig("def weak(self, storage: typing.Any) -> Owned"))
      .def("lock", &TorchTensors::lock, nb::arg("weak"), nb::sig("def lock(self, weak: Owned) -> typing.Any"))
      .def("holders", &TorchTensors::holders, nb::arg("held"),
           nb::sig("def holders(self, held: list[typing.Any]) -> int | None"))
      .def("allocate", &TorchTensors::allocate, nb::arg("nbytes"), nb::arg("residue"), nb::arg("device"),
           nb::sig("def allocate(self, nbytes: int, residue: int, device: int) -> typing.Any"))
      .def("counter_owner", &TorchTensors::counter_owner, nb::arg("tensor"),
           nb::sig("def counter_owner(self, tensor: typing.Any) -> typing.Any"))
      .def("witness", &TorchTensors::witness, nb::arg("tensor"),
           nb::sig("def witness(self, tensor: typing.Any) -> typing.Any"))
      .def("current_pass", &TorchTensors::current_pass)
      .def("recomputes", &TorchTensors::recomputes)
      .def("make_view", &TorchTensors::make_view, nb::arg("storage"), nb::arg("view"), nb::arg("witness"),
           nb::sig("def make_view(self, storage: typing.Any, view: typing.Any, witness: typing.Any) -> typing.Any"));
}

}  // namespace ebbtide::bindings
