#!/usr/bin/env bash
# Start the Docker engine, and get the base images of server/Dockerfile and of the compose files. If no registry is
# reached, Debian's packages give stand-ins under the same names; Grafana has none.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! docker info >/dev/null 2>&1; then
    # The service cannot start where the limit of open files is below its own, as in some virtual machines.
    service docker start >/dev/null 2>&1 || setsid dockerd >/var/log/docker.log 2>&1 </dev/null &
    for _ in $(seq 120); do
        ! docker info >/dev/null 2>&1 || break
        sleep 0.5
    done
    docker info >/dev/null || { tail -n 20 /var/log/docker.log >&2; exit 1; }
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT

debian() {
    docker image inspect ddpobs-stand-in:debian >/dev/null 2>&1 && return
    local root
    root=$(mktemp -d)
    debootstrap --variant=minbase --include=ca-certificates bookworm "$root" http://deb.debian.org/debian >"$log" ||
        { cat "$log" >&2; return 1; }
    rm -rf "$root"/var/cache/apt/archives "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}
    tar -C "$root" -c . | docker import - ddpobs-stand-in:debian >&2
    rm -rf "$root"
}

image() {
    local name=$1 stand_in=tests/containers/stand_ins/$2
    if docker image inspect "$name" >/dev/null 2>&1; then
        docker image inspect "$name" | grep -q '"ddpobs.stand-in"' || return 0
    elif docker pull -q "$name" >/dev/null 2>&1; then
        return 0
    fi
    # A stand-in that is there is built again, from cached layers, because its files may have changed.
    echo "$name is a stand-in of Debian's packages: $stand_in" >&2
    debian
    docker build --label ddpobs.stand-in=true -t "$name" "$stand_in" >"$log" 2>&1 || { cat "$log" >&2; return 1; }
}

python=$(sed -n 's/^FROM \([^ ]*\)$/\1/p' server/Dockerfile)
image "$python" python
for name in $(sed -n 's/^ *image: //p' docker-compose.yml deploy/two-collectors.yml | sort -u); do
    case $name in
        postgres:*) image "$name" postgres ;;
        prom/prometheus:*) image "$name" prometheus ;;
        prom/alertmanager:*) image "$name" alertmanager ;;
        nginx:*) image "$name" nginx ;;
        *) docker pull -q "$name" >/dev/null 2>&1 || echo "$name is missing and has no stand-in." >&2 ;;
    esac
done
