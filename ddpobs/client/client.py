"""`ddpobs.Client`: a collector's runs, for notebooks and scripts.

run = ddpobs.Client("http://collector:8321").run("gpt-77")
run.steps(rank=3)["backward_ns"].mean()
run.spans(first=100, last=110).to_pandas()
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ddpobs.client.columns import Columns, html_table
from ddpobs.client.figure import LEGEND_COLUMNS, Figure
from ddpobs.client.reader import change, page_address, read, read_file
from ddpobs.config import TelemetryConfig, from_environment
from ddpobs.shared.words import finding_heading, finding_lines, percent

_MAX_POINTS = "10000"


class Client:
    """A collector.

    Args:
        url: Its address; None for the address in `DDPOBS_TELEMETRY`, or `http://127.0.0.1:8321`.
        token: Token with the scope read; None for that of the environment.

    Raises:
        ConfigError: An argument or a variable has an invalid value.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        environ = {**os.environ, "DDPOBS_TELEMETRY": os.environ.get("DDPOBS_TELEMETRY", "")}
        changes = {"collector": url, "token": token}
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        self._config = replace(from_environment(environ), **given)

    def run(self, name: str) -> Run:
        """Return a run; its data are read when they are requested.

        Raises:
            ConfigError: The name is not a run id.
        """
        return Run(replace(self._config, run=name), name)

    def runs(self, limit: int = 50, search: str = "") -> list[Run]:
        """Return the newest runs, the newest first.

        Args:
            limit: Most runs.
            search: Words between spaces. A run's name, host, note or #tag must have each, in any case of its letters.

        Raises:
            CollectorError: The collector does not answer, or refuses.
        """
        query = {"limit": str(limit)} | ({"search": search} if search else {})
        listed = read(self._config, "/runs", query).document["runs"]
        return [self.run(run["run"]) for run in listed]

    def fleet(self, weeks: int = 12, tag: str | None = None) -> dict[str, Any]:
        """Return the rank time of all runs over weeks, slow hosts, and regressions, as the collector's JSON has them.

        Args:
            weeks: Number of weeks, with the present one.
            tag: Only runs with this tag; None for all.

        Raises:
            CollectorError: The collector does not answer, or refuses.
        """
        query = {"weeks": str(weeks)} | ({} if tag is None else {"tag": tag})
        document: dict[str, Any] = read(self._config, "/fleet", query).document
        return document

    def __repr__(self) -> str:
        return f"Client({self._config.collector!r})"


class Findings(list[dict[str, Any]]):
    """Findings as the collector's JSON has them, the most severe first."""

    def _repr_html_(self) -> str:
        return "".join(map(_finding_html, self)) or "<p>no findings</p>"


class Account(dict[str, Any]):
    """Where the run's wall time went, as the collector's JSON has it."""

    def _repr_html_(self) -> str:
        rows = [(part["title"], percent(part["share"], 1)) for part in self["parts"] if part["share"]]
        return html_table(("part", "share"), rows)


