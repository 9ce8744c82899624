"""The search of the list of runs, which the collector's database answers."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from ddpobs_server.store import Arrival, Store, WantedRuns
from sqlalchemy import create_engine, text

from benchmarks.rig.collector import Collector
from benchmarks.rig.databases import Fresh
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, assert_problem, batch, get, hello, put, source_of
from tests.support.server.migration import at_revision

LATER = "b" * 16
WORDS = """gpt GPT.1 #nightly nightly #night node7 node77 7 % x%y _ lr_3 lr-3 äpfel GRÖSSE größe i̇stanbul
' "quoted" \\ / 50_50 zeile # --"""


def trained(host: str = "node", tags: str = "", note: str = "") -> wire.Hello:
    return msgspec.structs.replace(hello(host), settings={"tags": tags, "note": note})


def arrival(sent: wire.Batch, at_ns: int = 1) -> Arrival:
    return Arrival(sent, bytes(32), 1, at_ns)


def found(store: Store, search: str) -> list[str]:
    return [run.run for run in store.runs(100, wanted=WantedRuns(search))]


def label(url: str, run: str, **labels: Any) -> None:
    httpx.patch(f"{url}/api/v1/runs/{run}", json=labels).raise_for_status()


def listed_with_words(runs: list[dict[str, Any]], search: str) -> list[str]:
    """The names of the listed runs that have each word in one of the fields that the page shows."""
    fields = {run["run"]: [run["run"], run["note"], run["host"], *(f"#{tag}" for tag in run["tags"])] for run in runs}
    words = search.lower().split()
    return [run for run, texts in fields.items() if all(word in " ".join(texts).lower() for word in words)]


def test_the_search_finds_the_runs_whose_shown_fields_have_each_word(shared: Collector, run: str) -> None:
    put(shared.url, batch(f"{run}-GPT.1", hello=trained("node7", "nightly,lr_3e-4", "100 % of the ÄPFEL")))
    put(shared.url, batch(f"{run}-gpt.2", hello=trained("node77.cluster", "weekly", 'it\'s \\ "quoted" / 50_50')))
    put(shared.url, batch(f"{run}-bert", hello=trained("İstanbul", "nightly")))
    put(shared.url, batch(f"{run}-silent"))
    label(shared.url, f"{run}-bert", tags=["baseline", "x%y"], note="Größe: 7;\nzweite Zeile")
    own = [row for row in get(shared.url, "/runs", limit=500)["runs"] if row["run"].startswith(run)]
    assert len(own) == 4
    answers = set()
    for first, second in product(WORDS.split(), ("", "  100 ", "\tÄPFEL\n", "#baseline")):
        search = f"{run} {first} {second}"
        expected = listed_with_words(own, search)
        assert [row["run"] for row in get(shared.url, "/runs", search=search, limit=500)["runs"]] == expected, search
        answers.add(tuple(expected))
    assert len(answers) >= 8  # The words tell the runs apart.


def test_a_search_has_pages_and_counts(shared: Collector, run: str) -> None:
    names = [f"{run}-{number}" for number in range(5)]
    for name in names:
        put(shared.url, batch(name, hello=trained("page-host", tags=run)))
    put(shared.url, batch(f"{run}-other", hello=trained("page-host")))
    query: dict[str, Any] = {"search": f"#{run} PAGE-host", "limit": 2}
    pages = [get(shared.url, "/runs", **query)]
    while pages[-1]["next"]:
        pages.append(get(shared.url, "/runs", **query, cursor=pages[-1]["next"]))
    assert [[row["run"] for row in page["runs"]] for page in pages] == [names[:2:-1], names[2:0:-1], names[:1]]
    assert {page["matches"] for page in pages} == {5}
    assert all(page["total"] == get(shared.url, "/runs")["total"] >= 6 for page in pages)
    third = pages[1]["runs"][0]
    later = get(shared.url, "/runs", search=f"#{run}", created_after_ns=third["created_ns"])
    assert ([row["run"] for row in later["runs"]], later["matches"]) == (names[:2:-1], 2)


@pytest.mark.parametrize("search", ["x" * 257, "a " * 5000, "%" * 10_000])
def test_a_search_that_is_too_long_is_refused(shared: Collector, search: str) -> None:
    problem = assert_problem(httpx.get(f"{shared.url}/api/v1/runs", params={"search": search}), 422)
    assert problem["detail"] == "query.search: String should have at most 256 characters"


