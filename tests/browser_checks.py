"""The built pages in a headless Chromium at desk and phone width: scripts, requests, formulas, width, search.

Without a browser these tests skip with a reason; with CI set that is a failure, since a skipped check proves nothing.
"""

import os
import shutil

import page_checks
import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--disable-quic",
]  # fmt: skip
PAGE_STATE = """async () => {
    if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
    const count = selector => document.querySelectorAll(selector).length;
    return {
        'formula with an error node': count('[data-mml-node=merror]'),
        'formula with an undefined macro': count('mjx-container [fill=red]'),
        'formula left as text': count('.math:not(:has(mjx-container))'),
        'pixels wider than the screen': document.documentElement.scrollWidth - window.innerWidth,
        'broken pictures': [...document.images].filter(image => image.complete && !image.naturalWidth).length,
    };
}"""


def executable() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    path = executable()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium found; in CI the pages must be looked at (install the package chromium)")
        pytest.skip("no Chromium found: pages were not opened in a browser (install the package chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


def look(browser, path, width: int) -> list[str]:
    """Everything wrong with one page at one width."""
    found: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    page.on("pageerror", lambda error: found.append(f"script error: {error}"))
    page.on("console", lambda message: found.append(f"console: {message.text}") if message.type == "error" else None)
    page.on(
        "request",
        lambda request: None if page_checks.LOCAL.match(request.url) else found.append(f"request: {request.url}"),
    )
    page.goto(path.as_uri(), wait_until="load")
    page.evaluate("() => document.querySelectorAll('details').forEach(d => d.open = true)")
    found += [f"{what}: {count}" for what, count in page.evaluate(PAGE_STATE).items() if count > 0]
    context.close()
    return [f"{path.name} at {width} px: {line}" for line in found]


@pytest.mark.browser
@pytest.mark.parametrize("width", page_checks.WIDTHS.values(), ids=page_checks.WIDTHS)
def test_pages_in_a_browser(browser, html_root, width):
    pages = page_checks.pages(html_root)
    assert pages, "no pages: run `make book`"
    assert [line for page in pages for line in look(browser, page, width)] == []


@pytest.mark.browser
def test_search_finds(browser, html_root):
    page = browser.new_page()
    page.goto((html_root / "search.html").as_uri() + "?q=attention")
    page.wait_for_selector("ul.search li", timeout=10_000)
    assert page.locator("ul.search li").count() > 1
    page.close()
