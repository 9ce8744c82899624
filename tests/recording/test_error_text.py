"""The description of an error that ends a training."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from ddpobs.recording.error_text import describe
from ddpobs.torch_seam.modes import unseen


class UnprintableError(Exception):
    """An error of the user's whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


def raised(error: BaseException, depth: int = 0) -> BaseException:
    def fail(level: int) -> None:
        if level:
            fail(level - 1)
        raise error

    try:
        fail(depth)
    except BaseException as caught:
        return caught
    raise AssertionError


def test_an_error_is_described_by_type_message_place_and_traceback() -> None:
    detail = describe(raised(ValueError("x" * 600)), texts=True)
    assert (detail["error"], detail["message"]) == ("ValueError", "x" * 500)
    assert re.fullmatch(r"test_error_text.py:\d+ → test_error_text.py:\d+ fail", str(detail["place"]))
    assert str(detail["traceback"]).endswith(f"ValueError: {'x' * 600}")


def test_the_users_frames_are_kept_and_those_of_libraries_and_of_ours_are_not() -> None:
    def broken(_: object) -> str:
        return str(json.loads("{"))

    @unseen  # A function of ours around the user's.
    def train() -> None:
        re.sub("a", broken, "a")

    try:
        train()
    except ValueError as error:
        text = str(describe(error, texts=True)["traceback"])
    assert "torch_seam" not in text
    assert "in train" in text
    assert "in broken" in text
    assert text.count("json/decoder.py") == 2
    assert text.count("  … 1 more frame\n") == 2  # Of `re` and of `json`.


def test_an_error_that_led_to_another_comes_before_it() -> None:
    try:
        try:
            raise KeyError("label")
        except KeyError as missing:
            raise ValueError("no label") from missing
    except ValueError as error:
        text = str(describe(error, texts=True)["traceback"])
    first, second = text.split("\n\nThat led to:\n\n")
    assert first.endswith("KeyError: 'label'")
    assert second.endswith("ValueError: no label")


def test_a_deep_recursion_keeps_its_outer_and_its_inner_frames() -> None:
    text = str(describe(raised(ValueError("x"), depth=40), texts=True)["traceback"])
    assert text.count(", in fail") == 11
    assert "more frames" in text


def test_a_long_traceback_is_cut_at_its_begin() -> None:
    text = describe(raised(ValueError("€" * 3000 + "end")), texts=True)["traceback"]
    assert isinstance(text, str)
    assert len(text.encode()) <= 4000
    assert text.endswith("€end")


def test_without_texts_only_the_type_remains() -> None:
    assert describe(raised(ValueError("secret")), texts=False) == {"error": "ValueError"}


@pytest.mark.parametrize("error", [UnprintableError(), ValueError("\udcff")], ids=["unprintable", "surrogate"])
def test_any_text_can_be_sent(error: Exception) -> None:
    assert msgspec.json.encode(describe(raised(error), texts=True))
