"""Measure the size of the collector's image, and how long its container takes to start and to stop.

    scripts/setup.sh containers && python -m benchmarks.container [--starts 9] [--image NAME] [--smoke]

A start counts from `docker run` until `/readyz` responds with 200, on an empty SQLite file in a volume; a stop until
`docker stop` returns. Without `--image` it builds the image first.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from benchmarks.rig.containers import collector_image, container, docker, ready_s, volume

OPTIONS = (
    "--init",
    "--read-only",
    "--tmpfs=/tmp",
    "--publish=127.0.0.1::8321",
    "--env=DDPOBS_SERVER_TOKEN=0123456789abcdef",
)


def start_and_stop_s(image: str) -> tuple[float, float]:
    """Seconds that a new container takes to be ready, and to stop."""
    began = time.monotonic()
    with volume() as data, container(image, options=(*OPTIONS, f"--volume={data}:/data")) as collector:
        ready_s(collector)
        ready = time.monotonic()
        docker("stop", collector)
        return ready - began, time.monotonic() - ready


def main() -> None:
    """Measure, and print three lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--image", help="an image that is already built")
    parser.add_argument("--smoke", action="store_true", help="two starts")
    options = parser.parse_args()
    image = options.image or collector_image()
    print(f"image: {int(docker('image', 'inspect', '--format={{.Size}}', image)) / 1e6:.0f} MB")
    starts, stops = zip(*(start_and_stop_s(image) for _ in range(2 if options.smoke else options.starts)), strict=True)
    for title, seconds in {"start": starts, "stop": stops}.items():
        print(f"{title}: {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), {len(seconds)} times")


if __name__ == "__main__":
    main()
