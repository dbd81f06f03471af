#pragma once

#include <exception>

namespace ebbtide::bindings {

// Runs the second also where the first throws, and passes on what was thrown first.
template <class First, class Second>
void finally(First&& first, Second&& second) {
  std::exception_ptr failure;
  try {
    first();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    second();
  } catch (...) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ebbtide::bindings
