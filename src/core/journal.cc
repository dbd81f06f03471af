#include "ebbtide/journal.h"

#include "ebbtide/error.h"

namespace ebbtide {

namespace {

struct Answer {
  Engine& engine;

  std::string operator()(const calls::BeginEpoch&) const { return std::to_string(value(engine.begin_epoch())); }
  std::string operator()(const calls::EndEpoch& call) const { return to_string(engine.end_epoch(call.epoch)); }
  std::string operator()(const calls::BeginGroup& call) const {
    return to_string(engine.begin_group(call.epoch, call.label));
  }
  std::string operator()(const calls::EndGroup&) const { return to_string(engine.end_group()); }
  std::string operator()(const calls::Gather&) const { return to_string(engine.gather()); }
  std::string operator()(const calls::Grown& call) const { return to_string(engine.grown(call.ok)); }
  std::string operator()(const calls::Kept& call) const {
    engine.kept(call.reason, call.nbytes);
    return "";
  }
  std::string operator()(const SaveRequest& call) const { return to_string(engine.save(call)); }
  std::string operator()(const calls::Drop& call) const { return to_string(engine.drop(call.ticket)); }
  std::string operator()(const calls::Probed& call) const {
    return to_string(engine.probed(call.storage, call.answer));
  }
  std::string operator()(const calls::Completed& call) const {
    return to_string(engine.completed(call.copy, call.ok, call.answers));
  }
  std::string operator()(const calls::Allocated& call) const {
    return to_string(engine.allocated(call.storage, call.load, call.restored, call.stream));
  }
  std::string operator()(const calls::AllocationFailed& call) const {
    return to_string(engine.allocation_failed(call.storage, call.load));
  }
  std::string operator()(const calls::Restore& call) const {
    return to_string(engine.restore(call.ticket, call.pass, call.live, call.shared, call.stream));
  }
  std::string operator()(const calls::EndPass& call) const { return to_string(engine.end_pass(call.pass)); }
  std::string operator()(const calls::OpenRun& call) const {
    return std::to_string(value(engine.open_run(call.label)));
  }
  std::string operator()(const calls::Request& call) const {
    engine.request(call.run, call.identity);
    return "";
  }
  std::string operator()(const calls::OffloadRun& call) const { return to_string(engine.offload_run(call.run)); }
  std::string operator()(const calls::LetGoRun& call) const { return to_string(engine.let_go_run(call.run)); }
  std::string operator()(const calls::LoadRun& call) const { return to_string(engine.load_run(call.run)); }
  std::string operator()(const calls::OrderAfterRun& call) const {
    return to_string(engine.order_after_run(call.run, call.stream));
  }
  std::string operator()(const calls::ReleaseRun& call) const { return to_string(engine.release_run(call.run)); }
  std::string operator()(const calls::KeepRun& call) const { return to_string(engine.keep_run(call.run)); }
  std::string operator()(const calls::CloseRun& call) const { return to_string(engine.close_run(call.run)); }
};

}  // namespace

std::string answer(Engine& engine, const Call& call) {
  try {
    return std::visit(Answer{engine}, call);
  } catch (const Error& error) {
    return std::string("error: ") + error.what();
  }
}

std::optional<Divergence> replay(const Journal& journal, Engine& engine) {
  for (std::size_t i = 0; i < journal.size(); ++i) {
    const std::string found = answer(engine, journal[i].call);
    if (found != journal[i].answer) return Divergence{i, journal[i].answer, found};
  }
  return std::nullopt;
}

std::string to_string(const SaveVerdict& verdict) {
  static constexpr const char* kNames[] = {"kept", "new", "joined", "duplicate"};
  std::string text = kNames[static_cast<std::size_t>(verdict.outcome)];
  if (verdict.outcome == SaveOutcome::kKept) {
    text += " ";
    text += kKeepReasonNames[static_cast<std::size_t>(verdict.reason)];
  } else {
    text += " storage " + std::to_string(value(verdict.storage)) + " ticket " + std::to_string(value(verdict.ticket));
  }
  if (verdict.lease) text += " lease";
  return text + "\n" + to_string(verdict.commands);
}

std::string to_string(const RestoreVerdict& verdict) {
  static constexpr const char* kNames[] = {"live", "shared", "load", "pending"};
  std::string text = kNames[static_cast<std::size_t>(verdict.outcome)];
  text += " storage " + std::to_string(value(verdict.storage));
  if (verdict.outcome == RestoreOutcome::kLoad) {
    text += ": " + std::to_string(verdict.nbytes) + " bytes at " + std::to_string(verdict.residue);
  }
  if (value(verdict.load) != 0) text += " on copy " + std::to_string(value(verdict.load));
  return text + "\n" + to_string(verdict.commands);
}

}  // namespace ebbtide
