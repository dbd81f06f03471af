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
#include "commands.h"

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
  nb::class_<SaveVerdict>(m, "SaveVerdict")
      .def_prop_ro("kept", [](const SaveVerdict& verdict) { return verdict.outcome == SaveOutcome::kKept; })
      .def_prop_ro("ticket", [](const SaveVerdict& verdict) { return value(verdict.ticket); })
      .def_prop_ro("storage", [](const SaveVerdict& verdict) { return value(verdict.storage); })
      .def_ro("lease", &SaveVerdict::lease)
      .def_prop_ro("commands", [](const SaveVerdict& verdict) { return verdict.commands; });
  nb::class_<RestoreVerdict>(m, "RestoreVerdict")
      .def_prop_ro("outcome", [](const RestoreVerdict& verdict) { return static_cast<int>(verdict.outcome); })
      .def_prop_ro("load", [](const RestoreVerdict& verdict) { return value(verdict.load); })
      .def_ro("allocating", &RestoreVerdict::allocating)
      .def_prop_ro("stream", [](const RestoreVerdict& verdict) { return value(verdict.stream); })
      .def_ro("nbytes", &RestoreVerdict::nbytes)
      .def_ro("residue", &RestoreVerdict::residue)
      .def_prop_ro("commands", [](const RestoreVerdict& verdict) { return verdict.commands; });
}

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
      .def(
          "save",
          [](Engine& engine, const nb::tuple& storage, const nb::tuple& view, std::uint64_t version,
             std::uint64_t epoch, std::size_t label, std::uint64_t stream) {
            return engine.save({.storage = storage_ref(storage),
                                .view = view_meta(view),
                                .version = version,
                                .epoch = EpochId{epoch},
                                .label = label,
                                .stream = StreamRef{stream}});
          },
          nb::arg("storage"), nb::arg("view"), nb::kw_only(), nb::arg("version"), nb::arg("epoch"), nb::arg("label"),
          nb::arg("stream"),
          nb::sig("def save(self, storage: tuple[int, int, int, int], view: tuple[object, ...], *, version: int, "
                  "epoch: int, label: int, stream: int) -> SaveVerdict"))
      .def(
          "drop", [](Engine& engine, std::uint64_t ticket) { return engine.drop(TicketId{ticket}); }, nb::arg("ticket"))
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
}

}  // namespace ebbtide::bindings
