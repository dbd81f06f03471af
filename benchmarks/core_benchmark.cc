// The engine and the planner alone: no executor, no Python. Items per second are saves, spans or blocks.
#include <benchmark/benchmark.h>

#include <memory>

#include "ebbtide/checksum.h"
#include "ebbtide/engine.h"
#include "ebbtide/host_pool.h"
#include "ebbtide/plan.h"

namespace ebbtide {
namespace {

std::shared_ptr<HostPool> make_pool() { return std::make_shared<HostPool>(make_pageable_slab_source()); }

SaveRequest activation(std::uint64_t identity, EpochId epoch) {
  return {.storage = {DeviceId{0}, identity, identity * 4096, 1 << 20},
          .view = {0, 4, 0, {8, 128, 256}, {32768, 256, 1}},
          .version = 0,
          .epoch = epoch};
}

// A tensor that is already known: one look-up, one ticket, and its drop.
void BM_SaveExactDuplicate(benchmark::State& state) {
  Engine engine({.keep_last_bytes = 1 << 30}, make_pool());
  const SaveRequest request = activation(1, engine.begin_epoch());
  const SaveVerdict first = engine.save(request);
  for (auto _ : state) {
    const SaveVerdict verdict = engine.save(request);
    benchmark::DoNotOptimize(engine.drop(verdict.ticket));
  }
  state.SetItemsProcessed(state.iterations());
  benchmark::DoNotOptimize(engine.drop(first.ticket));
}
BENCHMARK(BM_SaveExactDuplicate);

// A new storage that stays in the window, and its drop.
void BM_SaveNewStorage(benchmark::State& state) {
  Engine engine({.keep_last_bytes = std::uint64_t{1} << 40}, make_pool());
  const EpochId epoch = engine.begin_epoch();
  std::uint64_t identity = 0;
  for (auto _ : state) {
    const SaveVerdict verdict = engine.save(activation(++identity, epoch));
    benchmark::DoNotOptimize(engine.drop(verdict.ticket));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_SaveNewStorage);

void BM_PlanOffload(benchmark::State& state) {
  ByteRanges missing;
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    const auto begin = static_cast<std::uint64_t>(i) * 1024;
    missing.add({begin, begin + 512});
  }
  for (auto _ : state) {
    benchmark::DoNotOptimize(plan_offload({Tier::kDevice, 1 << 20, 0}, missing, {Tier::kHost, 1 << 30, 0}));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_PlanOffload)->Arg(100'000)->Unit(benchmark::kMillisecond);

// From the views of one storage to its copies: union of extents, then the plan.
void BM_PlanFromViews(benchmark::State& state) {
  const auto views = static_cast<std::uint64_t>(state.range(0));
  for (auto _ : state) {
    ByteRanges wanted;
    for (std::uint64_t i = 0; i < views; ++i) {
      wanted.add(extent({static_cast<std::int64_t>(i * 256), 4, 0, {16, 8}, {8, 1}}));
    }
    benchmark::DoNotOptimize(plan_offload({Tier::kDevice, 1 << 20, 0}, wanted, {Tier::kHost, 1 << 30, 0}));
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_PlanFromViews)->Arg(100'000)->Unit(benchmark::kMillisecond);

void BM_HostPoolBlock(benchmark::State& state) {
  HostPool pool(make_pageable_slab_source());
  const auto nbytes = static_cast<std::uint64_t>(state.range(0));
  for (auto _ : state) {
    const std::optional<Block> block = pool.allocate(nbytes, std::uint64_t{1} << 40);
    pool.free(*block);
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_HostPoolBlock)->Arg(4096)->Arg(8 << 20);

void BM_Checksum(benchmark::State& state) {
  const std::vector<char> bytes(static_cast<std::size_t>(state.range(0)), 'x');
  for (auto _ : state) benchmark::DoNotOptimize(checksum(bytes.data(), bytes.size()));
  state.SetBytesProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_Checksum)->Arg(8 << 20);

}  // namespace
}  // namespace ebbtide
