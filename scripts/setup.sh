#!/usr/bin/env bash
# Everything that a fresh machine needs: a virtual environment, the dependencies, and on Debian as root the packages.
# usage: scripts/setup.sh demo|test
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:?usage: scripts/setup.sh demo|test}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ddpobs needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Say PYTHON=/path/to/python make …" >&2
    exit 1
}

debian_packages() {
    local missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        echo "NOT INSTALLED, needs root: apt-get install ${missing[*]} (the tests that need them say so)" >&2
        return 0
    fi
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

if [ "$what" = test ]; then
    if command -v apt-get >/dev/null; then
        debian_packages prometheus chromium docker-compose iproute2 nginx-light openssl
    else
        echo "Not Debian: install prometheus and chromium yourself; the tests that need them say so" >&2
    fi
fi

stamp=.venv/.ddpobs-$what
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "installing torch and what else is needed into .venv: a few minutes" >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # torch first and pinned, so that nothing else pulls another build. TORCH_INDEX_URL chooses where it comes from,
    # such as https://download.pytorch.org/whl/cpu for the CPU build.
    .venv/bin/python -m pip install -q -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
    extras=train,server
    [ "$what" = demo ] || extras=dev
    .venv/bin/python -m pip install -q -c constraints.txt -e ".[$extras]"
    touch "$stamp"
fi
