#include "storage_entry.h"

#include <algorithm>
#include <utility>

#include "bindings.h"
#include "collected.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

auto found_in(auto& restored, CopyId load) {
  return std::find_if(restored.begin(), restored.end(), [load](const auto& one) { return one.first == load; });
}

nb::object or_none(nb::object object) { return object.is_valid() ? std::move(object) : nb::object(nb::none()); }

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
  nb::class_<StorageEntry>(m, "StorageEntry", nb::type_slots(Collected<StorageEntry>::slots), nb::is_final())
      .def_prop_ro("storage_id", [](const StorageEntry& entry) { return value(entry.storage); })
      .def_ro("ref", &StorageEntry::ref, nb::for_getter(nb::sig("def ref(self) -> typing.Any")))
      .def_ro("device", &StorageEntry::device)
      .def_prop_ro(
          "lease", [](const StorageEntry& entry) { return or_none(entry.lease()); },
          nb::sig("def lease(self) -> typing.Any"))
      .def(
          "restored_by",
          [](const StorageEntry& entry, std::uint64_t load) { return or_none(entry.restored_by(CopyId{load})); },
          nb::arg("load"), nb::sig("def restored_by(self, load: int) -> typing.Any"))
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
