#include "storage_entry.h"

#include <algorithm>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

auto found_in(auto& restored, CopyId load) {
  return std::find_if(restored.begin(), restored.end(), [load](const auto& one) { return one.first == load; });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const StorageEntry& entry = *nb::inst_ptr<StorageEntry>(self);
  for (const nb::object* object : {&entry.ref, &entry.weak, static_cast<const nb::object*>(&entry.leases),
                                   &entry.restored_weak, &entry.load_errors, &entry.last_owner}) {
    Py_VISIT(object->ptr());
  }
  for (const auto& [load, storage] : entry.restored) Py_VISIT(storage.ptr());
  for (const auto& [witness, version] : entry.witnesses) Py_VISIT(witness.ptr());
  return 0;
}

int clear(PyObject* self) {
  StorageEntry& entry = *nb::inst_ptr<StorageEntry>(self);
  entry.let_go();
  const nb::object errors = std::exchange(entry.load_errors, nb::none());
  const auto witnesses = std::exchange(entry.witnesses, {});
  return 0;
}

PyType_Slot kSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

StorageEntry::StorageEntry(StorageId storage, nb::object ref, nb::object weak)
    : storage(storage),
      ref(std::move(ref)),
      weak(std::move(weak)),
      device(nb::cast<std::int64_t>(nb::handle(PyTuple_GET_ITEM(this->ref.ptr(), 0)))) {}

nb::object StorageEntry::lease() const {
  const Py_ssize_t size = PyList_GET_SIZE(leases.ptr());
  return size == 0 ? nb::object() : nb::borrow(PyList_GET_ITEM(leases.ptr(), size - 1));
}

void StorageEntry::let_go_of_lease() {
  const nb::object last = lease();
  if (!last.is_valid()) return;
  const Py_ssize_t size = PyList_GET_SIZE(leases.ptr());
  if (PyList_SetSlice(leases.ptr(), size - 1, size, nullptr) != 0) nb::raise_python_error();
}

nb::object StorageEntry::restored_by(CopyId load) const {
  const auto found = found_in(restored, load);
  return found == restored.end() ? nb::object() : found->second;
}

void StorageEntry::let_go_of_restored(CopyId load) {
  const auto found = found_in(restored, load);
  if (found == restored.end()) return;
  const nb::object memory = std::move(found->second);
  restored.erase(found);
}

void StorageEntry::let_go() {
  const auto loaded = std::exchange(restored, {});
  if (PyList_SetSlice(leases.ptr(), 0, PyList_GET_SIZE(leases.ptr()), nullptr) != 0) nb::raise_python_error();
}

bool StorageEntry::failed(CopyId load) const {
  return !load_errors.is_none() && nb::cast<nb::dict>(load_errors).contains(nb::int_(value(load)));
}

EntryRef::EntryRef(nb::object object)
    : object_(std::move(object)), entry_(object_.is_valid() ? nb::inst_ptr<StorageEntry>(object_) : nullptr) {}

void bind_storage_entry(nb::module_& m) {
  nb::class_<StorageEntry>(m, "StorageEntry", nb::type_slots(kSlots), nb::is_final())
      .def_prop_ro("storage_id", [](const StorageEntry& entry) { return value(entry.storage); })
      .def_ro("ref", &StorageEntry::ref, nb::for_getter(nb::sig("def ref(self) -> typing.Any")))
      .def_ro("weak", &StorageEntry::weak, nb::for_getter(nb::sig("def weak(self) -> typing.Any")))
      .def_ro("device", &StorageEntry::device)
      .def_prop_ro(
          "lease",
          [](const StorageEntry& entry) {
            nb::object lease = entry.lease();
            return lease.is_valid() ? lease : nb::none();
          },
          nb::sig("def lease(self) -> typing.Any"))
      .def(
          "restored_by",
          [](const StorageEntry& entry, std::uint64_t load) {
            nb::object storage = entry.restored_by(CopyId{load});
            return storage.is_valid() ? storage : nb::none();
          },
          nb::arg("load"), nb::sig("def restored_by(self, load: int) -> typing.Any"))
      .def_ro("restored_weak", &StorageEntry::restored_weak,
              nb::for_getter(nb::sig("def restored_weak(self) -> typing.Any")))
      .def_prop_rw(
          "load_started", [](const StorageEntry& entry) { return value(entry.load_started); },
          [](StorageEntry& entry, std::uint64_t load) { entry.load_started = CopyId{load}; })
      .def(
          "note_load_error",
          [](StorageEntry& entry, std::uint64_t load, const nb::object& error) {
            if (entry.load_errors.is_none()) entry.load_errors = nb::dict();
            nb::cast<nb::dict>(entry.load_errors)[nb::int_(load)] = error;
          },
          nb::arg("load"), nb::arg("error"),
          nb::sig("def note_load_error(self, load: int, error: BaseException) -> None"))
      .def(
          "take_load_error",
          [](StorageEntry& entry, std::uint64_t load) {
            if (entry.load_errors.is_none()) return nb::object(nb::none());
            return nb::object(entry.load_errors.attr("pop")(load, nb::none()));
          },
          nb::arg("load"), nb::sig("def take_load_error(self, load: int) -> BaseException | None"));
}

}  // namespace ebbtide::bindings
