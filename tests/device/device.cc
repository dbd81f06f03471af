#include "device.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "state.h"

namespace ebbtide::device {

Device::State::State(const Options& asked)
    : options(asked), scheduler(asked.devices, [this](const Task& task) { run(task); }) {
  Lock lock(scheduler.mutex);
  for (int i = 0; i < options.devices; ++i) {
    memories.emplace_back(options.capacity_bytes);
    scheduler.add(i, order.add_stream());
  }
  scheduler.configure(lock, options);
}

void Device::State::fail_if_lost(const char* where) const {
  const std::optional<std::string>& cause = scheduler.lost();
  if (cause) throw DeviceFailure(std::string("[Device.") + where + "] the device is lost: " + *cause);
}

void Device::State::begin_call(const char* where, Operation operation) {
  fail_if_lost(where);
  const std::optional<Strike> strike = count(operation);
  if (strike) throw DeviceFailure(std::string("[Device.") + where + "] " + strike->cause);
}

std::optional<Strike> Device::State::count(Operation operation) {
  const std::optional<Strike> strike = faults.count(operation);
  if (strike && strike->sticky) scheduler.lose(strike->cause);
  return strike;
}

std::shared_ptr<Version>& Device::State::version(const char* where, EventId event) {
  const auto found = events.find(event);
  if (found == events.end()) throw std::invalid_argument(std::string("[Device.") + where + "] there is no such event");
  return found->second;
}

void Device::State::host_sees(const VectorClock& seen, double time_s) {
  order.join(kHost, seen);
  clock.lift_host(time_s);
}

void Device::State::finish_lane(Lock& lock, Lane& lane) {
  const VectorClock seen = order.clock(lane.actor);
  const double time_s = lane.time_s;
  scheduler.finish(lock, lane, lane.issued);
  fail_if_lost("synchronize");
  host_sees(seen, time_s);
}

Device::Device(const Options& options) : state_(std::make_unique<State>(options)) {}

Device::~Device() = default;

Stream Device::new_stream(DeviceIndex device) {
  const Lock lock(state_->scheduler.mutex);
  return state_->scheduler.add(device, state_->order.add_stream()).id;
}

int Device::streams(DeviceIndex device) const {
  const Lock lock(state_->scheduler.mutex);
  return static_cast<int>(state_->scheduler.lanes(device).size());
}

EventId Device::new_event() {
  const Lock lock(state_->scheduler.mutex);
  const auto event = static_cast<EventId>(state_->next_event++);
  state_->events.emplace(event, nullptr);
  return event;
}

void Device::destroy_event(EventId event) {
  const Lock lock(state_->scheduler.mutex);
  state_->events.erase(event);
}

void Device::record(EventId event, Stream stream) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("record", Operation::kRecord);
  Lane& lane = state_->scheduler.lane(stream);
  static_cast<void>(state_->version("record", event));
  state_->scheduler.wait_for_room(lock, lane);
  state_->fail_if_lost("record");
  const auto version = std::make_shared<Version>();
  version->clock = state_->order.clock(lane.actor);
  version->time_s = lane.time_s;
  state_->scheduler.push(lane, {.kind = Task::Kind::kRecord, .version = version});
  state_->version("record", event) = version;
}

void Device::wait(Stream stream, EventId event) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("wait", Operation::kWait);
  Lane& lane = state_->scheduler.lane(stream);
  const std::shared_ptr<Version> version = state_->version("wait", event);
  if (!version) return;
  state_->scheduler.wait_for_room(lock, lane);
  state_->fail_if_lost("wait");
  state_->order.join(lane.actor, version->clock);
  lane.time_s = std::max(lane.time_s, version->time_s);
  state_->scheduler.push(lane, {.kind = Task::Kind::kWait, .version = version});
}

bool Device::query(EventId event) const {
  const Lock lock(state_->scheduler.mutex);
  state_->fail_if_lost("query");
  const std::shared_ptr<Version>& version = state_->version("query", event);
  if (!version) return true;
  if (version->done) state_->order.join(kHost, version->clock);
  return version->done;
}