@pytest.mark.parametrize("search", ["\0", "a" * 256, "☃ " * 128, "';DROP TABLE runs;--", "💩", "\x1b[2J", "/%", "___"])
def test_a_strange_search_finds_nothing(shared: Collector, search: str) -> None:
    put(shared.url, batch("plain", hello=trained()))
    assert "plain" not in [row["run"] for row in get(shared.url, "/runs", search=search)["runs"]]
    assert "plain" in [row["run"] for row in get(shared.url, "/runs", search=" PLAIN\t")["runs"]]


def test_an_undecodable_search_finds_nothing(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, hello=trained()))
    answer = httpx.get(f"{shared.url}/api/v1/runs?search={run}%ff%fe%c3")
    assert (answer.status_code, answer.json()["runs"]) == (200, [])


def test_the_search_follows_the_lowest_rank_the_attempt_and_the_labels(store: Store) -> None:
    store.ingest([arrival(batch("run", rank=2))])
    assert found(store, "run") == ["run"]
    store.ingest([arrival(batch("run", seq=1, rank=2, hello=trained("second", "two", "of rank 2")))])
    assert found(store, "second #two") == ["run"]
    store.ingest([arrival(batch("run", rank=rank, hello=trained(f"host{rank}", "one"))) for rank in (3, 1)])
    assert [found(store, word) for word in ("host1", "#one", "second", "host3")] == [["run"], ["run"], [], []]
    store.set_labels("run", ["Given"], None)
    assert [found(store, word) for word in ("#given host1", "#one")] == [["run"], []]
    store.set_labels("run", [], "words")
    assert [found(store, word) for word in ("#given", "words host1")] == [[], ["run"]]
    anchor = wire.Anchor(wall_ns=2 * 10**18, monotonic_ns=0)
    later: dict[str, Any] = {"attempt": LATER, "source": "f" * 16, "anchor": anchor}
    store.ingest([arrival(batch("run", rank=1, **later), 2)])
    assert [found(store, word) for word in ("host1", "words")] == [[], ["run"]]
    store.ingest([arrival(batch("run", seq=1, rank=1, **later, hello=trained("moved")), 3)])
    assert [found(store, word) for word in ("moved words", "host1")] == [["run"], []]


def test_a_hostile_hello_is_found_and_its_text_is_bounded(store: Store) -> None:
    store.ingest([arrival(batch("odd", hello=trained("no\0de", "t\0g", "n" * 100_000)))])
    assert found(store, "no\0de #t\0g") == ["odd"]
    with store._engine.connect() as connection:
        assert connection.execute(text("SELECT length(search_text) FROM runs")).scalar_one() == 5000


@pytest.mark.parametrize("labels", [{}, {"tags": '["given"]', "note": "Said"}])
def test_an_upgrade_makes_older_runs_searchable(fresh: Fresh, tmp_path: Path, labels: dict[str, str]) -> None:
    url = fresh(tmp_path)
    at_revision(url, "0019")
    engine = create_engine(url)
    with engine.begin() as connection:
        for rank, host in enumerate(("First", "second")):
            body = msgspec.json.encode(trained(host, "one,two", "noTED\0")).decode()
            values = {"hello": body, "source": source_of(rank)}
            connection.execute(text("UPDATE sources SET hello = :hello WHERE source = :source"), values)
        for name, value in labels.items():
            connection.execute(text(f"UPDATE runs SET {name} = :value"), {"value": value})
    engine.dispose()
    store = Store(url)
    store.migrate()
    of_person = ["old"] if labels else []
    of_training = [] if labels else ["old"]
    assert [found(store, word) for word in ("OLD", "first", "second")] == [["old"], ["old"], []]
    assert [found(store, word) for word in ("#given", "said")] == [of_person] * 2
    assert [found(store, word) for word in ("#one", "#two", "noted\0")] == [of_training] * 3
    before = _search_text(store)
    store.ingest([arrival(batch("old", seq=9, attempt=ATTEMPT, hello=trained("First", "one,two", "noTED\0")))])
    assert _search_text(store) == before  # The upgrade wrote what a batch writes.
    store.close()


def _search_text(store: Store) -> str:
    with store._engine.connect() as connection:
        found: str = connection.execute(text("SELECT search_text FROM runs")).scalar_one()
    assert found
    return found
