#!/usr/bin/env bash
# Check or format the page's scripts with prettier and eslint, which package-lock.json pins.
# usage: scripts/javascript.sh check|format
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:?usage: scripts/javascript.sh check|format}
scripts=(server/ddpobs_server/page/static/*.js server/ddpobs_server/figures/static/*.js)

if ! command -v node >/dev/null || ! command -v npm >/dev/null; then
    echo "THE PAGE'S SCRIPTS ARE NOT CHECKED: prettier and eslint need Node.js and npm. As root: apt-get install npm" >&2
    [ "${CI:-}" != true ] # With CI=true a missing tool is a failure.
    exit
fi

tools=scripts/node_modules
if [ ! "$tools/.package-lock.json" -nt scripts/package-lock.json ]; then
    npm ci --prefix scripts --silent --no-audit --no-fund
    touch "$tools/.package-lock.json"
fi
prettier=("$tools/.bin/prettier" --config scripts/package.json)
eslint=("$tools/.bin/eslint" --config scripts/eslint.config.js)
if [ "$task" = format ]; then
    "${prettier[@]}" --log-level warn --write "${scripts[@]}"
    "${eslint[@]}" --fix "${scripts[@]}"
else
    "${prettier[@]}" --check "${scripts[@]}"
    "${eslint[@]}" "${scripts[@]}"
fi
