#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

#include "ebbtide/types.h"

namespace ebbtide::bindings {

// What is saved through one pair of hooks: whose weights stay, and which storages leave the device, and when.
struct Saving {
  EpochId epoch{};
  nanobind::object weights;
  nanobind::object policy;   // called with the tensor; or None
  bool inputs_only = false;  // of checkpointed regions
  std::size_t label = 0;     // of the group that runs
  RunId run{};               // of a group whose copies the caller starts
  bool on_request = false;   // of the run, only what was asked for by `Runs.request`

  void each(auto visit) const {
    visit(weights);
    visit(policy);
  }
  void clear() {
    const nanobind::object own_weights = std::exchange(weights, nanobind::none());
    const nanobind::object own_policy = std::exchange(policy, nanobind::none());
  }
};

}  // namespace ebbtide::bindings
