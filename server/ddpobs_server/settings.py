"""Settings of the collector: each is `DDPOBS_SERVER_<NAME>` in the environment; some are flags of `serve`, too."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

_DAYS = 36_500
"""A century: times are held in 64 bits of nanoseconds."""
_PREFIX = "DDPOBS_SERVER_"
_SECRETS = ("password", "sslpassword")
"""What libpq also takes in a URL's query."""
_DRIVERS = ("sqlite", "postgresql+psycopg")


class Settings(BaseSettings):
    """What an operator may set."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, frozen=True, allow_inf_nan=False)

    host: str = Field("127.0.0.1", description="Address to listen on; without a token only loopback is allowed.")
    port: int = Field(8321, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    database_url: str = Field("sqlite:///ddpobs.db", description="SQLAlchemy URL of the database.")
    token: SecretStr | None = Field(None, description="Bearer token asked for under /api and /metrics.")
    max_body_mb: float = Field(16, gt=0, description="Largest request body, in MB (10^6 bytes).")
    max_batch_mb: float = Field(16, gt=0, description="Largest batch after decompression, in MB.")
    max_under_way_mb: float = Field(512, gt=0, le=10**9, description="Memory of batches from arrival to commit, in MB.")
    upload_timeout_s: float = Field(60, gt=0, description="A body that takes longer to arrive is answered 408.")
    queue_batches: int = Field(1024, gt=0, description="Batches that may wait for the writer; more are answered 503.")
    max_records: int = Field(100_000, gt=0, description="Records of a batch: rows of columns, and all others.")
    max_names: int = Field(200_000, gt=0, description="Names in a batch, such as those of parameters.")
    max_name_length: int = Field(1024, gt=0, le=1024, description="Characters of a name.")
    max_layouts: int = Field(1000, gt=0, description="DDP modules of a process, and layouts of a module.")
    max_buckets: int = Field(10_000, gt=0, le=2**20, description="Buckets of a DDP module.")
    max_ranks: int = Field(16_384, gt=0, le=2**20, description="Largest world size.")
    max_sources: int = Field(100_000, gt=0, description="Sources of a run: its processes, over all attempts.")
    max_runs: int = Field(10_000, gt=0, description="Runs of a workspace.")
    lost_after_s: float = Field(30, gt=0, description="A run without pulses for so long is lost, in seconds.")
    stalled_after_s: float = Field(60, gt=0, description="A run with pulses but no steps for so long is stalled.")
    quiet_after_s: float = Field(
        300, gt=0, le=86_400 * _DAYS, description="A run silent for so long leaves /metrics, in seconds."
    )

    keep_spans_days: float | None = Field(
        None, gt=0, le=_DAYS, description="Spans and steps older than this go; sums stay."
    )
    keep_runs_days: float | None = Field(None, gt=0, le=_DAYS, description="Runs silent for so long go altogether.")
    keep_gb: float | None = Field(None, gt=0, description="Most that the database may hold, in GB (10^9 bytes).")
    keep_free_mb: float = Field(
        100,
        ge=0,
        description="With less free on SQLite's disk batches are answered 507: to remove runs takes room, too.",
    )

    tls_cert: Path | None = Field(None, description="Certificate chain, PEM; with it the collector speaks HTTPS alone.")
    tls_key: Path | None = Field(None, description="The certificate's key, PEM, where its own file does not hold it.")
    trusted_proxies: str = Field(
        "", description="Addresses and networks, with commas between, whose X-Forwarded-For is believed."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least serious lines written.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="`auto`: text on a terminal, else JSON.")
    access_log: bool = Field(False, description="A line for every request, not for errors and refusals alone.")

    @field_validator("port", mode="before")
    @classmethod
    def _no_address_of_a_service(cls, given: Any) -> Any:
        """Kubernetes gives every container the address of a service `ddpobs-server` under this very name."""
        service = isinstance(given, str) and given.startswith(("tcp://", "udp://"))
        return cls.model_fields["port"].default if service else given

    @field_validator("database_url")
    @classmethod
    def _one_that_is_known(cls, value: str) -> str:
        expected = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError(f"{expected}, got what is no URL") from None  # It may hold a password.
        if url.drivername not in _DRIVERS:
            raise ValueError(f"{expected}, got {url.drivername}")
        if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
            raise ValueError(f"{expected}, got a database in memory, which each thread would have one of")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _addresses_or_networks(cls, value: str) -> str:
        for part in filter(None, map(str.strip, value.split(","))):
            try:
                ip_network(part)
            except ValueError as error:
                raise ValueError(f"expected addresses or networks as 10.0.0.7 or 10.0.0.0/24, got {part}") from error
        return value

    @model_validator(mode="after")
    def _no_key_alone(self) -> Settings:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("there is a tls_key and no tls_cert: set both, or DDPOBS_SERVER_TLS_CERT alone")
        return self

    @model_validator(mode="after")
    def _no_empty_token(self) -> Settings:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("the token is empty: choose one, or leave DDPOBS_SERVER_TOKEN unset")
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it: no proxy that is known of hands requests on."""
        return _is_loopback(self.host) and not self.trusted_proxies

    @property
    def database_file(self) -> Path | None:
        """SQLite's file, with its whole path; None with another database."""
        url = make_url(self.database_url)
        return Path(url.database).resolve() if url.get_backend_name() == "sqlite" and url.database else None

    @property
    def database(self) -> str:
        """The database's URL to show: no password, and SQLite's file with its whole path."""
        url, file = make_url(self.database_url).difference_update_query(_SECRETS), self.database_file
        return (url if file is None else url.set(database=str(file))).render_as_string()


def unknown(environ: Iterable[str]) -> list[str]:
    """A line for each name that would be a setting and is none, as those of other versions and misspelled ones.

    Kubernetes gives every container names of a service `ddpobs-server`: those are nobody's settings.
    """
    known = [name.upper() for name in Settings.model_fields]
    lines = []
    for name in sorted(environ):
        given = name.upper().removeprefix(_PREFIX)
        if given != name.upper() and given not in known and not given.startswith(("SERVICE_", "PORT_")):
            near = "".join(f"; {_PREFIX}{one} is" for one in get_close_matches(given, known, 1))
            lines.append(f"{name} is no setting of this version{near}")
    return lines


@lru_cache
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
