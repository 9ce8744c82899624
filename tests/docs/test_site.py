"""The documentation site in a browser: what people search for is found, and no command is cut off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.support.chromium import chromium
from tests.support.cli import ROOT

pytestmark = pytest.mark.wide

_CUT = """[...document.querySelectorAll("pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText.slice(0, 60))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)], cwd=ROOT, check=True)
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("wandb", "Notebooks and scripts"),
        ("password", "Secure a collector: tokens, passwords, TLS"),
        ("slow rank", "Slow ranks (stragglers)"),
        ("nccl timeout", "A run that hangs (deadlock, NCCL timeout)"),
        ("overhead", "Measurements: overhead, accuracy, capacity"),
    ],
)
def test_a_search_finds_the_page_first(browser: Any, site: tuple[str, Path], words: str, title: str) -> None:
    page = browser.new_page()
    page.goto(f"{site[0]}/index.html")
    page.locator(".md-search__input").click()
    page.keyboard.type(words)
    expect(page.locator(".md-search-result__item h1").first).to_have_text(title)  # Results change with each letter.


@pytest.mark.parametrize("width", [1400, 390])
def test_no_line_of_code_is_cut_off_and_no_page_is_wider_than_the_screen(
    browser: Any, site: tuple[str, Path], width: int
) -> None:
    address, folder = site
    page = browser.new_page(viewport={"width": width, "height": 900})
    wrong = {}
    for path in folder.rglob("*.html"):
        name = str(path.relative_to(folder))
        page.goto(f"{address}/{name}")
        cut = page.evaluate(_CUT) if width > 1000 else []  # On a phone diagrams scroll.
        if cut or page.evaluate("document.documentElement.scrollWidth") > width:
            wrong[name] = cut
    assert wrong == {}


def test_the_start_page_has_the_four_tabs_and_a_picture(browser: Any, site: tuple[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{site[0]}/index.html")
    expect(page.locator(".md-tabs__item")).to_have_text(["Use", "Findings", "Reference", "Operate"])
    assert page.locator("article img").evaluate("image => image.naturalWidth") > 500


@pytest.mark.parametrize("name", ["paper", "examples", "whatif"])
def test_no_picture_of_figures_is_cut_off(browser: Any, site: tuple[str, Path], name: str) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{site[0]}/{name}.html")
    page.wait_for_function("[...document.querySelectorAll('article img')].every((image) => image.naturalWidth > 0)")
    cut = """(images) => images.filter(({ clientWidth, clientHeight, naturalWidth, naturalHeight }) =>
      Math.abs(clientHeight - (naturalHeight * clientWidth) / naturalWidth) > 2).map(({ src }) => src)"""
    assert page.locator("article img").evaluate_all(cut) == []
