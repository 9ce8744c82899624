"""Take the README's picture of a run's page, with Debian's Chromium and a collector that holds the run.

scripts/screenshot.py http://127.0.0.1:8321/runs/RUN docs/pictures/run.png
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from playwright.sync_api import sync_playwright

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    """Return the path of Debian's Chromium."""
    path = shutil.which("chromium")
    if path is None:
        sys.exit("no chromium on this machine: apt-get install chromium")
    return path


def main() -> int:
    """Open the page, wait for its figures, and save a picture down to the step's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("picture")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(QUIET))
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(options.url)
        page.locator("#view[aria-busy=false]").wait_for(timeout=60_000)
        box = page.locator("#figure-step").bounding_box()
        assert box is not None
        clip: Any = {"x": 0.0, "y": 0.0, "width": 1200.0, "height": box["y"] + box["height"] + 16}
        page.screenshot(path=options.picture, full_page=True, clip=clip)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
