// Errors of the core. Each text says place, numbers and next step:
// "[HostPool.allocate] 2.0 GiB asked, 1.5 GiB limit: raise max_host_bytes or add a disk tier".
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ebbtide {

// One kind per Python exception class of ebbtide.errors; the bindings translate by this.
enum class ErrorKind : std::uint8_t { kUsage, kHostMemory, kDevice, kSpill, kCorruption };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, int os_error = 0)
      : std::runtime_error(text), kind_(kind), os_error_(os_error) {}

  [[nodiscard]] ErrorKind kind() const { return kind_; }
  // errno of the failed system call, 0 where there was none.
  [[nodiscard]] int os_error() const { return os_error_; }

 private:
  ErrorKind kind_;
  int os_error_;
};

// "1.5 GiB", "640 KiB", "12 bytes".
std::string format_bytes(std::uint64_t nbytes);

}  // namespace ebbtide
