"""Settings of the collector: each is `DDPOBS_SERVER_<NAME>` in the environment, the first four also flags."""

from __future__ import annotations

from ipaddress import ip_address

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What an operator may set."""

    model_config = SettingsConfigDict(env_prefix="DDPOBS_SERVER_", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on; without a token only loopback is allowed.")
    port: int = Field(8321, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    database_url: str = Field("sqlite:///ddpobs.db", description="SQLAlchemy URL of the database.")
    token: SecretStr | None = Field(None, description="Bearer token asked for under /api and /metrics.")
    max_body_mb: float = Field(16, gt=0, description="Largest request body, in MB (10^6 bytes).")
    max_batch_mb: float = Field(64, gt=0, description="Largest batch after decompression, in MB.")
    queue_batches: int = Field(1024, gt=0, description="Batches that may wait for the writer; more are answered 503.")
    lost_after_s: float = Field(30, gt=0, description="A run without pulses for so long is lost, in seconds.")
    stalled_after_s: float = Field(60, gt=0, description="A run with pulses but no steps for so long is stalled.")
    quiet_after_s: float = Field(300, gt=0, description="A run silent for so long leaves /metrics, in seconds.")

    @model_validator(mode="after")
    def _no_open_door(self) -> Settings:
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("the token is empty: choose one, or leave DDPOBS_SERVER_TOKEN unset")
        if self.token is None and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is not loopback, and there is no token: anyone could read and write. "
                "Set --token (DDPOBS_SERVER_TOKEN), or listen on 127.0.0.1"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
