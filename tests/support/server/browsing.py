"""A visit of the web page in a real browser, and a run to show there."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
from playwright.sync_api import expect

from ddpobs import wire
from tests.support.columns import make_spans, make_steps

EVIL = "<img src=x onerror=document.title='owned'>"
STEPS, MS = 60, 1_000_000
PATIENCE_MS = 120_000
"""A page may take as long on a machine that runs other tests."""

expect.set_options(timeout=PATIENCE_MS)


def batch(run: str, rank: int, slow: bool, host: str) -> wire.Batch:
    """Sixty steps of two buckets; the slow rank computes 30 ms longer in backward, and the other rank waits for it."""
    step = np.arange(STEPS)
    backward, exposed = (50 * MS, 2 * MS) if slow else (20 * MS, 32 * MS)
    start = 10**12 * (rank + 1) + step * 70 * MS
    known_ns = np.where(step == 0, wire.UNKNOWN, 1)
    own_backward = np.where(step == 0, wire.UNKNOWN, backward)
    steps = make_steps(
        step=step,
        collective=step,
        start_ns=start,
        end_ns=start + 70 * MS,
        data_ns=MS,
        forward_ns=10 * MS,
        backward_ns=backward,
        exposed_comm_ns=exposed,
        optimizer_ns=2 * MS,
        other_ns=70 * MS - 13 * MS - backward - exposed,
        own_ns=np.where(step == 0, wire.UNKNOWN, backward + 13 * MS),
        own_data_ns=known_ns * MS,
        own_forward_ns=known_ns * 10 * MS,
        own_backward_ns=own_backward,
        own_optimizer_ns=known_ns * 2 * MS,
        own_other_ns=np.where(step == 0, wire.UNKNOWN, 0),
        comm_ns=exposed,
        micro_steps=1,
        samples=8,
        flags=np.where(step == 0, wire.SYNCHRONISED | wire.NO_ORIGIN, wire.SYNCHRONISED),
    )
    backward_ns = np.repeat(start + 11 * MS, 2)
    bucket = np.tile([0, 1], STEPS)
    ready = backward_ns + np.where(bucket == 0, backward - 5 * MS, backward)
    spans = make_spans(
        step=np.repeat(step, 2),
        bucket=bucket,
        ready_ns=ready,
        launched_ns=ready,
        started_ns=wire.UNKNOWN,
        done_ns=backward_ns + 52 * MS + bucket,
    )
    layout = [
        wire.Bucket(size_bytes=4, dtype="float32", parameters=[wire.Parameter(name=name, size=1)])
        for name in ("head.weight", EVIL)
    ]
    return wire.Batch(
        version=1,
        run=run,
        attempt="a" * 16,
        source=f"{rank:016x}",
        seq=0,
        rank=rank,
        world_size=2,
        emitted=STEPS * 3,
        dropped=0,
        anchor=wire.Anchor(wall_ns=10**18, monotonic_ns=10**12),
        hello=wire.Hello(host=host, pid=1, device=host, backend=host, versions={"torch": host}, settings={host: host}),
        layouts=[wire.Layout(module=0, name=EVIL, revision=0, comm="all_reduce", buckets=layout)],
        steps=steps,
        spans=spans,
        unused=[wire.Unused(step=3, module=0, locally=[EVIL], globally=[])] if slow else [],
        events=[wire.Event(kind="sampler_without_set_epoch", at_ns=0, detail={"sampler": EVIL, "dataset": EVIL})],
    )


def put(url: str, payload: wire.Batch, client: Any = httpx, **headers: str) -> None:
    answer = client.put(
        f"{url}/api/v1/runs/{payload.run}/sources/{payload.source}/batches/{payload.seq}",
        content=wire.encode(payload),
        headers={"Content-Type": wire.MSGPACK, **headers},
    )
    assert answer.status_code == 201, answer.text


_ANSWER_THE_FORM = """
new MutationObserver(async () => {
  const form = document.querySelector("#token-form form:not([data-answered])");
  if (!form) return;
  form.dataset.answered = "yes";
  const texts = [...form.querySelectorAll(".problem:not([hidden]), label")].map((node) => node.textContent);
  const token = await window.nextToken(texts.join("\\n"));
  form.querySelector("input").value = token;
  if (token) form.requestSubmit();
  else form.querySelector("[value=cancel]").click();
}).observe(document, { childList: true, subtree: true });
"""


class Visit:
    """An open page with its requests and errors; each form for a token receives the next of `tokens`, or is closed."""

    def __init__(self, browser: Any, address: str, *tokens: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.page.set_default_timeout(PATIENCE_MS)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.prompts: list[str] = []
        self._tokens = iter(tokens)
        self.page.expose_function("nextToken", self._next_token)
        self.page.add_init_script(_ANSWER_THE_FORM)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._log)
        self.page.goto(address)

    def _log(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _next_token(self, texts: str) -> str:
        self.prompts.append(texts)
        return next(self._tokens, "")

    def reads(self) -> int:
        """Count the REST requests so far. The extra request flushes the events of all earlier ones."""
        self.page.evaluate("fetch('/healthz').then(() => 0)")
        return sum("/api/v1/" in address for address in self.requests)


def drawn(browser: Any, address: str) -> Visit:
    """A visit to a run after its figures are drawn."""
    visit = Visit(browser, address)
    settle(visit)
    return visit


def settle(visit: Visit) -> None:
    """Wait until all figures follow the selection, and the answer to what would help is there."""
    visit.page.locator("#view[aria-busy=false]:not(:has([aria-busy=true]))").wait_for()


def column(visit: Visit, figure: str, source: str, name: str) -> list[Any]:
    """A column of a named source of a figure; an image as its rows in one list."""
    values: list[Any] = visit.page.evaluate(
        """([figure, source, name]) => {
          const document = Bokeh.documents.find((candidate) => candidate.roots()[0].name === figure);
          const values = document.get_model_by_name(source).data[name];
          return Array.from(values).flatMap((value) => (ArrayBuffer.isView(value) ? Array.from(value) : [value]));
        }""",
        [figure, source, name],
    )
    return values


def mark(visit: Visit, figure: str, name: str) -> list[float | None] | None:
    """Left end, right end and place of a mark of a figure; None if it is hidden."""
    place: list[float | None] | None = visit.page.evaluate(
        """([figure, name]) => {
          const document = Bokeh.documents.find((candidate) => candidate.roots()[0].name === figure);
          const model = document.get_model_by_name(name);
          const places = [model.left, model.right, model.location];
          return model.visible ? places.map((place) => (typeof place === "number" ? place : null)) : null;
        }""",
        [figure, name],
    )
    return place


def click(visit: Visit, figure: str, x: float, y: float) -> None:
    """Click on a figure at a position of its axes, and wait for the figures."""
    place = visit.page.locator(f"#figure-{figure} canvas").first
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    inside: list[float] = visit.page.evaluate(
        """([figure, x, y]) => {
          const document = Bokeh.documents.find((candidate) => candidate.roots()[0].name === figure);
          const { frame } = Bokeh.index[document.roots()[0].id];
          return [frame.x_scale.compute(x), frame.y_scale.compute(y)];
        }""",
        [figure, x, y],
    )
    visit.page.mouse.click(box["x"] + inside[0], box["y"] + inside[1])
    settle(visit)


def paused_visit(browser: Any) -> Visit:
    """A visit without a page yet, whose clock only the test advances."""
    visit = Visit(browser, "about:blank")
    visit.page.clock.install(time=0)
    visit.page.clock.pause_at(3_600_000)  # The clock runs until that time.
    return visit
