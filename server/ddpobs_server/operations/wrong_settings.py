"""What is wrong with settings, in lines for an operator."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError

from ddpobs_server.settings import PREFIX, Settings


def problems_of(error: ValidationError) -> list[str]:
    """Return a line for each wrong setting, without its value, which may be a secret."""
    return [
        f"{'.'.join(map(str, detail['loc'])) or 'settings'}: {detail['msg'].removeprefix('Value error, ')}"
        for detail in error.errors()
    ]


def unknown_settings(environ: Iterable[str]) -> list[str]:
    """Return a warning for each `DDPOBS_SERVER_` variable that is not a setting: misspelled, or of another version.

    Variables that Kubernetes sets for a service named `ddpobs-server` are ignored.
    """
    settings = [name.upper() for name in Settings.model_fields]
    warnings = []
    for variable in sorted(environ):
        name = variable.upper().removeprefix(PREFIX)
        if name != variable.upper() and name not in settings and not name.startswith(("SERVICE_", "PORT_")):
            hint = "".join(f"; did you mean {PREFIX}{match}?" for match in get_close_matches(name, settings, 1))
            warnings.append(f"{variable} is not a setting of this version{hint}")
    return warnings
