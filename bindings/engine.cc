#include "ebbtide/engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "command_runner.h"
#include "commands.h"
#include "dropped.h"

namespace nb = nanobind;

namespace ebbtide::bindings {

namespace {

// Holders, whether they were counted, same, intact, spoiled: see ProbeAnswer.
using Answer = std::tuple<std::uint64_t, bool, bool, bool, bool>;

template <auto method>
auto of_run(Engine& engine, std::uint64_t run) {
  return (engine.*method)(RunId{run});
}

void bind_verdicts(nb::module_& m) {
  nb::enum_<RestoreOutcome>(m, "RestoreOutcome", nb::is_arithmetic())
      .value("LIVE", RestoreOutcome::kLive)
      .value("SHARED", RestoreOutcome::kShared)
      .value("LOAD", RestoreOutcome::kLoad)
      .value("PENDING", RestoreOutcome::kPending);
  nb::enum_<KeepReason>(m, "KeepReason")
      .value("PARAMETER", KeepReason::kParameter)
      .value("PARAMETER_CAST", KeepReason::kParameterCast)
      .value("SMALL", KeepReason::kSmall)
      .value("POLICY", KeepReason::kPolicy)
      .value("LAST", KeepReason::kLast)
      .value("UNSUPPORTED", KeepReason::kUnsupported)
      .value("DEVICE", KeepReason::kDevice)
      .value("BUDGET", KeepReason::kBudget)
      .value("HOST_FULL", KeepReason::kHostFull)
      .value("DISK_FULL", KeepReason::kDiskFull)
      .value("CAPTURE", KeepReason::kCapture);
  nb::class_<RunState>(m, "RunState")
      .def_ro("scheduled", &RunState::scheduled)
      .def_ro("leaving", &RunState::leaving)
      .def_ro("away", &RunState::away)
      .def_ro("coming", &RunState::coming)
      .def_ro("back", &RunState::back)
      .def_ro("staying", &RunState::staying);
  nb::class_<RestoreVerdict>(m, "RestoreVerdict")
      .def_prop_ro("outcome", [](const RestoreVerdict& verdict) { return static_cast<int>(verdict.outcome); })
      .def_prop_ro("load", [](const RestoreVerdict& verdict) { return value(verdict.load); })
      .def_ro("allocating", &RestoreVerdict::allocating)
      .def_prop_ro("stream", [](const RestoreVerdict& verdict) { return value(verdict.stream); })
      .def_ro("nbytes", &RestoreVerdict::nbytes)
      .def_ro("residue", &RestoreVerdict::residue)
      .def_prop_ro("commands", [](const RestoreVerdict& verdict) { return verdict.commands; });
}

// Owns one ticket of the engine. Its end is a C++ destructor: no exception out of a signal handler can come before it.
class TicketHold {
 public:
  TicketHold(std::shared_ptr<Dropped> dropped, TicketId ticket) : dropped_(std::move(dropped)), ticket_(ticket) {}
  TicketHold(const TicketHold&) = delete;
  TicketHold& operator=(const TicketHold&) = delete;
  ~TicketHold() {
    if (!usable()) return;
    for (Command& command : dropped_->engine.drop(ticket_)) dropped_->commands.push_back(std::move(command));
    if (dropped_->commands.empty()) return;
    in_destructor([this] {
      const nb::object runner = dropped_->on_drop();
      CommandRunner* here = nullptr;
      if (nb::try_cast(runner, here) && here != nullptr) here->run_dropped(*dropped_);
    });
  }

 private:
  std::shared_ptr<Dropped> dropped_;
  TicketId ticket_;
};

std::int64_t integer(nb::handle number) { return nb::cast<std::int64_t>(number); }

std::vector<std::int64_t> integers(nb::handle tuple) {
  std::vector<std::int64_t> all;
  all.reserve(nb::len(tuple));
  for (const nb::handle number : nb::borrow<nb::tuple>(tuple)) all.push_back(integer(number));
  return all;
}

// Saves, and gives every ticket to a TicketHold. Storages and views are those of ebbtide.framework.
struct Tickets {
  std::shared_ptr<Dropped> dropped;

  // (TicketHold or None, why it is kept, ticket, storage, whether it is new, lease, commands): one for every saved
  // tensor, so a tuple.
  nb::object save(const nb::tuple& storage, const nb::tuple& view, std::uint64_t version, std::uint64_t epoch,
                  std::size_t label, std::uint64_t run, bool on_request, std::uint64_t stream, bool forced,
                  bool spoiled) {
    SaveVerdict verdict = dropped->engine.save(
        {.storage = storage_ref(storage),
         .view = {integer(view[0]), integer(view[1]), integer(view[2]), integers(view[3]), integers(view[4])},
         .version = version,
         .epoch = EpochId{epoch},
         .label = label,
         .run = RunId{run},
         .on_request = on_request,
         .stream = StreamRef{stream},
         .forced = forced,
         .spoiled = spoiled});
    nb::object hold = nb::none();
    if (verdict.outcome != SaveOutcome::kKept) {
      hold = nb::cast(new TicketHold(dropped, verdict.ticket), nb::rv_policy::take_ownership);
    }
    return nb::make_tuple(std::move(hold), verdict.reason, value(verdict.ticket), value(verdict.storage),
                          verdict.outcome == SaveOutcome::kNew, verdict.lease,
                          verdict.commands.empty() ? nb::none() : nb::cast(std::move(verdict.commands)));
  }

