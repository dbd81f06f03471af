#include "saved_tensors.h"

#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "commands.h"
#include "finally.h"
#include "made.h"
#include "runner_parts.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

nb::object weakly(nb::handle object) {
  return nb::steal(nb::detail::raise_if_null(PyWeakref_NewRef(object.ptr(), nullptr)));
}

// For a thread that needs what another one is about to do.
void yield_to_others() {
  if (PyErr_CheckSignals() != 0) nb::raise_python_error();
  const nb::gil_scoped_release released;
  std::this_thread::yield();
}

}  // namespace

SavedTensors::SavedTensors(const nb::object& transfers, const nb::object& framework, std::uint64_t min_bytes,
                           bool use_saved_copy)
    : transfers_(transfers),
      copies_(transfers.attr("copies")),
      runner_(nb::cast<CommandRunner&>(transfers)),
      dropped_(nb::cast<Tickets&>(transfers.attr("tickets")).dropped),
      min_bytes_(min_bytes),
      use_saved_copy_(use_saved_copy),
      threads_copy_(nb::cast<bool>(transfers.attr("threads_copy"))),
      watches_memory_(!framework.attr("memory").is_none()),
      keep_reason_(framework, "keep_reason"),
      is_region_input_(framework, "is_region_input"),
      storage_bytes_(framework, "storage_bytes"),
      nbytes_(framework, "nbytes"),
      keep_(framework, "keep"),
      version_(framework, "version"),
      view_meta_(framework, "view_meta"),
      storage_(framework, "storage"),
      storage_ref_(framework, "storage_ref"),
      weak_(framework, "weak"),
      counter_owner_(framework, "counter_owner"),
      witness_(framework, "witness"),
      replaceable_(framework, "replaceable"),
      recomputes_(framework, "recomputes"),
      make_view_(framework, "make_view"),
      current_pass_(framework, "current_pass") {
  const nb::object streams = framework.attr("streams");
  if (streams.is_none()) return;
  current_stream_ = Function(streams, "current");
  record_stream_ = Function(streams, "record_stream");
  record_stream_of_ = Function(streams, "record_stream_of");
}

void SavedTensors::require_usable(const char* place) {
  if (!usable()) self().attr("require_usable")(place);
}

void SavedTensors::settle() {
  if (threads_copy_ && is_true(copies_.attr("ready"))) {
    transfers_.attr("settle")();
  } else {
    runner_.settle();
  }
}

template <class Call>
auto SavedTensors::noting_interrupts(Call call) {
  try {
    return call();
  } catch (...) {
    if (!is_told(std::current_exception())) runner_.cut_short();
    throw;
  }
}

void SavedTensors::recover_when_alone() {
  if (runner_.interrupted() && epochs_.empty() && passes_.empty()) transfers_.attr("recover")();
}

StreamRef SavedTensors::current_stream(std::int64_t device) const {
  return current_stream_.is_none() ? StreamRef{} : StreamRef{unsigned_of(current_stream_(nb::int_(device)))};
}

PassId SavedTensors::see_pass() {
  const PassId pass{unsigned_of(current_pass_())};
  if (pass == PassId{} || passes_.contains(pass)) return pass;
  recover_when_alone();
  self().attr("tell_of_end")(value(pass));
  passes_.insert(pass);
  return pass;
}

void SavedTensors::end_pass(PassId pass) {
  if (!usable()) return;
  passes_.erase(pass);
  noting_interrupts([&] { finally([&] { settle(); }, [&] { runner_.run(runner_.engine().end_pass(pass)); }); });
}

template <class Tell>
void SavedTensors::tell_allocator(StorageEntry& entry, StreamRef stream, Tell tell) {
  if (value(stream) == 0) return;
  for (const StreamRef told : entry.streams) {
    if (told == stream) return;
  }
  tell(nb::int_(value(stream)));
  entry.streams.push_back(stream);
}

// --- forward

nb::object SavedTensors::begin_epoch() {
  require_usable("offload");
  return noting_interrupts([&] {
    recover_when_alone();
    const EpochId epoch = runner_.engine().begin_epoch();
    epochs_.insert(epoch);
    return made<Epoch>(self(), epoch);
  });
}

void SavedTensors::end_epoch(EpochId epoch) {
  if (!usable()) return;  // in a forked child: the parent ends it
  epochs_.erase(epoch);
  noting_interrupts([&] { finally([&] { settle(); }, [&] { runner_.run(runner_.engine().end_epoch(epoch)); }); });
}

Epoch::~Epoch() {
  if (!session_.is_none() && usable()) in_destructor([this] { end(); });
}

void Epoch::end() {
  const nb::object session = std::exchange(session_, nb::none());
  if (!session.is_none()) nb::cast<SavedTensors&>(session).end_epoch(id_);
}

