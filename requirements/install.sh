#!/bin/sh
# Makes a virtual environment that runs Livebed: sh requirements/install.sh [DIRECTORY] [runtime|dev]
#
# DIRECTORY is .venv unless given. `dev` (the default) adds what tests and benchmarks need and installs the project
# itself, editable; `runtime` stops at what the service runs on. Environment: PYTHON (the interpreter to use),
# DEVICE=cpu|cuda (cuda where an NVIDIA driver answers, else cpu). Running it again does nothing until a lock file,
# pyproject.toml or this script changes.
#
# torch comes first and alone: PyPI's Linux build needs the CUDA libraries, so on a machine without CUDA we want the
# CPU build of the same version. pip's own configuration is asked first (a mirror or a folder of wheels may hold it),
# then the PyTorch project's index of CPU builds.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv}
scope=${2:-dev}
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '%s\n' "livebed setup: $*"; }
die() { printf '%s\n' "livebed setup: $*" >&2; exit 1; }

case "$scope" in runtime | dev) ;; *) die "unknown scope '$scope'; wanted runtime or dev" ;; esac
case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) ;;
    *) die "this is $(uname -s) on $(uname -m); Livebed runs on Linux (x86-64 or aarch64). Elsewhere use docker-compose.yml" ;;
esac

device=${DEVICE:-auto}
if [ "$device" = auto ]; then
    device=cpu
    if [ "$(uname -m)" = x86_64 ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
        device=cuda
    fi
fi
lock=$root/requirements/$device.txt
[ -f "$lock" ] || die "DEVICE=$device: wanted cpu or cuda"

stamp=$venv/.livebed-setup
wanted="$device $scope $(cat "$lock" "$root/requirements/dev.txt" "$root/pyproject.toml" "$0" | sha256sum | cut -d' ' -f1) $root"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

# 1. The interpreter and its environment.
if [ ! -x "$venv/bin/python" ]; then
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || die "no Python 3.11 or newer among: ${PYTHON:-python3 python3.13 python3.12 python3.11}. Set PYTHON=/path/to/python"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" ||
        die "that Python cannot make virtual environments (on Debian and Ubuntu: apt-get install python3-venv)"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

# 2. torch, first and alone.
torch=$(sed -n 's/^torch==//p' "$lock")
has_torch() {
    [ "$("$venv/bin/python" -c 'from importlib import metadata; print(metadata.version("torch"))' 2>/dev/null)" = "$1" ]
}
install_cpu_torch() {
    has_torch "$torch+cpu" && return
    say "1/4 torch $torch for CPU (about 200 MB)"
    pip install -q --no-deps "torch==$torch+cpu" >"$venv/torch.log" 2>&1 && return
    pip install -q --no-deps "torch==$torch+cpu" --index-url "$torch_cpu_index" >>"$venv/torch.log" 2>&1 && return
    cat "$venv/torch.log" >&2
    die "found no CPU build of torch $torch, neither through pip's configuration nor at $torch_cpu_index"
}
install_cuda_torch() {
    # Three equal signs: exactly this string, so that a CPU build (2.13.0+cpu) lying nearer does not answer.
    has_torch "$torch" || { say "1/4 torch $torch for CUDA (about 550 MB)"; pip install -q --no-deps "torch===$torch"; }
}
"install_${device}_torch"

# 3. Everything else, pinned.
say "2/4 the pinned packages of requirements/$device.txt (about a minute)"
pip install -q --no-deps -r "$lock"
"$venv/bin/python" -c 'import torch' || die "torch was installed but cannot be imported; see the error above"

if [ "$scope" = dev ]; then
    say "3/4 test runner, linters and peers (requirements/dev.txt)"
    pip install -q --no-deps -r "$root/requirements/dev.txt"
    say "4/4 livebed itself, editable"
    pip install -q --no-deps --no-build-isolation -e "$root"
fi
printf '%s' "$wanted" >"$stamp"
say "done: $venv ($device)"
