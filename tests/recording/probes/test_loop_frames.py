"""Frames that wait for an iterator, observed from inside of that iterator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from types import FrameType
from typing import Any

import pytest
from tqdm import tqdm

from ddpobs.recording.probes.loop_frames import Places, asks_iterator, called_name, places_on_stack


class Looks:
    """Notes of each look: whether the training loop waited for an iterator."""

    def __init__(self) -> None:
        self.forward_places: Places = {}
        self.asked: list[bool] = []

    def forward(self) -> None:
        self.forward_places = places_on_stack(sys._getframe())

    def look(self, _: object = None) -> int:
        if self.forward_places:
            self.asked.append(asks_iterator(frames_from(sys._getframe()), self.forward_places))
        return 0


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def generator(looks: Looks) -> Iterator[int]:
    for _ in range(4):
        yield looks.look()


class OwnIterator:
    """An iterator class."""

    def __init__(self, looks: Looks) -> None:
        self.looks, self.left = looks, 4

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        return self.looks.look()


SOURCES: dict[str, Callable[[Looks], Iterable[Any]]] = {
    "generator": generator,
    "class": OwnIterator,
    "in C": lambda looks: map(looks.look, range(4)),
    "enumerate": lambda looks: enumerate(generator(looks)),
    "tqdm": lambda looks: tqdm(generator(looks), disable=False, file=StringIO()),
    "nested generators": lambda looks: (batch for batch in generator(looks)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_for_statement_around_the_forward_asks_the_iterator(source: str) -> None:
    looks = Looks()
    for _ in SOURCES[source](looks):
        looks.forward()
    assert len(looks.asked) >= 3
    assert all(looks.asked)


@pytest.mark.parametrize("source", SOURCES)
def test_a_call_of_next_asks_the_iterator(source: str) -> None:
    looks, batches = Looks(), None
    for _ in range(4):
        batches = batches or iter(SOURCES[source](looks))
        next(batches)
        looks.forward()
    assert looks.asked == [True] * 3


def test_a_nested_loop_with_the_forward_in_a_function_asks_the_iterator() -> None:
    looks = Looks()

    def step() -> None:
        looks.forward()

    for _ in range(2):
        for _ in generator(looks):
            step()
    assert len(looks.asked) == 7
    assert all(looks.asked)


def test_other_code_between_forwards_asks_no_iterator() -> None:
    looks = Looks()

    def log() -> None:
        for _ in map(looks.look, range(2)):
            pass

    for _ in range(3):
        looks.forward()
        log()
        looks.look()
    for _ in generator(looks):  # This loop has no forward in it.
        pass
    assert looks.asked == [False] * 13


def test_the_name_of_the_called_function_is_read_from_the_frame() -> None:
    names: list[str] = []

    class Recorder:
        def to(self, _: str) -> None:
            frame = sys._getframe().f_back
            assert frame is not None
            names.append(called_name(frame))

    recorder = Recorder()
    recorder.to("cpu")
    names.append(called_name(sys._getframe()))
    assert names == ["to", "called_name"]
