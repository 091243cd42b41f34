#!/usr/bin/env bash
# Makes a Python 3.11 for aarch64 in a folder, with all that gputop needs, and prints the command that runs it here:
#     GPUTOP_ARM_PYTHON=$(tests/arm_python.sh DIR) python -m pytest -n 0 tests/test_arm.py
# QEMU's user emulation, the Python and its libraries are Debian 12's, the wheels those of the package index: 0.5 GB.
# Nothing is installed. Needs apt-get, dpkg, Debian's keyring and pip.
set -eu
gputop=$(cd "$(dirname "$0")/.." && pwd)
dir=$(mkdir -p "$1" && cd "$1" && pwd)
if [ ! -e "$dir/done" ]; then
  cd "$dir"
  mkdir -p lists/partial cache/archives/partial parts root emulator
  : > status
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" > sources
  debian() {  # ARCHITECTURE WORDS...: apt-get with lists and a cache of its own
    timeout 300 apt-get -qq -y -o APT::Architecture="$1" -o APT::Architectures="$1" -o Dir::State="$dir" \
      -o Dir::State::status="$dir/status" -o Dir::Cache="$dir/cache" -o Dir::Etc::SourceList="$dir/sources" \
      -o Dir::Etc::SourceParts="$dir/parts" -o Debug::NoLocking=1 -o APT::Sandbox::User=root "${@:2}" >&2
  }
  debian amd64 update
  debian amd64 download qemu-user-static
  dpkg -x qemu-user-static_*.deb emulator
  debian arm64 update
  debian arm64 --no-install-recommends --download-only install python3 libstdc++6
  for package in cache/archives/*.deb; do
    dpkg -x "$package" root
  done
  python3 -m pip install --quiet --disable-pip-version-check --ignore-installed --target site --only-binary=:all: \
    --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 --implementation cp --python-version 3.11 \
    textual'<9' nvidia-ml-py psutil numpy msgspec grpcio protobuf >&2
  rm -rf cache lists ./*.deb
  : > done
fi
echo "$dir/emulator/usr/bin/qemu-aarch64-static -L $dir/root -E PYTHONPATH=$dir/site:$gputop" \
  "-E PYTHONDONTWRITEBYTECODE=1 $dir/root/usr/bin/python3"
