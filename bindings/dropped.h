// What the ends of tickets left to do.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <optional>
#include <utility>

#include "ebbtide/engine.h"

namespace ebbtide::bindings {

// What the tickets of one engine share: it, and the commands that their ends gave and nobody has run yet. `on_drop` is
// called for who runs them: a CommandRunner, or None where that was done or nobody is there any more.
struct Dropped {
  nanobind::object engine_object;
  nanobind::object on_drop;
  Engine& engine;
  std::deque<Command> commands;

  [[nodiscard]] std::optional<Command> pop() {
    if (commands.empty()) return std::nullopt;
    Command command = std::move(commands.front());
    commands.pop_front();
    return command;
  }
};

}  // namespace ebbtide::bindings
