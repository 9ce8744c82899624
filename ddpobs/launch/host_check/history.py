"""What the collector knows of the hosts of a check: earlier checks, and slowness in different runs.

It stops no launch: a host that was repaired would get no run that shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpobs.client.reader import read, send
from ddpobs.config import from_environment
from ddpobs.errors import CollectorError, ConfigError
from ddpobs.launch.host_check.order import DISK, MATRIX, MEASURES, MEMORY
from ddpobs.launch.host_check.result import Result, rate_text
from ddpobs.shared.quantities import counted
from ddpobs.wire import printable

_OWN = (MATRIX, MEMORY, DISK)
"""Measures that do not depend on other hosts."""
_MIN_CHECKS = 3


@dataclass(frozen=True)
class History:
    """What is known of some hosts.

    Attributes:
        slow: By host, its slowness in different runs in words.
        earlier: By host, the number of its earlier checks, and the median rate of each measure.
        missing: Why nothing is known; empty if something is.
    """

    slow: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    missing: str = ""

    def lines(self, result: Result) -> list[str]:
        """A line for each host that was slow in different runs, or is slower than in its earlier checks."""
        if self.missing:
            return [f"not known: the history of the hosts: {self.missing}"]
        names = {printable(host) for host in result.hosts}
        slow = [f"slow in different runs: {text}" for host, text in self.slow.items() if host in names]
        known = [host for host, (checks, _) in self.earlier.items() if host in names and checks >= _MIN_CHECKS]
        if not known:
            reason = f"no host has {_MIN_CHECKS} with as many ranks"
            return [*slow, f"not known: earlier checks: {reason}"]
        slower = [line for host in known for line in self._slower(host, result)]
        return [*slow, *slower, f"compared with earlier checks: {len(known)} of {counted(len(names), 'host')}"]

    def _slower(self, host: str, result: Result) -> list[str]:
        checks, before = self.earlier[host]
        now = rates_of(result)[host]
        return [
            f"{host}: {MEASURES[measure]} slower by {before[name] / now[name]:.2f}× than in {checks} earlier checks "
            f"({rate_text(measure, now[name])}, then {rate_text(measure, before[name])})"
            for measure, name in ((measure, MEASURES[measure]) for measure in _OWN)
            if name in now and name in before and before[name] >= result.limit * now[name]
        ]


def rates_of(result: Result) -> dict[str, dict[str, float]]:
    """Return the median rate of each host's slowest rank by measure; without those that are not known."""
    rates: dict[str, dict[str, float]] = {}
    for host in dict.fromkeys(result.hosts):
        members = [rank for rank, own in enumerate(result.hosts) if own == host]
        medians = {MEASURES[measure]: result.comparisons[measure].rates[members].tolist() for measure in _OWN}
        rates[printable(host)] = {
            name: min(of_ranks) for name, of_ranks in medians.items() if all(rate > 0 for rate in of_ranks)
        }
    return rates


def history(result: Result, environ: Mapping[str, str]) -> History:
    """Store a check with the collector, and return what it knows of the hosts. It raises nothing.

    Args:
        result: The check.
        environ: Environment with the collector's address and token.
    """
    ranks = Counter(map(printable, result.hosts))
    check = {
        "device": result.device,
        "hosts": [{"host": host, "ranks": ranks[host], "rates": rates} for host, rates in rates_of(result).items()],
    }
    try:
        config = from_environment(environ)
        earlier = send(config, "/host-checks", check)["earlier"]
        slow = read(config, "/fleet", {"weeks": "1"}).document["slow_hosts"]
        return History(
            slow={host["host"]: host["text"] for host in slow},
            earlier={host["host"]: (host["checks"], host["rates"]) for host in earlier},
        )
    except (CollectorError, ConfigError) as error:
        return History(missing=str(error))
    except (LookupError, TypeError) as error:
        return History(missing=f"not a collector's reply: {error!r}")