bool Device::query(Stream stream) const {
  const Lock lock(state_->scheduler.mutex);
  state_->fail_if_lost("query");
  const Lane& lane = state_->scheduler.lane(stream);
  const bool done = Scheduler::idle(lane);
  if (done) state_->order.join(kHost, state_->order.clock(lane.actor));
  return done;
}

void Device::synchronize(EventId event) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("synchronize", Operation::kSynchronize);
  const std::shared_ptr<Version> version = state_->version("synchronize", event);
  if (!version) return;
  state_->scheduler.finish(lock, *version->lane, version->seq);
  state_->fail_if_lost("synchronize");
  state_->host_sees(version->clock, version->time_s);
}

void Device::synchronize(Stream stream) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("synchronize", Operation::kSynchronize);
  state_->finish_lane(lock, state_->scheduler.lane(stream));
}

void Device::synchronize(DeviceIndex device) {
  Lock lock(state_->scheduler.mutex);
  state_->begin_call("synchronize", Operation::kSynchronize);
  std::deque<Lane>& lanes = state_->scheduler.lanes(device);
  for (std::size_t i = 0; i < lanes.size(); ++i) state_->finish_lane(lock, lanes[i]);
}

bool Device::step(Stream stream) {
  Lock lock(state_->scheduler.mutex);
  return state_->scheduler.step(lock, state_->scheduler.lane(stream));
}

std::uint64_t Device::queued(Stream stream) const {
  const Lock lock(state_->scheduler.mutex);
  return Scheduler::queued(state_->scheduler.lane(stream));
}

void Device::fail(Operation operation, std::uint64_t nth, bool sticky) {
  const Lock lock(state_->scheduler.mutex);
  state_->faults.arm(operation, nth, sticky);
}

void Device::clear_faults() {
  const Lock lock(state_->scheduler.mutex);
  state_->faults.clear();
}

void Device::lose() {
  const Lock lock(state_->scheduler.mutex);
  state_->scheduler.lose("lose() was called");
}

void Device::recover() {
  const Lock lock(state_->scheduler.mutex);
  state_->scheduler.recover();
  // What was queued is gone, so nothing of it can touch what comes now.
  state_->scheduler.each_lane([&](Lane& lane) { state_->host_sees(state_->order.clock(lane.actor), lane.time_s); });
}

std::vector<CopyRecord> Device::copies() const {
  const Lock lock(state_->scheduler.mutex);
  return state_->copies;
}

void Device::clear_copies() {
  const Lock lock(state_->scheduler.mutex);
  state_->copies.clear();
}

std::vector<Race> Device::races() const {
  const Lock lock(state_->scheduler.mutex);
  return state_->order.races();
}

void Device::clear_races() {
  const Lock lock(state_->scheduler.mutex);
  state_->order.clear_races();
}

void Device::set_checking(bool happens_before) {
  const Lock lock(state_->scheduler.mutex);
  state_->order.set_enabled(happens_before);
}

double Device::clock_s(Stream stream) const {
  const Lock lock(state_->scheduler.mutex);
  return state_->scheduler.lane(stream).time_s;
}

void Device::set_options(const Options& options) {
  Lock lock(state_->scheduler.mutex);
  state_->scheduler.configure(lock, options);
  const Options before = std::exchange(state_->options, options);
  state_->options.devices = before.devices;
  state_->options.capacity_bytes = before.capacity_bytes;
}

const Options& Device::options() const { return state_->options; }

std::string to_string(Stream stream) { return std::to_string(stream.device) + ":" + std::to_string(stream.number); }

std::string to_string(const Race& race) {
  std::ostringstream text;
  text << race.first << " and " << race.second << " touch [0x" << std::hex << race.begin << ", 0x" << race.end
       << ") without order";
  return text.str();
}

}  // namespace ebbtide::device
