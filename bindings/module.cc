#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "C++ core of Ebbtide. Private: use the Python package.";
  using namespace ebbtide::bindings;
  bind_errors(m);
  bind_stats(m);
  bind_command(m);
  bind_host_pool(m);
  bind_spill_file(m);
  bind_engine(m);
  bind_host_executor(m);
  bind_stream_copies(m);
  bind_storage_entry(m);
  bind_command_runner(m);
  bind_saving(m);
  bind_ticket(m);
  bind_saved_tensors(m);
  bind_malloc_threshold(m);
  bind_lifetime(m);
  bind_torch_tensors(m);
  bind_torch_copies(m);
}
