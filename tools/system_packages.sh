#!/usr/bin/env bash
# Check what only the system can bring, and install what is missing where that is possible
# (root on Debian or a relative of it). Elsewhere: say exactly what to install.
#
# Usage: system_packages.sh NEED...   with needs: python compiler gtest benchmark
# Honours PYTHON (default python3) and CXX (default c++).
set -euo pipefail

python=${PYTHON:-python3}
cxx=${CXX:-c++}

has_header() { echo "#include <$1>" | $cxx -std=c++20 -E -x c++ - >/dev/null 2>&1; }
has_compiler() { echo 'int main() {}' | $cxx -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; }
has_python() {
  "$python" - 2>/dev/null <<'PY'
import os, sys, sysconfig
import ensurepip, venv
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(sys.version_info < (3, 10) or not os.path.exists(header))
PY
}

missing() {
  case $1 in
    python) ! has_python ;;
    compiler) ! has_compiler ;;
    gtest) ! has_header gtest/gtest.h ;;
    benchmark) ! has_header benchmark/benchmark.h ;;
    *) echo "[system_packages] unknown need $1" >&2; exit 2 ;;
  esac
}

packages_for() {
  case $1 in
    python)
      if command -v "$python" >/dev/null; then
        "$python" -c 'import sys; v = "python%d.%d" % sys.version_info[:2]; print(v + "-venv", v + "-dev")'
      else
        echo python3 python3-venv python3-dev
      fi ;;
    compiler) echo g++ ;;
    gtest) echo libgtest-dev ;;
    benchmark) echo libbenchmark-dev ;;
  esac
}

apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  # The package lists may be absent or too old: only then fetch them.
  apt-get install -y --no-install-recommends "$@" || { apt-get update && apt-get install -y --no-install-recommends "$@"; }
}

needs=() packages=()
for need in "$@"; do
  if missing "$need"; then
    needs+=("$need")
    read -ra names <<<"$(packages_for "$need")"
    packages+=("${names[@]}")
  fi
done
((${#needs[@]})) || exit 0

if ((EUID == 0)) && command -v apt-get >/dev/null; then
  echo "+ apt-get install ${packages[*]}"
  apt_install "${packages[@]}" || echo "[system_packages] apt-get could not install ${packages[*]}" >&2
fi

failed=0
for need in "${needs[@]}"; do
  missing "$need" || continue
  names=$(packages_for "$need")
  case $need in
    gtest | benchmark) echo "[system_packages] $names not installed: CMake will download a release instead" ;;
    python)
      echo "[system_packages] PYTHON=$python must be Python 3.10 or newer with venv, ensurepip and headers: on Debian 'apt-get install $names' as root, elsewhere install them or set PYTHON" >&2
      failed=1 ;;
    compiler)
      echo "[system_packages] CXX=$cxx does not compile C++20: on Debian 'apt-get install $names' as root, elsewhere install GCC 12 or a Clang of that age or newer, or set CXX" >&2
      failed=1 ;;
  esac
done
exit "$failed"
