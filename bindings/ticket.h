// What stands for a saved tensor between forward and backward, and what ends with it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "dropped.h"
#include "ebbtide/engine.h"
#include "storage_entry.h"

namespace ebbtide::bindings {

// What pack returns for a tensor that may be offloaded. Owns one ticket of the engine: the last one of a storage owns
// its bytes. Its end is a C++ destructor: no exception out of a signal handler can come before it.
class Ticket {
 public:
  Ticket(std::shared_ptr<Dropped> dropped, TicketId id) : id(id), dropped_(std::move(dropped)) {}
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket();

  void each(auto visit) const {
    for (const nanobind::object* object : {&session, &entry.object(), &view, &witness, &original, &recomputed}) {
      visit(*object);
    }
  }
  void clear() {
    const nanobind::object own_session = std::exchange(session, nanobind::none());
    const nanobind::object own_recomputed = std::exchange(recomputed, nanobind::none());
  }

  const TicketId id;
  std::uint64_t version = 0;  // of the in-place counter at the save
  nanobind::object session;   // lives as long as its tickets
  EntryRef entry;
  nanobind::object view;                           // the ViewMeta of ebbtide.framework
  nanobind::object witness = nanobind::none();     // shares the in-place counter
  nanobind::object original = nanobind::none();    // weakly, a tensor whose owner may give it other data
  nanobind::object recomputed = nanobind::none();  // the Recomputation of ebbtide.peaks that it is an input of

 private:
  std::shared_ptr<Dropped> dropped_;
};

// The tickets of one engine.
struct Tickets {
  std::shared_ptr<Dropped> dropped;
};

}  // namespace ebbtide::bindings