nb::object SavedTensors::pack(nb::handle tensor, const Saving& saving) {
  require_usable("pack");
  // Frameworks restore the hooks that a backward began with: left inside one, they stay.
  if (!epochs_.contains(saving.epoch)) return keep(tensor);
  noting_interrupts([&] { settle(); });
  bool forced = false;
  const nb::object reason = decide(tensor, saving, forced);
  if (reason.is_none()) return noting_interrupts([&] { return save(tensor, saving, forced, false); });
  const auto why = nb::cast<KeepReason>(reason);
  runner_.engine().kept(why, unsigned_of(nbytes_(tensor)));
  return keep(tensor, why);
}

// Why the tensor stays on the device, or None; `forced` where a user's policy wants it moved.
nb::object SavedTensors::decide(nb::handle tensor, const Saving& saving, bool& forced) {
  nb::object reason = keep_reason_(tensor, saving.weights);
  if (!reason.is_none()) return reason;
  if (saving.inputs_only && !is_true(is_region_input_())) return nb::cast(KeepReason::kPolicy);
  if (!saving.policy.is_none()) {
    forced = nb::cast<bool>(self().attr("wants_offload")(saving.policy, tensor));
    return forced ? nb::none() : nb::cast(KeepReason::kPolicy);
  }
  // The engine would say so too: spares a small tensor its description.
  return unsigned_of(storage_bytes_(tensor)) < min_bytes_ ? nb::cast(KeepReason::kSmall) : nb::none();
}

nb::object SavedTensors::keep(nb::handle tensor, KeepReason reason) {
  nb::object kept = keep_(tensor, nb::cast(reason));
  nb::object version = version_(kept);
  return nb::make_tuple(std::move(kept), std::move(version));
}

nb::object SavedTensors::save(nb::handle tensor, const Saving& saving, bool forced, bool spoiled) {
  nb::object view = view_meta_(tensor);
  const std::uint64_t version = unsigned_of(version_(tensor));
  nb::object storage = storage_(tensor);
  nb::object ref = storage_ref_(storage);
  const StorageRef where = storage_ref(nb::borrow<nb::tuple>(ref));
  const StreamRef stream = current_stream(value(where.device));
  SaveVerdict verdict = runner_.engine().save({.storage = where,
                                               .view = view_meta(nb::borrow<nb::tuple>(view)),
                                               .version = version,
                                               .epoch = saving.epoch,
                                               .label = saving.label,
                                               .run = saving.run,
                                               .on_request = saving.on_request,
                                               .stream = stream,
                                               .forced = forced,
                                               .spoiled = spoiled});
  if (verdict.outcome == SaveOutcome::kKept) return keep(tensor, verdict.reason);
  nb::object packed = made<Ticket>(dropped_, verdict.ticket);
  Ticket& ticket = *nb::inst_ptr<Ticket>(packed);
  ticket.session = self();
  ticket.version = version;
  ticket.view = std::move(view);
  bool intact = false;
  finally(
      [&] {
        ticket.entry = runner_.find(verdict.storage);
        if (!ticket.entry) {
          nb::object weak = weak_(storage);
          ticket.entry = runner_.add(EntryRef(made<StorageEntry>(verdict.storage, std::move(ref), std::move(weak))));
        }
        StorageEntry& entry = *ticket.entry;
        // Autograd has a tensor saved before the operation that reads it is issued, and without Ebbtide would keep the
        // memory from others until backward.
        tell_allocator(entry, stream, [&](const nb::int_& on) { record_stream_of_(tensor, on); });
        if (verdict.lease) entry.leases.append(storage);
        // Probes count references: this one must not be taken for somebody else's.
        storage = nb::none();
        intact = verdict.outcome == SaveOutcome::kNew || runner_.intact(entry);
        if (!intact) return;
        ticket.witness = witness(entry, tensor, version);
        if (is_true(replaceable_(tensor))) ticket.original = weakly(tensor);
      },
      [&] { runner_.run(verdict.commands); });
  return intact ? packed : save(tensor, saving, forced, true);
}

nb::object SavedTensors::witness(StorageEntry& entry, nb::handle tensor, std::uint64_t version) {
  const nb::object owner = counter_owner_(tensor);
  if (!entry.last_owner.is_none() && entry.last_owner().is(owner)) return entry.witnesses.back().first;
  nb::object witness = witness_(tensor);
  nb::object last = weakly(owner);
  entry.witnesses.emplace_back(witness, version);
  std::swap(entry.last_owner, last);
  return witness;
}

// --- backward

nb::object SavedTensors::unpack(nb::handle saved) {
  return noting_interrupts([&]() -> nb::object {
    try {
      require_usable("unpack");
      if (PyTuple_Check(saved.ptr()) && PyTuple_GET_SIZE(saved.ptr()) == 2) {
        const nb::object tensor = nb::borrow(PyTuple_GET_ITEM(saved.ptr(), 0));
        const nb::handle expected = PyTuple_GET_ITEM(saved.ptr(), 1);
        const nb::object found = version_(tensor);
        if (!found.equal(expected)) raise(self().attr("modified_kept")(tensor, expected, found));
        return tensor;
      }
      settle();
      return unpack(nb::cast<Ticket&>(saved));
    } catch (...) {
      // Whoever is not in the backward would not see its end.
      if (usable() && is_ordinary(std::current_exception())) see_pass();
      throw;
    }
  });
}