  nb::object pop_dropped() {
    std::optional<Command> command = dropped->pop();
    return command ? nb::cast(std::move(*command)) : nb::none();
  }
};

}  // namespace

void bind_engine(nb::module_& m) {
  bind_verdicts(m);
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, std::shared_ptr<BlockSpace> space, std::shared_ptr<BlockSpace> backing,
             std::uint64_t min_bytes, std::uint64_t keep_last_bytes, std::optional<std::uint64_t> keep_last_groups,
             std::uint64_t prefetch_bytes, std::optional<std::uint64_t> prefetch_groups, std::uint64_t in_flight_bytes,
             std::uint64_t max_tier_bytes, std::uint64_t max_backing_bytes, std::uint64_t pack_below_bytes,
             std::uint32_t keep_last_storages, bool prefetch_to_peak) {
            EngineConfig config;
            config.min_bytes = min_bytes;
            config.keep_last_bytes = keep_last_bytes;
            config.keep_last_groups = keep_last_groups;
            config.keep_last_storages = keep_last_storages;
            config.prefetch_bytes = prefetch_bytes;
            config.prefetch_groups = prefetch_groups;
            config.prefetch_to_peak = prefetch_to_peak;
            config.in_flight_bytes = in_flight_bytes;
            config.max_tier_bytes = max_tier_bytes;
            config.max_backing_bytes = max_backing_bytes;
            config.pack_below_bytes = pack_below_bytes;
            new (self) Engine(config, std::move(space), std::move(backing));
          },
          nb::arg("space"), nb::arg("backing").none(), nb::kw_only(), nb::arg("min_bytes"), nb::arg("keep_last_bytes"),
          nb::arg("keep_last_groups").none(), nb::arg("prefetch_bytes"), nb::arg("prefetch_groups").none(),
          nb::arg("in_flight_bytes"), nb::arg("max_tier_bytes"), nb::arg("max_backing_bytes"),
          nb::arg("pack_below_bytes"), nb::arg("keep_last_storages") = 0, nb::arg("prefetch_to_peak") = false)
      .def("begin_epoch", [](Engine& engine) { return value(engine.begin_epoch()); })
      .def(
          "end_epoch", [](Engine& engine, std::uint64_t epoch) { return engine.end_epoch(EpochId{epoch}); },
          nb::arg("epoch"))
      .def(
          "begin_group",
          [](Engine& engine, std::uint64_t epoch, std::size_t label) {
            return engine.begin_group(EpochId{epoch}, label);
          },
          nb::arg("epoch"), nb::arg("label"))
      .def("end_group", &Engine::end_group)
      .def(
          "open_run", [](Engine& engine, std::size_t label) { return value(engine.open_run(label)); }, nb::arg("label"))
      .def(
          "request",
          [](Engine& engine, std::uint64_t run, std::uint64_t identity) { engine.request(RunId{run}, identity); },
          nb::arg("run"), nb::arg("identity"))
      .def("offload_run", &of_run<&Engine::offload_run>, nb::arg("run"))
      .def("let_go_run", &of_run<&Engine::let_go_run>, nb::arg("run"))
      .def("load_run", &of_run<&Engine::load_run>, nb::arg("run"))
      .def(
          "loads_of",
          [](const Engine& engine, std::uint64_t run) {
            std::vector<std::pair<std::uint64_t, std::uint64_t>> loads;
            for (const auto& [storage, copy] : engine.loads_of(RunId{run})) {
              loads.emplace_back(value(storage), value(copy));
            }
            return loads;
          },
          nb::arg("run"))
      .def(
          "order_after_run",
          [](Engine& engine, std::uint64_t run, std::uint64_t stream) {
            return engine.order_after_run(RunId{run}, StreamRef{stream});
          },
          nb::arg("run"), nb::arg("stream"))
      .def("release_run", &of_run<&Engine::release_run>, nb::arg("run"))
      .def("keep_run", &of_run<&Engine::keep_run>, nb::arg("run"))
      .def("close_run", &of_run<&Engine::close_run>, nb::arg("run"))
      .def("run_state", &of_run<&Engine::run_state>, nb::arg("run"))
      .def("gather", &Engine::gather)
      .def("grown", &Engine::grown, nb::arg("ok"))
      .def(
          "recover",
          [](Engine& engine, const std::vector<std::uint64_t>& running) {
            std::vector<CopyId> copies;
            for (const std::uint64_t copy : running) copies.push_back(CopyId{copy});
            return engine.recover(copies);
          },
          nb::arg("running"))
      .def(
          "knows", [](const Engine& engine, std::uint64_t storage) { return engine.knows(StorageId{storage}); },
          nb::arg("storage"))
      .def(
          "label_of", [](const Engine& engine, std::uint64_t storage) { return engine.label_of(StorageId{storage}); },
          nb::arg("storage"))
      .def(
          "running", [](const Engine& engine, std::uint64_t copy) { return engine.running(CopyId{copy}); },
          nb::arg("copy"))
      .def("kept", &Engine::kept, nb::arg("reason"), nb::arg("nbytes"))
      .def(
          "probed",
          [](Engine& engine, std::uint64_t storage, std::uint64_t holders, bool counted, bool same, bool intact,
             bool spoiled) {
            return engine.probed(StorageId{storage}, {holders, counted, same, intact, spoiled});
          },
          nb::arg("storage"), nb::arg("holders"), nb::arg("counted"), nb::arg("same"), nb::arg("intact"),
          nb::arg("spoiled"))
      .def(
          "completed",
          [](Engine& engine, std::uint64_t copy, bool ok, const std::vector<Answer>& answers) {
            std::vector<ProbeAnswer> all;
            for (const auto& [holders, counted, same, intact, spoiled] : answers) {
              all.push_back({holders, counted, same, intact, spoiled});
            }
            return engine.completed(CopyId{copy}, ok, all);
          },
          nb::arg("copy"), nb::arg("ok"), nb::arg("answers"))
      .def(
          "allocated",
          [](Engine& engine, std::uint64_t storage, std::uint64_t load, std::int64_t device, std::uint64_t identity,
             std::uint64_t address, std::uint64_t nbytes, std::uint64_t stream) {
            return engine.allocated(StorageId{storage}, CopyId{load}, {DeviceId{device}, identity, address, nbytes},
                                    StreamRef{stream});
          },
          nb::arg("storage"), nb::arg("load"), nb::arg("device"), nb::arg("identity"), nb::arg("address"),
          nb::arg("nbytes"), nb::arg("stream"))
      .def(
          "allocation_failed",
          [](Engine& engine, std::uint64_t storage, std::uint64_t load) {
            return engine.allocation_failed(StorageId{storage}, CopyId{load});
          },
          nb::arg("storage"), nb::arg("load"))
      .def(
          "restore",
          [](Engine& engine, std::uint64_t ticket, std::uint64_t pass_id, bool live, bool shared,
             std::uint64_t stream) {
            return engine.restore(TicketId{ticket}, PassId{pass_id}, live, shared, StreamRef{stream});
          },
          nb::arg("ticket"), nb::arg("pass_id"), nb::arg("live"), nb::arg("shared"), nb::arg("stream"))
      .def(
          "blocker", [](const Engine& engine, std::uint64_t load) { return value(engine.blocker(CopyId{load})); },
          nb::arg("load"))
      .def(
          "wait_allocated",
          [](Engine& engine, std::uint64_t storage, unsigned limit_ms) {
            return engine.wait_allocated(StorageId{storage}, std::chrono::milliseconds(limit_ms));
          },
          nb::arg("storage"), nb::arg("limit_ms"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "end_pass", [](Engine& engine, std::uint64_t pass_id) { return engine.end_pass(PassId{pass_id}); },
          nb::arg("pass_id"))
      .def("stats", &Engine::stats)
      .def("group_stats", &Engine::group_stats)
      .def("reset_stats", &Engine::reset_stats);
  nb::class_<TicketHold>(m, "TicketHold");
  nb::class_<Tickets>(m, "Tickets")
      .def(
          "__init__",
          [](Tickets* self, nb::object engine, nb::object on_drop) {
            Engine& core = nb::cast<Engine&>(engine);
            new (self) Tickets{std::make_shared<Dropped>(Dropped{std::move(engine), std::move(on_drop), core, {}})};
          },
          nb::arg("engine"), nb::arg("on_drop"), nb::sig("def __init__(self, engine: Engine, on_drop: object) -> None"))
      .def("save", &Tickets::save, nb::arg("storage"), nb::arg("view"), nb::arg("version"), nb::arg("epoch"),
           nb::arg("label"), nb::arg("run"), nb::arg("on_request"), nb::arg("stream"), nb::arg("forced"),
           nb::arg("spoiled"),
           nb::sig(
               "def save(self, storage: tuple[int, int, int, int], view: tuple[object, ...], version: int, epoch: int, "
               "label: int, run: int, on_request: bool, stream: int, forced: bool, spoiled: bool) "
               "-> tuple[TicketHold | None, KeepReason, int, int, bool, bool, Commands | None]"))
      .def(
          "run_dropped", [](Tickets& tickets, CommandRunner& runner) { runner.run_dropped(*tickets.dropped); },
          nb::arg("runner"))
      .def("pop_dropped", &Tickets::pop_dropped, nb::sig("def pop_dropped(self) -> Command | None"));
}

}  // namespace ebbtide::bindings
