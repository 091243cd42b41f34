#!/usr/bin/env bash
# Unpacks what some tests need from Debian into a folder, and prints the folder to put into PATH:
#     PATH=$PATH:$(tests/debian_packages.sh DIR [PROGRAM...])
# A real Prometheus, a Slurm of two nodes, sshd, chrony, a headless browser (86 MB). Nothing is installed and no service is started; what is there already is
# left alone. Where the packages cannot be had it says so on stderr, prints DIR/bin all the same and succeeds: the tests
# that need them skip. As root, with CI set, it makes the system user that sshd asks for.
set -u
dir=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
bin=$dir/bin
mkdir -p "$bin" "$dir/archives/partial"
declare -A package=([prometheus]=prometheus [promtool]=prometheus [victoria-metrics]=victoria-metrics [sshd]=openssh-server [ssh]=openssh-client
  [slurmctld]=slurmctld [slurmd]=slurmd [squeue]=slurm-client [sinfo]=slurm-client [sbatch]=slurm-client
  [scancel]=slurm-client [scontrol]=slurm-client [chronyd]=chrony [chronyc]=chrony [chromium-headless-shell]=chromium-headless-shell)
export PATH=$PATH:/usr/sbin:/sbin
wanted=()
for program in "${@:2}" $([ $# -gt 1 ] || echo "${!package[@]}"); do
  command -v "$program" > /dev/null || [ -x "$bin/$program" ] || wanted+=("${package[$program]}")
done

fetch() {  # with all that they depend on and that is not installed
  timeout 30 apt-get -qq -y -o Dir::Cache::archives="$dir/archives" -o Debug::NoLocking=1 --no-install-recommends \
    --download-only install "$@" > /dev/null 2>&1
}

fetch_wanted() {  # the browser last: it is larger than all the rest, which is there all the same where it takes too long
  local browser=
  for i in "${!wanted[@]}"; do
    if [ "${wanted[i]}" = chromium-headless-shell ]; then
      unset "wanted[i]"
      browser=1
    fi
  done
  [ ${#wanted[@]} = 0 ] || fetch_all
  [ -z "$browser" ] || fetch chromium-headless-shell ||
    { timeout 20 apt-get -qq update > /dev/null 2>&1; fetch chromium-headless-shell; } || echo "no chromium-headless-shell here: its test skips" >&2
}

fetch_all() {  # a release may lack one of them: then those that it has, for a minute at most
  fetch "${wanted[@]}" && return
  timeout 20 apt-get -qq update > /dev/null 2>&1
  fetch "${wanted[@]}" && return
  local lacking=()
  for name in "${wanted[@]}"; do
    { [ $SECONDS -lt 60 ] && fetch "$name"; } || lacking+=("$name")
  done
  [ ${#lacking[@]} = 0 ] || echo "no ${lacking[*]} here: their tests skip" >&2
}

wrap() {  # a script that starts a program with the libraries beside it
  local place=$dir/$1 more=${2-} name=$bin/${1##*/}
  [ -x "$place" ] || return 0
  printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s\nexec %s %s "$@"\n' "$libraries" "$place" "$more" > "$name"
  chmod +x "$name"
}

if [ ${#wanted[@]} -gt 0 ] && command -v apt-get > /dev/null && command -v dpkg > /dev/null; then
  mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | sort -u)
  fetch_wanted
  for deb in "$dir"/archives/*.deb; do
    [ -e "$deb" ] && dpkg -x "$deb" "$dir"
  done
  rm -rf "$dir/archives"
  for daemon in "$dir"/usr/sbin/*-wlm; do  # as an installation would: Slurm's daemons go by the name they are called by
    [ -e "$daemon" ] && ln -sf "${daemon##*/}" "${daemon%-wlm}"
  done
  lib=$dir/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2> /dev/null || echo "$(uname -m)-linux-gnu")
  libraries=$lib:$lib/slurm-wlm:$lib/pulseaudio:$dir/lib/${lib##*/}
  for program in usr/bin/{prometheus,promtool,victoria-metrics,ssh,squeue,sinfo,sbatch,scancel,scontrol,chronyc} usr/sbin/{sshd,slurmctld,chronyd}; do
    wrap "$program"
  done
  if [ -d "$dir/usr/lib/chromium" ] && [ -d /usr/lib/chromium ]; then  # it wants beside it what is installed already
    ln -s /usr/lib/chromium/* "$dir/usr/lib/chromium" 2> /dev/null
  fi
  wrap usr/lib/chromium/chromium-headless-shell
  if [ -x "$bin/chromium-headless-shell" ] && ! "$bin/chromium-headless-shell" --version > /dev/null 2>&1; then
    echo "chromium-headless-shell does not start here: its test skips" >&2
    rm "$bin/chromium-headless-shell"
  fi
  wrap usr/sbin/slurmd "-d $dir/usr/sbin/slurmstepd"
  [ -d "$lib/slurm-wlm" ] && ln -sfn "$lib/slurm-wlm" "$dir/slurm-plugins"
fi
if [ -n "${CI-}" ] && [ "$(id -u)" = 0 ] && ! id sshd > /dev/null 2>&1; then
  useradd --system --no-create-home --home-dir /run/sshd --shell /usr/sbin/nologin sshd > /dev/null 2>&1
fi
echo "$bin"
