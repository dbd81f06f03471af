// One registration function per header of include/ebbtide. Bindings translate; they decide nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <functional>

namespace ebbtide::bindings {

void bind_errors(nanobind::module_& m);
void bind_stats(nanobind::module_& m);
void bind_command(nanobind::module_& m);
void bind_host_pool(nanobind::module_& m);
void bind_spill_file(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_host_executor(nanobind::module_& m);
void bind_stream_copies(nanobind::module_& m);
void bind_storage_entry(nanobind::module_& m);
void bind_command_runner(nanobind::module_& m);
void bind_saving(nanobind::module_& m);
void bind_ticket(nanobind::module_& m);
void bind_saved_tensors(nanobind::module_& m);
void bind_torch_tensors(nanobind::module_& m);
void bind_torch_copies(nanobind::module_& m);
void bind_malloc_threshold(nanobind::module_& m);
void bind_lifetime(nanobind::module_& m);

// False once destructors must do nothing: in a forked child, and when the interpreter shuts down.
bool usable();

// For destructors: what the call raises is printed, but for KeyboardInterrupt, which comes again later.
void in_destructor(const std::function<void()>& call);

// The exception as an object of ebbtide.errors (others: RuntimeError); None for a null pointer.
nanobind::object to_python(const std::exception_ptr& error);

// One of ebbtide.errors: raised on purpose, with everything in order. Any other may have come at any instruction.
bool is_told(const std::exception_ptr& error);

}  // namespace ebbtide::bindings
