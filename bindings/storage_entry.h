// The framework's objects behind one entry of the engine.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ebbtide/storage_ref.h"
#include "ebbtide/types.h"

namespace ebbtide::bindings {

// Owned by Python; changed with the GIL, and only so that code which runs in between sees it whole: letting go of an
// object may run any. `ref` is the StorageRef of ebbtide.framework, `weak` what Framework.weak gave.
struct StorageEntry {
  StorageEntry(StorageId storage, nanobind::object ref, nanobind::object weak);

  [[nodiscard]] nanobind::object lease() const;
  void let_go_of_lease();
  // Of the copy that fills it; null where there is none.
  [[nodiscard]] nanobind::object restored_by(CopyId load) const;
  void let_go_of_restored(CopyId load);
  // Everything that keeps memory.
  void let_go();
  [[nodiscard]] bool failed(CopyId load) const;

  void each(auto visit) const {
    for (const nanobind::object* object :
         {&ref, &weak, static_cast<const nanobind::object*>(&leases), &restored_weak, &load_errors, &last_owner}) {
      visit(*object);
    }
    for (const auto& [load, storage] : restored) visit(storage);
    for (const auto& [witness, version] : witnesses) visit(witness);
  }
  void clear() {
    let_go();
    const nanobind::object own_errors = std::exchange(load_errors, nanobind::none());
    const auto own_witnesses = std::exchange(witnesses, {});
  }

  const StorageId storage;
  const nanobind::object ref, weak;
  const std::int64_t device;
  // Any thread may run the engine's commands, and late: a release takes away what it is about, not what came after. So
  // there is one item per lease, and a restored storage goes by the copy that fills it.
  nanobind::list leases;
  std::vector<std::pair<CopyId, nanobind::object>> restored;
  nanobind::object restored_weak = nanobind::none();
  // Streams that it was saved or given out on, and may be read on: the allocator was told of them.
  std::vector<StreamRef> streams;
  nanobind::object load_errors = nanobind::none();  // a dict of exceptions by copy, once there was one
  CopyId load_started{};                            // the last load that was, unless it failed
  // One witness per in-place counter seen, with the counter's value; dead tickets' witnesses stay: a write through any
  // of them changes the content for all.
  std::vector<std::pair<nanobind::object, std::uint64_t>> witnesses;
  nanobind::object last_owner = nanobind::none();  // weakly, of the last witness's counter
};

// An entry, and what keeps it alive; or nothing.
class EntryRef {
 public:
  EntryRef() = default;
  explicit EntryRef(nanobind::object object);

  explicit operator bool() const { return entry_ != nullptr; }
  StorageEntry* operator->() const { return entry_; }
  StorageEntry& operator*() const { return *entry_; }
  [[nodiscard]] const nanobind::object& object() const { return object_; }

 private:
  nanobind::object object_;
  StorageEntry* entry_ = nullptr;
};

}  // namespace ebbtide::bindings
