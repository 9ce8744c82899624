"""Settings of the collector: each is `DDPOBS_SERVER_<NAME>` in the environment; some are also flags of `serve`."""

from __future__ import annotations

import os
import re
from base64 import b64decode
from collections.abc import Collection
from functools import cached_property, lru_cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, DotEnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError
from typing_extensions import override

from ddpobs.wire.text import clean_token

_DAYS = 36_500
"""A century: times are stored as 64-bit nanoseconds."""
PREFIX = "DDPOBS_SERVER_"
"""Begin of each setting's variable."""
_PRINTED = (
    *("host", "hostaddr", "port", "user", "dbname", "service", "connect_timeout", "application_name"),
    *("target_session_attrs", "sslmode", "sslrootcert", "sslcert", "sslkey"),
)
"""Options of libpq that are printed. Any other may be a password, also a misspelled one."""
_GROUP = re.compile(r"([^=:,]+)=([a-z0-9-]{1,32}):(read|label|admin)")
_DRIVERS = ("sqlite", "postgresql+psycopg")


class Settings(BaseSettings):
    """All settings of the collector; `docs/operations/` describes them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, allow_inf_nan=False)

    settings_file: Path | None = Field(
        None, description="File of settings, DDPOBS_SERVER_NAME=value a line; the environment comes before it."
    )
    host: str = Field(
        "127.0.0.1",
        description="Addresses to listen on, separated by commas; without a token only loopback is allowed.",
    )
    port: int = Field(8321, ge=0, le=65535, description="Port to listen on; 0 selects a free port.")
    database_url: str = Field("sqlite:///ddpobs.db", description="SQLAlchemy URL of the database.")
    prepare_threshold: PositiveInt | Literal["off"] = Field(
        5, description="Executions after which PostgreSQL prepares a statement; `off` behind a pool."
    )
    ingest_only: bool = Field(
        False, description="Only take batches; another collector on the database serves reads and diagnoses runs."
    )
    token: SecretStr | None = Field(None, description="Bearer token required under /api and /metrics.")
    token_file: Path | None = Field(None, description="File of such tokens, one a line; read again while in use.")
    max_body_mb: float = Field(16, gt=0, description="Largest request body, in MB (10^6 bytes).")
    max_batch_mb: float = Field(16, gt=0, description="Largest batch after decompression, in MB.")
    max_under_way_mb: float = Field(512, gt=0, le=10**9, description="Memory of batches from arrival to commit, in MB.")
    upload_timeout_s: float = Field(60, gt=0, description="Longest time for a body to arrive; a slower one gets 408.")
    max_import_mb: float = Field(4096, gt=0, description="Largest size of the files of one import, in MB.")
    import_memory_mb: int = Field(4096, ge=512, description="Memory of the process that reads an import, in MB.")
    import_timeout_s: float = Field(
        600, gt=0, description="Longest time for the files of an import to arrive, and then to be read."
    )
    queue_batches: int = Field(1024, gt=0, description="Batches that may wait for the writer; further ones get 503.")
    max_records: int = Field(100_000, gt=0, description="Records of a batch: rows of columns and all other records.")
    max_names: int = Field(200_000, gt=0, description="Names in a batch, such as parameter names.")
    max_name_length: int = Field(1024, gt=0, le=1024, description="Characters of a name.")
    max_layouts: int = Field(1000, gt=0, description="DDP modules of a process, and layouts of a module.")
    max_buckets: int = Field(10_000, gt=0, le=2**20, description="Buckets of all DDP modules of a run.")
    max_ranks: int = Field(16_384, gt=0, le=2**20, description="Largest world size.")
    max_sources: int = Field(100_000, gt=0, description="Sources of a run: its processes, over all attempts.")
    max_runs: int = Field(10_000, gt=0, description="Runs of a workspace.")
    max_run_series: int = Field(500_000, gt=0, description="Series that a run has in /metrics.")
    max_series: int = Field(1_000_000, gt=0, description="Series that a workspace's active runs have in /metrics.")
    min_pace_kb_s: float = Field(
        8, gt=0, description="Slowest pace of a body and of the reader of a response, in kB/s."
    )
    workspace_share: float = Field(
        0.5, gt=0, le=1, description="Largest part of shared memory and places for a workspace, if there are several."
    )
    workspace_batches_per_s: float | None = Field(None, gt=0, description="Batches a second of a workspace.")
    workspace_mb_per_s: float | None = Field(None, gt=0, description="MB of bodies a second of a workspace.")
    workspace_reads_per_s: float | None = Field(None, gt=0, description="Reads and scrapes a second of a workspace.")
    workspace_keep_gb: float | None = Field(None, gt=0, description="Stored GB of a workspace; old data are removed.")
    lost_after_s: float = Field(30, gt=0, description="Seconds without a pulse after which a run is lost.")
    stalled_after_s: float = Field(
        60, gt=0, description="Seconds with pulses but without a step after which a run is stalled."
    )
    quiet_after_s: float = Field(
        300, gt=0, le=86_400 * _DAYS, description="Seconds of silence after which a run leaves /metrics."
    )
    gpu_hour_price: float | None = Field(
        None, ge=0, description="Price of an hour of a GPU (of a rank without one), for the account of a run."
    )

    keep_spans_days: float | None = Field(
        None, gt=0, le=_DAYS, description="Age at which spans and steps are deleted; their sums stay."
    )
    keep_runs_days: float | None = Field(
        None, gt=0, le=_DAYS, description="Days of silence after which a whole run is deleted."
    )
    keep_gb: float | None = Field(None, gt=0, description="Largest size of the database, in GB (10^9 bytes).")
    keep_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Largest share of the data that the first round of retention removes by age; 1 allows all.",
    )
    keep_free_mb: float = Field(
        100,
        ge=0,
        description="Free MB on SQLite's disk below which batches get 507; deleting runs needs space too.",
    )

    audit_entries: PositiveInt = Field(
        100_000, le=10**7, description="Latest entries of the audit log that each workspace keeps."
    )

    tls_cert: Path | None = Field(None, description="Certificate chain (PEM); the collector then serves HTTPS only.")
    tls_key: Path | None = Field(
        None, description="Private key of the certificate (PEM), unless the certificate's file contains it."
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*/?$",
        description="Path under which a proxy serves the collector, as /ddpobs.",
    )
    public_url: str = Field(
        "",
        pattern=r"^(https?://[A-Za-z0-9._~:/%\[\]-]+)?$",
        description="Address at which people open the page, for links from Grafana and alerts, as https://ddpobs.example.",
    )
    grafana_url: str = Field(
        "",
        pattern=r"^(https?://[A-Za-z0-9._~:/%\[\]-]+)?$",
        description="Address at which people open Grafana, for links from alerts, as https://grafana.example.",
    )
    keep_alive_s: int = Field(
        75, gt=0, le=86_400, description="Seconds a connection may stay idle; longer than a load balancer's own limit."
    )
    trusted_proxies: str = Field(
        "", description="Addresses and networks, separated by commas, whose X-Forwarded-For is trusted."
    )
    sign_on_proxies: str = Field(
        "",
        description="Addresses and networks, separated by commas, of a proxy that signs people on; empty for none.",
    )
    sign_on_user_header: str = Field(
        "X-WEBAUTH-USER", pattern=r"^[A-Za-z0-9-]+$", description="Header in which that proxy names the person."
    )
    sign_on_groups_header: str = Field(
        "X-WEBAUTH-GROUPS",
        pattern=r"^[A-Za-z0-9-]+$",
        description="Header in which that proxy lists the person's groups, separated by commas.",
    )
    sign_on_groups: str = Field(
        "*=default:read",
        description=(
            "Access as GROUP=WORKSPACE:read, :label or :admin, separated by commas; the first group of a person "
            "decides, and * is everybody."
        ),
    )
    webhook_url: SecretStr | None = Field(None, description="Address that receives findings; a flag would show it.")
    webhook_form: Literal["json", "slack"] = Field("json", description="Form of these messages: json or slack.")
    webhook_secret: SecretStr | None = Field(
        None, description="Key of the messages' signatures: whsec_ and 24 to 64 bytes in Base64."
    )
    webhook_severity: Literal["warning", "critical"] = Field(
        "critical", description="Least severity of a finding that is sent; a lost run always is."
    )
    webhook_after_s: float = Field(60, ge=0, description="Seconds for which a finding holds before it is sent.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe lines written.")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="`auto`: text on a terminal, JSON elsewhere."
    )
    access_log: bool = Field(False, description="Write a line for every request, not only for errors and refusals.")

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments first, then the environment, then the settings' file that the environment names."""
        file = os.environ.get(f"{PREFIX}SETTINGS_FILE")
        readable = file if file and os.access(file, os.R_OK) else None  # `_check_settings_file` reports another one.
        return init_settings, env_settings, DotEnvSettingsSource(settings_cls, env_file=readable)

    @field_validator("settings_file")
    @classmethod
    def _check_settings_file(cls, value: Path | None) -> Path | None:
        if value is not None and not (value.is_file() and os.access(value, os.R_OK)):
            raise ValueError(f"{value} is no file that can be read")
        return value

    @field_validator("port", mode="before")
    @classmethod
    def _ignore_service_address(cls, value: Any) -> Any:
        """Return the default for a service's address.

        If a Kubernetes service is named `ddpobs-server`, every container gets its address in this variable.
        """
        is_address = isinstance(value, str) and value.startswith(("tcp://", "udp://"))
        return cls.model_fields["port"].default if is_address else value

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, value: str) -> str:
        expected = "expected sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
        try:
            url = make_url(value)
        except (ArgumentError, ValueError):
            raise ValueError(f"{expected}, got a value that is not a URL") from None  # It may contain a password.
        if url.drivername not in _DRIVERS:
            raise ValueError(f"{expected}, got {url.drivername}")
        if "@" in (url.host or "") or ("@" in (url.database or "") and url.drivername != "sqlite"):
            # A part of the password would be taken for the host, and be printed.
            raise ValueError(f"{expected}, got an address with several @: write %40 for an @ in a user or password")
        if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
            raise ValueError(f"{expected}, got a database in memory, which would be a separate one in each thread")
        return value

    @field_validator("trusted_proxies", "sign_on_proxies")
    @classmethod
    def _check_proxies(cls, value: str) -> str:
        for proxy in filter(None, map(str.strip, value.split(","))):
            try:
                ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"expected addresses or networks as 10.0.0.7 or 10.0.0.0/24, got {proxy}") from error
        return value

    @field_validator("sign_on_groups")
    @classmethod
    def _check_groups(cls, value: str) -> str:
        for entry in filter(None, map(str.strip, value.split(","))):
            if _GROUP.fullmatch(entry) is None:
                raise ValueError(f"expected GROUP=WORKSPACE:read, :label or :admin, as ml=team:read, got {entry!r}")
        return value

    @model_validator(mode="after")
    def _check_key_has_certificate(self) -> Settings:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key is set but no tls_cert: set both, or DDPOBS_SERVER_TLS_CERT alone")
        return self

    @field_validator("token")
    @classmethod
    def _clean_token(cls, value: SecretStr | None) -> SecretStr | None:
        try:
            return None if value is None else SecretStr(clean_token(value.get_secret_value()))
        except ValueError as error:
            raise ValueError(f"{error}; or unset DDPOBS_SERVER_TOKEN") from None

    @field_validator("webhook_url")
    @classmethod
    def _check_webhook_url(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            url = urlsplit(value.get_secret_value())
            if url.scheme not in ("http", "https") or not url.hostname:  # The value itself is a secret.
                raise ValueError(f"expected http://HOST/… or https://HOST/…, got the scheme {url.scheme!r}")
        return value

    @field_validator("webhook_secret")
    @classmethod
    def _check_webhook_secret(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and len(webhook_key(value.get_secret_value())) not in range(24, 65):
            raise ValueError(
                'expected whsec_ and 24 to 64 bytes in Base64, as of echo "whsec_$(openssl rand -base64 32)"'
            )
        return value

    @model_validator(mode="after")
    def _check_token_file(self) -> Settings:
        if self.token_file is not None and not self.file_tokens():
            raise ValueError(f"token_file: {self.token_file} has no token")
        return self

    def file_tokens(self) -> list[str]:
        """Tokens in `token_file`, one a line; several are valid during a rotation.

        Raises:
            ValueError: The file cannot be read, or has a malformed token.
        """
        if self.token_file is None:
            return []
        try:
            lines = self.token_file.read_text().splitlines()
        except OSError as error:
            raise ValueError(f"token_file: {self.token_file} cannot be read: {error.strerror}") from None
        try:
            return [clean_token(line) for line in lines if line.strip()]
        except ValueError as error:
            raise ValueError(f"token_file: {self.token_file}: {error}") from None

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        if not all(host.strip() for host in value.split(",")):
            raise ValueError(f"expected addresses separated by commas, such as 0.0.0.0,::, got {value!r}")
        return value

    @field_validator("root_path", "public_url", "grafana_url")
    @classmethod
    def _drop_final_slash(cls, value: str) -> str:
        return value.rstrip("/")

    def adopt(self, other: Settings, names: Collection[str]) -> list[str]:
        """Take over some settings of another object, at once; only a reload changes settings.

        Returns:
            Names of the settings that differed, in their order here.
        """
        changed = [name for name in self.differing(other) if name in names]
        vars(self).update({name: getattr(other, name) for name in changed})
        return changed

    def differing(self, other: Settings) -> list[str]:
        """Return the names of the settings that differ from those of another object."""
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)]

    @property
    def statement_threshold(self) -> int | None:
        """`prepare_threshold` in the driver's form: None for never."""
        return None if self.prepare_threshold == "off" else self.prepare_threshold

    @property
    def has_token(self) -> bool:
        """Whether the settings have a token."""
        return self.token is not None or self.token_file is not None

    @cached_property
    def hosts(self) -> list[str]:
        """Addresses to listen on."""
        return [host.strip() for host in self.host.split(",")]

    @property
    def listed_sign_on_proxies(self) -> list[str]:
        """Addresses and networks of the proxy that signs people on; empty for none."""
        return [proxy for part in self.sign_on_proxies.split(",") if (proxy := part.strip())]

    @property
    def sign_on_access(self) -> list[tuple[str, str, str]]:
        """Group, workspace and access of each entry of `sign_on_groups`."""
        return [(match[1].strip(), match[2], match[3]) for match in _GROUP.finditer(self.sign_on_groups)]

    @cached_property
    def on_loopback(self) -> bool:
        """Whether only this machine can connect: the hosts are loopback and no trusted proxy forwards requests."""
        return all(map(_is_loopback, self.hosts)) and not self.trusted_proxies

    @property
    def database_file(self) -> Path | None:
        """Absolute path of SQLite's file; None for another database."""
        return sqlite_file(self.database_url)

    @property
    def database(self) -> str:
        """Printable URL of the database."""
        return printable_url(self.database_url)


def webhook_key(secret: str) -> bytes:
    """Key of a webhook's secret in the form of Standard Webhooks; empty if it has another form."""
    try:
        return b64decode(secret.removeprefix("whsec_"), validate=True) if secret.startswith("whsec_") else b""
    except ValueError:
        return b""


def sqlite_file(database_url: str) -> Path | None:
    """Absolute path of a URL's SQLite file; None for another database."""
    url = make_url(database_url)
    return Path(url.database).resolve() if url.get_backend_name() == "sqlite" and url.database else None


def printable_url(database_url: str) -> str:
    """URL without passwords and unknown options, and with the absolute path of SQLite's file."""
    url, file = make_url(database_url), sqlite_file(database_url)
    url = url.difference_update_query([name for name in url.query if name not in _PRINTED])
    return (url if file is None else url.set(database=str(file))).render_as_string()


@lru_cache
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
