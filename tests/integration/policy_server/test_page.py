"""The page in headless Chromium: policies, charts under load, the form, an episode."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from served_policies import RunningPolicyServer, running_policy_server, write_policy

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
LIMIT_MS = 30_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian and Ubuntu: apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPolicyServer]:
    with running_policy_server(None, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """The page, ready; fails on any error in its console."""
    problems: list[str] = []
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(LIMIT_MS)

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            problems.append(message.text)

    page.on("console", note)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("requestfailed", lambda request: problems.append(f"{request.url} failed"))
    page.goto(address)
    page.wait_for_selector("body[data-ready]")
    yield page
    assert problems == []
    context.close()


@contextmanager
def load(port: int, body: dict[str, Any], name: str) -> Iterator[None]:
    ended = threading.Event()

    def run() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        while not ended.is_set():
            connection.request(
                "POST", f"/v1/policies/{name}/act", json.dumps(body), {"Content-Type": "application/json"}
            )
            connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)


OBSERVATION = {"observation": {"observation": [0.0] * 10, "desired_goal": [0.0] * 3}}


def test_it_shows_the_policies_and_how_good_they_are(browser: Browser, server: RunningPolicyServer) -> None:
    with opened(browser, server.address) as page:
        expect(page.locator("#state")).to_have_text("1 of 1 policies live")
        card = page.locator(".policy")
        expect(card).to_contain_text("fetch-reach")
        expect(card).to_contain_text("32 layers, 128 wide")
        expect(card).to_contain_text("100 % of 100 episodes in FetchReach-v4")


def test_its_charts_move_under_load(browser: Browser, server: RunningPolicyServer) -> None:
    with opened(browser, server.address) as page, load(server.port, OBSERVATION, "fetch-reach"):
        page.wait_for_function("Number(document.querySelector('#rate-legend b')?.textContent.replace(/,/g, '')) > 10")
        expect(page.locator("#latency-legend")).to_contain_text("p99")
        assert page.locator("#latency path").first.get_attribute("d")
        page.wait_for_function("document.querySelectorAll('#batches text').length > 8")
        page.wait_for_function(
            "[...document.querySelectorAll('#batches rect')].some((bar) => bar.height.baseVal.value > 5)"
        )


def test_its_form_is_made_of_the_manifest_and_answers(browser: Browser, server: RunningPolicyServer) -> None:
    with opened(browser, server.address) as page:
        assert page.locator("#fields textarea").count() == 2
        page.click("#act")
        expect(page.locator("#answer .bar")).to_have_count(4)
        expect(page.locator("#answer")).to_contain_text("version 1;")
        best = page.locator("#answer .bar").first.inner_text()
        page.check("#draw")
        page.fill("#seed", "3")
        page.click("#act")
        page.wait_for_function("(best) => document.querySelector('#answer .bar').innerText !== best", arg=best)


def test_its_form_tells_what_is_wrong(browser: Browser, server: RunningPolicyServer) -> None:
    with opened(browser, server.address) as page:
        page.locator("#fields textarea").first.fill("[1, 2")
        page.click("#act")
        expect(page.locator("#answer .error")).to_contain_text("observation: numbers in brackets")


def test_an_observation_that_the_server_refuses_is_shown_as_its_message(
    browser: Browser, server: RunningPolicyServer
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.address)
    page.wait_for_selector("body[data-ready]")
    page.locator("#fields textarea").last.fill("[1, 2]")
    page.click("#act")
    expect(page.locator("#answer .error")).to_contain_text("observation.desired_goal: has the shape [2]")
    context.close()


def test_an_episode_succeeds(browser: Browser, server: RunningPolicyServer) -> None:
    with opened(browser, server.address) as page:
        page.click("#episode")
        page.wait_for_selector('#episode-state[data-success="true"]', timeout=90_000)
        expect(page.locator("#episode-state")).to_contain_text("success: step 50")
        assert page.locator("#frame").is_visible() or page.locator("#scene").is_visible()
        expect(page.locator("#episode")).to_be_enabled()


def test_it_fits_a_phone_and_both_colour_schemes(browser: Browser, server: RunningPolicyServer) -> None:
    for scheme in ("light", "dark"):
        options = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
        with opened(browser, server.address, **options) as page:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_new_policies_and_faults_appear_by_themselves(browser: Browser, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    write_policy(repository, name="first", fields={"goal": 2})
    with running_policy_server(repository, tmp_path / "log") as server, opened(browser, server.address) as page:
        expect(page.locator(".policy")).to_have_count(1)
        expect(page.locator("#episode-panel")).to_be_hidden()
        write_policy(repository, name="second", version=3)
        expect(page.locator(".policy")).to_have_count(2)
        write_policy(repository, name="second", version=4, model=b"<b>broken</b>")
        expect(page.locator(".policy .failed")).to_contain_text("version 4: ")
        page.locator(".policy", has_text="second").click()
        expect(page.locator("#fields textarea")).to_have_count(1)


def test_it_asks_for_the_key(browser: Browser, tmp_path: Path) -> None:
    write_policy(tmp_path / "repository")
    with running_policy_server(tmp_path / "repository", tmp_path / "log", "--api-key", "secret") as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator(".policy")).to_contain_text("tiny")
        expect(page.locator("#key-form")).to_be_hidden()
        page.close()
