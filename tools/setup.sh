#!/bin/sh
# Makes everything ready, then runs the command it was given:
#
#   tools/setup.sh uv run cllm serve          the whole environment in .venv, llama.cpp compiled
#   tools/setup.sh --cluster uv run pytest    with Ray as well (the extra "cluster", 500 MB)
#   tools/setup.sh --torch uv run pytest      with PyTorch for CPUs as well (the extra "torch", 750 MB), and transformers
#   tools/setup.sh --no-llama uv run mypy     enough to check the sources; compiles nothing
#
# It installs into this checkout only (.venv, .tools; downloads are shared in uv's cache).
# When everything is there it costs a tenth of a second and says nothing.
set -eu
cd "$(dirname "$0")/.."

say() { printf 'cllm: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

main() {
  ensure_uv
  with=--inexact without= torch= # so that Ray and PyTorch stay where they are not asked for
  if [ "${1:-}" = --torch ]; then
    shift
    torch=yes
  fi
  if [ "${1:-}" = --cluster ]; then
    shift
    with="$with --extra cluster"
  fi
  if [ "${1:-}" = --no-llama ]; then
    shift
    # A complete .venv serves as well, and must not lose its llama.cpp.
    ready || { UV_PROJECT_ENVIRONMENT=.tools/check-venv without="--no-install-package llama-cpp-python"; }
  fi
  export UV_PROJECT_ENVIRONMENT
  ready || install
  [ -z "$torch" ] || has_torch || install_torch
  export UV_NO_SYNC=1
  exec "$@"
}

ensure_uv() {
  # Older ones do not know extra-build-variables and would quietly compile a llama.cpp that crashes.
  case $(uv --version 2>/dev/null) in '' | 'uv 0.'[0-8].*) ;; *) return ;; esac
  PATH=$PWD/.tools/bin:$PATH
  [ ! -x .tools/bin/uv ] || return 0
  python=$(find_python)
  say "fetching uv into .tools"
  "$python" -m venv .tools/uv >&2 || die "$python cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)"
  log=.tools/setup.log
  fetch_uv >"$log" 2>&1 || {
    certificates_failed pip && { fetch_uv --cert "$(certificates)" || fetch_uv --use-feature=truststore; } >>"$log" 2>&1
  } || { cat "$log" >&2; die "pip could not fetch uv from PyPI: check the network, or install uv yourself"; }
  mkdir -p .tools/bin && ln -sf ../uv/bin/uv .tools/bin/uv
}

fetch_uv() { .tools/uv/bin/pip install --disable-pip-version-check "$@" uv; }

# Behind a proxy that inspects TLS only the system knows the certificates; pip and uv bring their own.
certificates_failed() {
  grep -qiE 'certificate.?verify.?failed|invalid peer certificate|self.signed certificate' "$log" || return 1
  say "$1 does not know the certificate of the package index: trying again with the system's certificates"
}

certificates() {
  for file in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
    [ ! -r "$file" ] || { echo "$file"; return; }
  done
}

find_python() {
  for python in python3 python3.14 python3.13 python3.12 python3.11; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo "$python" && return
  done
  no_python
}

no_python() {
  die "Python 3.11 to 3.14 is needed and $(python3 --version 2>/dev/null || echo 'no python3') is on PATH: install one (Debian: apt install python3 python3-venv; macOS: brew install python@3.13)"
}

ready() { uv sync --check $with $without --offline --quiet >/dev/null 2>&1; }

install() {
  uv python find --no-project --quiet '>=3.11,<3.15' >/dev/null 2>&1 || no_python
  ! answer=$(install_from_cache) || return 0
  # Only the compilation was missing then; asking the index would lose what was compiled with other settings.
  case $answer in *'build backend returned an error'*) offline=--offline ;; *) offline= ;; esac
  mkdir -p .tools/tmp
  find .tools/tmp -mindepth 1 -maxdepth 1 -type d -mmin +60 -exec rm -rf {} + # left by compilations that were killed
  log=.tools/setup.log begun=$(date +%s)
  : >"$log"
  if [ -z "$without" ] && ! has_llama; then
    # The compilers that are checked here are the ones that are used.
    CC=${CC:-$(first cc gcc clang)} CXX=${CXX:-$(first c++ g++ clang++)}
    [ -n "$CC" ] && [ -n "$CXX" ] || die "a C++ compiler is needed to build llama.cpp: install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
    case $("$CXX" --version 2>/dev/null) in *clang*) CXX=$(without_gcc_switches "$CXX") ;; esac
    SKBUILD_CMAKE_ARGS="${SKBUILD_CMAKE_ARGS:+$SKBUILD_CMAKE_ARGS;}-DCMAKE_PROJECT_llama.cpp_INCLUDE=$PWD/native/llama.cmake"
    export CC CXX SKBUILD_CMAKE_ARGS
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    say "fetching the Python packages and compiling llama.cpp for this machine," \
      "about $((3 / cores + 1)) to $((9 / cores + 2)) minutes on $cores cores. Later starts skip this."
  fi
  work=$PWD/.tools/tmp/run.$$
  mkdir -p "$work"
  report_progress &
  reporter=$!
  trap 'clean_up' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  # In the foreground, so that Ctrl-C reaches it. The compilation lies in TMPDIR, where its progress can be counted.
  status=0
  sync_environment >"$log" 2>&1 || status=$?
  if [ "$status" != 0 ] && certificates_failed uv; then
    export UV_SYSTEM_CERTS=true UV_NATIVE_TLS=true # the second is what older ones call it
    status=0
    sync_environment >"$log" 2>&1 || status=$?
  fi
  trap - EXIT INT TERM
  clean_up
  [ ! -t 2 ] || printf '\r\033[K' >&2
  [ "$status" = 0 ] || { show_failure >&2; die "set-up failed; all of it is in $log"; }
  [ "$(seconds)" -lt 5 ] || say "ready after $(elapsed)"
}

