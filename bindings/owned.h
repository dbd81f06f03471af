#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "bindings.h"

namespace ebbtide::bindings {

// A value and what gives it back: called with it in the destructor.
class Owned {
 public:
  Owned(nanobind::object value, nanobind::object free) : value_(std::move(value)), free_(std::move(free)) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    in_destructor([this] { free_(value_); });
  }

  [[nodiscard]] const nanobind::object& value() const { return value_; }

 private:
  nanobind::object value_;
  nanobind::object free_;
};

}  // namespace ebbtide::bindings
