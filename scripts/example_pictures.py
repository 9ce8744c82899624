"""Run the examples as `docs/examples.md` starts them, and take the picture of each from its run's page.

python -m scripts.example_pictures [toy checkpoint …]

It starts a collector, and needs Debian's Chromium.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from benchmarks.rig import patience
from benchmarks.rig.collector import running_collector
from scripts.screenshot import QUIET, chromium

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "examples.md"
_FIGURES = {"checkpoint": "phases", "imagenet": "account", "pipeline": "phases"}
"""Figures by example; the others show one step."""
_PLAIN = """() => {
    for (const root of Bokeh.documents.flatMap((each) => each.roots())) if (root.toolbar) root.toolbar.visible = false;
    document.querySelectorAll("details, .controls").forEach((each) => each.remove());
}"""
"""Removes what a reader cannot click."""
_EXAMPLE = re.compile(
    r"^```sh\n(ddpobs run .*examples/train_(\w+)\.py.*)\n```\n\n!\[.*\]\(pictures/example-(\w+)\.png\)", re.M
)


@dataclass(frozen=True)
class Example:
    """An example of the page.

    Attributes:
        name: As in `train_NAME.py`.
        command: How the page starts it.
    """

    name: str
    command: str

    @property
    def picture(self) -> Path:
        """The file of its picture."""
        return PAGE.parent / "pictures" / f"example-{self.name}.png"

    def train(self, url: str, folder: Path, *arguments: str) -> str:
        """Run the command in a folder, with further arguments of the script, and return its output.

        Raises:
            RuntimeError: The command failed.
        """
        with suppress(FileExistsError):  # Another example has run in the folder.
            (folder / "examples").symlink_to(ROOT / "examples")
        paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
        environ = {**kept, "PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DDPOBS_EXIT_S": "30"}
        environ |= {"DDPOBS_SPOOL": str(folder / "spool")}
        command = self.command.replace("torchrun", "torchrun --standalone")  # A free port.
        command = command.replace("ddpobs run", f"ddpobs run --collector {url} --run {self.name}")
        done = patience.run([*command.split(), *arguments], environ=environ, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


def examples() -> dict[str, Example]:
    """The page's examples by name, in its order."""
    found = _EXAMPLE.findall(PAGE.read_text())
    return {name: Example(name, command) for command, name, picture in found if name == picture}


def shoot(browser: Browser, url: str, example: Example) -> None:
    """Save the picture of the example's figure."""
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.goto(f"{url}/runs/{example.name}")
    page.locator("#view[aria-busy=false]").wait_for(timeout=60_000)
    page.evaluate(_PLAIN)
    page.locator(f"#figure-{_FIGURES.get(example.name, 'step')}").screenshot(path=example.picture)
    page.close()


def main() -> None:
    """Run the examples, and save their pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="examples; default: all")
    known = examples()
    names = parser.parse_args().names or list(known)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_collector(Path(folder)) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(QUIET))
        for name in names:
            print(known[name].train(url, Path(folder)), flush=True)
            shoot(browser, url, known[name])
        browser.close()


if __name__ == "__main__":
    main()
