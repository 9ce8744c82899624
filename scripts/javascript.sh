#!/usr/bin/env bash
# Check or format the page's scripts with prettier and eslint, which package-lock.json pins.
# usage: scripts/javascript.sh check|format
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:?usage: scripts/javascript.sh check|format}
scripts=(server/ddpobs_server/page/static/*.js server/ddpobs_server/figures/static/*.js)

# Node.js comes with the Python packages. It trusts the certificates of the machine, as pip does.
export PATH="$PWD/.venv/bin:$PATH" NODE_USE_SYSTEM_CA=1

tools=scripts/node_modules
if [ ! "$tools/.package-lock.json" -nt scripts/package-lock.json ]; then
    npm ci --prefix scripts --loglevel error --no-audit --no-fund
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
