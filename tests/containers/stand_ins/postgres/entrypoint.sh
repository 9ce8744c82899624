#!/bin/sh
# As the official image: the first start makes the database with a server that listens on no address.
set -eu
data=/var/lib/postgresql/data
as_postgres() {
    setpriv --reuid postgres --regid postgres --init-groups "$@"
}
chown postgres: "$data" /var/run/postgresql
chmod 700 "$data"
if [ ! -s "$data/PG_VERSION" ]; then
    password=$(mktemp)
    printf %s "${POSTGRES_PASSWORD:-$(cat "${POSTGRES_PASSWORD_FILE:?}")}" > "$password"
    chown postgres: "$password"
    as_postgres initdb -D "$data" --username="$POSTGRES_USER" --pwfile="$password" --auth-host=scram-sha-256 --auth-local=trust
    rm "$password"
    echo "host all all all scram-sha-256" >> "$data/pg_hba.conf"
    as_postgres pg_ctl -D "$data" -w start -o "-c listen_addresses=''"
    as_postgres createdb --username="$POSTGRES_USER" "${POSTGRES_DB:-$POSTGRES_USER}"
    as_postgres pg_ctl -D "$data" -m fast -w stop
fi
exec setpriv --reuid postgres --regid postgres --init-groups postgres -D "$data" -c "listen_addresses=*"