class Run:
    """A run of a collector. Its methods raise `CollectorError` if the collector does not answer, or refuses.

    Args:
        config: Address and token of the collector.
        name: Name of the run.
    """

    def __init__(self, config: TelemetryConfig, name: str) -> None:
        self._config, self.name = config, name

    @property
    def address(self) -> str:
        """Address of the run's page."""
        return page_address(self._config.collector, self.name)

    def summary(self) -> dict[str, Any]:
        """State, attempts, world size and counts."""
        document: dict[str, Any] = self._read("").document
        return document

    def findings(self, first: int | None = None, last: int | None = None) -> Findings:
        """Findings on the whole run, or on the steps `first` to `last`."""
        return Findings(self._read("/diagnostics", _query(first=first, last=last)).document["findings"])

    def account(self) -> Account:
        """Where the run's wall time went."""
        return Account(self._read("/account").document)

    def ranks(self) -> list[dict[str, Any]]:
        """Processes of the latest attempt: host, state, last pulse, and times per step in nanoseconds."""
        ranks: list[dict[str, Any]] = self._read("/ranks").document["ranks"]
        return ranks

    def steps(self, rank: int | None = None, first: int | None = None, last: int | None = None) -> Columns:
        """Steps, sorted by step and rank.

        Args:
            rank: One rank; None for all.
            first: First step; None for the run's.
            last: Last step; None for the run's.

        Returns:
            The columns of `wire.Steps` and `rank`; durations in nanoseconds. Unknown values are masked.
        """
        return _joined(self.pages("steps", rank, first, last))

    def spans(self, rank: int | None = None, first: int | None = None, last: int | None = None) -> Columns:
        """Bucket spans, sorted by step and rank; arguments as for `steps`.

        Returns:
            The columns of `wire.Spans`, `rank`, and the times on one rank's clock (`aligned_…`). Unknown values are
            masked.
        """
        return _joined(self.pages("spans", rank, first, last))

    def pages(
        self, kind: str, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> Iterator[Columns]:
        """Read steps or spans piece by piece, in the responses of the collector.

        Args:
            kind: `steps` or `spans`.
            rank: One rank; None for all.
            first: First step; None for the run's.
            last: Last step; None for the run's.
        """
        # Without a first step the collector responds with the latest steps only.
        start: int | None = first or 0
        while start is not None:
            document = self._read(f"/{kind}", _query(rank=rank, first=start, last=last)).document
            yield Columns(document["columns"])
            start = document["next"]

    def step_times(self, rank: int, first: int | None = None, last: int | None = None) -> Columns:
        """Begin, end (Unix time in nanoseconds) and phases of a rank's steps.

        Args:
            rank: The rank.
            first: First step; None for the run's.
            last: Last step; None for the run's.

        Returns:
            The columns of `/steps?points=`: one row a step, or a bin of steps if there are more than 10,000.
        """
        start: int | None = first or 0
        parts = []
        while start is not None:
            query = _query(rank=rank, first=start, last=last) | {"points": _MAX_POINTS}
            document = self._read("/steps", query).document
            parts.append(Columns(document["columns"]))
            start = document["next"]
        return _joined(iter(parts))

    @property
    def figures(self) -> list[str]:
        """Names of the figures that `figure` returns, in the order of the page."""
        return [figure["figure"] for figure in read(self._config, "/figures").document["figures"]]

    def figure(
        self,
        name: str,
        rank: int | None = None,
        first: int | None = None,
        last: int | None = None,
        *,
        step: int | None = None,
        bucket: str = "",
        match: str = "",
        order: Literal["cost", "rank", "host"] = "cost",
        dark: bool = False,
    ) -> Figure:
        """Return a figure of the run's page, drawn from the data of this moment.

        Args:
            name: One of `figures`.
            rank: Rank of the figure `phases`, and the first row of `step`.
            first: First step; None for the run's.
            last: Last step; None for the run's.
            step: The step of the figure `step`; None for a typical one of the latest.
            bucket: The bucket that the figure `step` is about, such as `0.2`; empty for none.
            match: Ranks, ranges of ranks or a part of a host's name, with commas between them, for `ranks` and `step`.
            order: Order of the ranks in `ranks`.
            dark: Colours for a dark notebook.
        """
        choices: dict[str, object] = {"step": step, "bucket": bucket or None, "match": match or None, "order": order}
        choices |= {"legend": LEGEND_COLUMNS, "dark": "true" if dark else None}
        query = _query(rank=rank, first=first, last=last)
        query |= {key: str(value) for key, value in choices.items() if value is not None}
        path = f"/runs/{self.name}/figures/{quote(name, safe='')}"
        document = read(self._config, path, query).document
        return Figure(document, lambda: read_file(self._config, f"{path}.html", query))

    def whatif(self, **changes: object) -> dict[str, Any]:
        """Return the predicted time of a step after a change, with an interval, as `/whatif` of the REST API does.

        Args:
            changes: Its query parameters: `bucket_cap_mb="1,5,best"`, `compression="fp16"`, `accumulate=4`, …
        """
        document: dict[str, Any] = self._read("/whatif", whatif_query(**changes)).document
        return document

    def set_labels(self, tags: Sequence[str] | None = None, note: str | None = None) -> None:
        """Replace the run's tags, its note, or both; a token needs the scope ingest, too.

        Args:
            tags: At most 16 words, by which the run is found in the list; None leaves them.
            note: A text about the run, for people; None leaves it.
        """
        labels = {"tags": None if tags is None else list(tags), "note": note}
        given = {name: value for name, value in labels.items() if value is not None}
        change(self._config, f"/runs/{self.name}", given)

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def _repr_html_(self) -> str:
        summary = self.summary()
        link = f'<a href="{escape(self.address, quote=True)}">{escape(self.name)}</a>'
        facts = f"{summary['state']}, {summary['steps']} steps, {summary['ranks']} ranks"
        return f"<p>{link}: {escape(facts)}</p>{self.findings()._repr_html_()}"

    def _read(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        return read(self._config, f"/runs/{self.name}{path}", query)


def whatif_query(**changes: object) -> dict[str, str]:
    """Return the query of `/whatif` for the given changes; None leaves a thing as it is."""
    given = {name: value for name, value in changes.items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}


def _finding_html(finding: Mapping[str, Any]) -> str:
    lines = [f"{label}: {escape(text)}" for label, text in finding_lines(finding)]
    return "<p>" + "<br>".join([f"<b>{escape(finding_heading(finding))}</b>", *lines]) + "</p>"


def _joined(pages: Iterator[Columns]) -> Columns:
    parts = list(pages)
    return Columns({name: _concatenated([part[name] for part in parts]) for name in parts[0]})


def _concatenated(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    joined = np.concatenate(arrays)
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return np.ma.masked_array(joined, np.concatenate([np.ma.getmaskarray(array) for array in arrays]))
    return joined


def _query(rank: int | None = None, first: int | None = None, last: int | None = None) -> dict[str, str]:
    parameters = {"rank": rank, "from": first, "to": last}
    return {name: str(value) for name, value in parameters.items() if value is not None}
