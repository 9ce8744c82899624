"""The pages with a keyboard alone, in a real Chromium."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.support.server.browsing import Visit, batch, drawn, put

_FOCUSED = """() => {
  let node = document.activeElement;
  while (node.shadowRoot?.activeElement) node = node.shadowRoot.activeElement;
  return node.getAttribute("aria-label") ?? node.title + node.id + node.textContent.trim();
}"""

_RING = _FOCUSED.replace("return node.getAttribute", "return getComputedStyle(node).outline; node.getAttribute")


def test_with_a_keyboard_alone_the_figures_are_near_and_their_tools_have_names(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    focused, press = visit.page.evaluate, visit.page.keyboard.press
    press("Tab")
    assert focused(_FOCUSED) == "Skip to the figures"
    reads = visit.reads()
    press("Enter")
    stops = []
    while "previousEarlier step" not in stops:
        press("Tab")
        stops.append(focused(_FOCUSED))
        assert len(stops) < 8, stops
    assert visit.reads() == reads  # A link within the page draws nothing anew.
    press("Tab")
    tools = [focused(_FOCUSED)]
    assert focused(_RING) == "rgb(29, 78, 216) solid 2px"
    while len(tools) < 4:
        press("ArrowRight")
        tools.append(focused(_FOCUSED))
    assert tools == ["Pan steps or time", "Box Zoom steps or time", "Wheel Zoom steps or time", "Reset"]
    expect(visit.page.get_by_role("toolbar", name="Tools of One step")).to_have_count(1)


def test_the_focus_stays_among_the_tools_when_the_window_becomes_narrow(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    tools = visit.page.get_by_role("toolbar", name="Tools of One step").get_by_role("button")
    tools.nth(0).focus()
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.evaluate(_FOCUSED) == "Box Zoom steps or time"
    visit.page.set_viewport_size({"width": 700, "height": 800})
    visit.page.wait_for_function(f"() => ({_FOCUSED})() === 'More tools'")


def test_the_focus_stays_at_its_tool_when_the_figure_is_drawn_anew(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.get_by_role("toolbar", name="Tools of One step").get_by_role("button").nth(0).focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_function(f"() => ({_RING})() === 'rgb(122, 162, 255) solid 2px'")
    assert visit.page.evaluate(_FOCUSED) == "Box Zoom steps or time"


def test_controls_that_belong_together_are_one_tab_stop(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    focused, press = visit.page.evaluate, visit.page.keyboard.press
    stops: list[str] = []
    while not stops or not stops[-1].startswith("rank "):
        press("Tab")
        stops.append(focused(f"() => document.activeElement.dataset.key ?? ({_FOCUSED})()"))
        assert len(stops) <= 32, stops
    assert [stop for stop in stops if "trace" in stop or "report" in stop] == ["tracetrace …"]
    press("ArrowDown")
    assert focused("document.activeElement.dataset.key") == "rank 0"
    press("Tab")
    assert focused("document.activeElement.tagName") == "BODY"


def test_arrow_keys_home_and_end_move_among_the_tools_of_the_run(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.get_by_role("button", name="trace").focus()
    names = []
    for key in ("ArrowRight", "ArrowRight", "End", "Home", "ArrowLeft"):
        visit.page.keyboard.press(key)
        names.append(visit.page.evaluate("document.activeElement.textContent"))
    assert names == ["report", "compare with …", "API", "trace …", "trace …"]


def test_a_finding_is_one_tab_stop_whose_help_evidence_and_figures_arrow_keys_reach(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    page, key = visit.page, "document.activeElement.dataset.key"
    keys = page.locator("article[data-finding]").evaluate_all("all => all.map((each) => each.dataset.finding)")
    page.get_by_role("button", name="Rank 1 is slow in backward").focus()
    assert page.evaluate(key) == f"title {keys[0]}"
    reached = []
    for pressed in ("ArrowDown", "ArrowDown", "ArrowDown", "Home", "ArrowRight"):
        page.keyboard.press(pressed)
        reached.append(page.evaluate(key).split()[0])
    assert reached == ["help", "summary", "show", "title", "help"]
    expect(page.get_by_role("link", name="help on straggler")).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate(key) == f"title {keys[1]}"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(key) == f"help {keys[0]}"


def test_cards_that_stay_the_same_keep_the_focus_on_their_control(browser: Any, url: str) -> None:
    visit = drawn(browser, f"{url}/runs/picture")
    visit.page.locator("article[data-finding] summary").first.focus()
    stays = """() => {
      const before = document.activeElement;
      document.getElementById("order").dispatchEvent(new Event("change"));
      return before.isConnected && before === document.activeElement;
    }"""
    assert visit.page.evaluate(stays)


def test_arrow_keys_move_among_the_runs_of_the_list(browser: Any, url: str) -> None:
    for name in ("keys-a", "keys-b"):
        put(url, batch(name, 0, slow=False, host="node"))
    visit = Visit(browser, f"{url}/?search=keys-")
    page, press = visit.page, visit.page.keyboard.press
    page.get_by_role("link", name="keys-a").wait_for()
    press("Tab")
    expect(page.get_by_role("link", name="Skip to the runs")).to_be_focused()
    press("Enter")
    for name in ("Run", "State"):
        press("Tab" if name == "Run" else "ArrowRight")
        expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()
    press("Tab")
    expect(page.get_by_role("link", name="keys-b")).to_be_focused()
    press("ArrowDown")
    expect(page.get_by_role("link", name="keys-a")).to_be_focused()
    press("ArrowLeft")
    expect(page.get_by_role("checkbox", name="Select keys-a")).to_be_focused()
    press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "BODY"
