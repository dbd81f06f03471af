// One entry of the context.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "ebbtide/types.h"

namespace ebbtide::bindings {

// Owned by who entered. Ends when it is told to, and else in its destructor: that is C++, so an exception out of a
// signal handler cannot come before it. Nobody recovers from such an exception while an epoch lasts.
class Epoch {
 public:
  Epoch(nanobind::object session, EpochId id) : session_(std::move(session)), id_(id) {}
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;
  ~Epoch();

  [[nodiscard]] EpochId id() const { return id_; }
  void end();

 private:
  nanobind::object session_;  // of SavedTensors; None once it ended
  const EpochId id_;
};

}  // namespace ebbtide::bindings
