#!/bin/sh
# Builds Citus from its SOURCE against Debian's PostgreSQL, then measures a cluster of three nodes on this machine.
#   apt-get install postgresql-15 postgresql-server-dev-15 libkrb5-dev liblz4-dev libssl-dev libzstd-dev
#   sudo benchmarks/citus.sh SOURCE [--json FILE]
# SOURCE is a copy of Citus 11.2 to 13.2, which supports PostgreSQL 15; files are built in it. PG_CONFIG names another
# PostgreSQL, PYTHON another interpreter.
set -eu
source=$(realpath "${1:?the folder of the source of Citus}")
shift
PG_CONFIG=$(realpath "${PG_CONFIG:-/usr/lib/postgresql/15/bin/pg_config}")
export PG_CONFIG
cd "$(dirname "$0")/.."

if [ ! -e "$("$PG_CONFIG" --pkglibdir)/citus.so" ]; then
    # From 15.19 on, PostgreSQL exports a function that Citus 13.2 defines itself.
    if grep -q have_createdb_privilege "$("$PG_CONFIG" --includedir-server)/commands/dbcommands.h"; then
        sed -i 's/^have_createdb_privilege(void)/citus_&/' "$source/src/include/pg_version_compat.h"
    fi
    (cd "$source" && ./configure --without-libcurl && make with_llvm=no extension && make with_llvm=no install-extension)
fi
exec "${PYTHON:-python}" -m benchmarks.citus --programs "$("$PG_CONFIG" --bindir)" "$@"