nb::object SavedTensors::unpack(Ticket& ticket) {
  const std::uint64_t found = unsigned_of(version_(ticket.witness));
  const bool intact = found == ticket.version;
  if (intact && !ticket.original.is_none()) {
    nb::object original = ticket.original();
    if (!original.is_none() && !storage_ref_(storage_(original)).equal(ticket.entry->ref)) return original;
  }
  nb::object storage;
  if (intact) {
    storage = find(ticket, true);
  } else if (use_saved_copy_) {
    storage = self().attr("find_saved_copy")(nb::find(&ticket), found);
  } else {
    raise(self().attr("modified")(nb::find(&ticket), found));
  }
  if (watches_memory_ && is_true(recomputes_())) ticket.recomputed = self().attr("begin_recomputation")();
  return make_view_(storage, ticket.view, ticket.witness);
}

nb::object SavedTensors::find(const Ticket& ticket, bool allow_live) {
  const EntryRef entry = ticket.entry;
  const PassId pass = see_pass();
  const StreamRef stream = current_stream(entry->device);
  bool short_of_memory = false;
  while (true) {
    // Where plain autograd would read the same bytes from the saved storage, that is taken.
    std::optional<Restored> found = runner_.restore(*entry, ticket.id, pass, allow_live, stream);
    if (!found) raise(self().attr("not_intact")(entry.object()));
    auto& [verdict, storage] = *found;
    switch (verdict.outcome) {
      case RestoreOutcome::kLive:
        tell_allocator(*entry, stream, [&](const nb::int_& on) { record_stream_(storage, on); });
        return storage;
      case RestoreOutcome::kShared:
        if (!storage.is_none()) return storage;
        yield_to_others();
        break;
      case RestoreOutcome::kLoad:
        storage = load(entry, verdict, short_of_memory);
        if (!storage.is_none()) return storage;
        break;
      case RestoreOutcome::kPending:
        transfers_.attr("wait_for_other")(entry.object(), value(verdict.load), verdict.allocating);
        break;
    }
  }
}

// None where it is to be asked for again.
nb::object SavedTensors::load(const EntryRef& entry, const RestoreVerdict& verdict, bool& short_of_memory) {
  nb::object storage;
  try {
    storage =
        runner_.allocate(entry->storage, verdict.load, entry->device, verdict.nbytes, verdict.residue, verdict.stream);
  } catch (nb::python_error& error) {
    runner_.run(verdict.commands);  // others may wait for what they begin
    if (!error.matches(PyExc_MemoryError)) throw;
    if (short_of_memory) raise(self().attr("no_memory")(verdict.nbytes, error.value()));
    short_of_memory = true;
    return nb::none();
  } catch (...) {
    runner_.run(verdict.commands);
    throw;
  }
  // Others may wait for what the commands begin.
  finally([&] { runner_.adopt(*entry, verdict.load, storage, verdict.stream); },
          [&] { runner_.run(verdict.commands); });
  const nb::object loaded = transfers_.attr("await_load")(entry.object(), value(verdict.load));
  return is_true(loaded) ? storage : nb::none();
}

void bind_saved_tensors(nb::module_& m) {
  nb::class_<Epoch>(m, "Epoch")
      .def_prop_ro("number", [](const Epoch& epoch) { return value(epoch.id()); })
      .def("end", &Epoch::end);
  nb::class_<SavedTensors>(m, "SavedTensors")
      .def(nb::init<const nb::object&, const nb::object&, std::uint64_t, bool>(), nb::arg("transfers"),
           nb::arg("framework"), nb::arg("min_bytes"), nb::arg("use_saved_copy"))
      .def("pack", &SavedTensors::pack, nb::arg("tensor"), nb::arg("saving"),
           nb::sig("def pack(self, tensor: typing.Any, saving: Saving) -> tuple[typing.Any, int] | Ticket"))
      .def(
          "keep", [](SavedTensors& tensors, nb::handle tensor) { return tensors.keep(tensor); }, nb::arg("tensor"),
          nb::sig("def keep(self, tensor: typing.Any) -> tuple[typing.Any, int]"))
      .def(
          "unpack", [](SavedTensors& tensors, nb::handle saved) { return tensors.unpack(saved); }, nb::arg("saved"),
          nb::sig("def unpack(self, saved: tuple[typing.Any, int] | Ticket) -> typing.Any"))
      .def("find", &SavedTensors::find, nb::arg("ticket"), nb::arg("allow_live"),
           nb::sig("def find(self, ticket: Ticket, allow_live: bool) -> typing.Any"))
      .def("begin_epoch", &SavedTensors::begin_epoch, nb::sig("def begin_epoch(self) -> Epoch"))
      .def(
          "end_pass", [](SavedTensors& tensors, std::uint64_t pass_id) { tensors.end_pass(PassId{pass_id}); },
          nb::arg("pass_id"));
}

}  // namespace ebbtide::bindings