# Comes before the index is asked: if its answer has no ETag, uv fetches the sources of llama.cpp again, and then no
# longer finds what it compiled from the old ones. These compilers fail, so that nothing is compiled out of sight.
install_from_cache() { CC=false CXX=false uv sync --offline --quiet $with $without </dev/null 2>&1; }

sync_environment() { env -u MAKEFLAGS TMPDIR="$work" uv sync $offline $with $without </dev/null; }

clean_up() {
  kill "$reporter" 2>/dev/null || :
  rm -rf "$work" || : # compilers that have not heard of the end yet may still write
}

# uv records with which variables of pyproject.toml it built a package; one of them names the state of native/.
has_llama() {
  kernels=$(grep -o 'CLLM_KERNELS=[0-9a-f]*' pyproject.toml)
  cat "$UV_PROJECT_ENVIRONMENT"/lib/python3*/site-packages/llama_cpp_python-*/uv_build.json 2>/dev/null | grep -qF "$kernels"
}

has_torch() {
  packages=$(echo "$UV_PROJECT_ENVIRONMENT"/lib/python3*/site-packages)
  [ -d "$packages/torch" ] && [ -d "$packages/transformers" ]
}

# Not from uv.lock, whose PyTorch for Linux brings gigabytes of CUDA. pip may have been told of a folder with a wheel for
# CPUs; otherwise it comes from PyTorch's own index. Tests compare its results with those of transformers.
install_torch() {
  links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} source="--torch-backend cpu"
  ! ls "$links"/torch-"$TORCH"+cpu-*.whl >/dev/null 2>&1 || source="--find-links $links"
  say "fetching PyTorch $TORCH for CPUs"
  # shellcheck disable=SC2086 # two words
  uv pip install --quiet --python "$UV_PROJECT_ENVIRONMENT" $source "torch==$TORCH" "transformers==$TRANSFORMERS" >&2 \
    || die "PyTorch could not be fetched: install it into $UV_PROJECT_ENVIRONMENT yourself"
}

# The cause stands before the compiler's long output, what it says about it at the end.
show_failure() {
  grep -E '(error|cause|FAILED):' "$log" | cut -c 1-300 | head -n 10
  echo ...
  tail -n 25 "$log" | cut -c 1-300
}

# clang does not know the switches that pyproject.toml has for GCC, and does not need them.
without_gcc_switches() {
  mkdir -p .tools/bin
  {
    echo '#!/bin/sh'
    echo 'for a; do shift; case $a in'
    echo '  -fno-tree-sra | -fno-tree-dse | -fno-dse | -fschedule-insns | -fsched-pressure | -frecord-gcc-switches) ;;'
    echo '  *) set -- "$@" "$a" ;; esac; done'
    echo "exec $1 \"\$@\""
  } >.tools/bin/c++
  chmod +x .tools/bin/c++ && echo "$PWD/.tools/bin/c++"
}

first() { for name; do command -v "$name" && return; done || :; }

seconds() { echo $(($(date +%s) - begun)); }
elapsed() { s=$(seconds); echo "$((s / 60)) min $((s % 60)) s"; }

# One line that renews itself on a terminal, a line every 30 s in a log.
report_progress() {
  every=30 before= after='\n'
  [ ! -t 2 ] || every=2 before='\r\033[K' after=
  while sleep $every >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    printf "${before}cllm: %s, %s${after}" "$(elapsed)" "$(stage)" >&2
  done
}

stage() {
  commands=$(find "$work" -name compile_commands.json 2>/dev/null | head -n 1)
  if [ -n "$commands" ]; then
    echo "compiling llama.cpp: $(find "${commands%/*}" -name '*.o' | wc -l | tr -d ' ') of $(grep -c '"file":' "$commands") files"
  else
    tail -n 1 "$log" | sed 's/^ *//'
  fi
}

TORCH=2.13.0 TRANSFORMERS=5.24.0
UV_PYTHON_DOWNLOADS=never # the system's Python is used; PyPI is the only place asked
UV_PROJECT_ENVIRONMENT=${UV_PROJECT_ENVIRONMENT:-.venv}
export UV_PYTHON_DOWNLOADS
unset VIRTUAL_ENV
main "$@"
