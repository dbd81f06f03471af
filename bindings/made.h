// Objects of Python with a C++ value in them.
#pragma once

#include <nanobind/nanobind.h>

#include <new>
#include <utility>

namespace ebbtide::bindings {

// A new one: one allocation, where casting a pointer takes two.
template <class Value, class... Arguments>
nanobind::object made(Arguments&&... arguments) {
  nanobind::object object = nanobind::inst_alloc(nanobind::type<Value>());
  new (nanobind::inst_ptr<Value>(object)) Value(std::forward<Arguments>(arguments)...);
  nanobind::inst_mark_ready(object);
  return object;
}

}  // namespace ebbtide::bindings
