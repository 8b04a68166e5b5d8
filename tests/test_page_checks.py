"""Each check of pages goes red on a page that is bad in its way."""

import browser_checks
import page_checks
import pytest

GOOD = """<html><head></head><body><main><article><h1 id="top">A</h1><p>Attention is <code>tensor(1)</code> sharp.</p>
<a href="b.html#part">b</a><a href="#top">up</a><img src="x.png" alt="curves that rise with r"></article></main></body></html>"""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


@pytest.fixture
def site(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="part">B</h1>')
    (tmp_path / "x.png").write_bytes(PNG)

    def make(change=("", "")):
        page = tmp_path / "a.html"
        page.write_text(GOOD.replace(*change) if change[0] else GOOD)
        return page

    return make


def test_a_good_page_has_no_complaints(site):
    assert [c for check in page_checks.CHECKS for c in check(site())] == []


@pytest.mark.parametrize(
    "check, change",
    [
        ("dead_links", ("b.html#part", "gone.html")),
        ("dead_links", ("b.html#part", "b.html#gone")),
        ("dead_links", ("#top", "#gone")),
        ("dead_links", ("x.png", "gone.png")),
        ("outside", ("<head>", '<head><script src="https://cdn.example/x.js"></script>')),
        ("outside", ("<head>", '<head><link rel="stylesheet" href="//cdn.example/x.css">')),
        ("outside", ("x.png", "https://host.example/x.png")),
        ("alt_texts", ("curves that rise with r", "")),
        ("alt_texts", ("curves that rise with r", "_images/1b2c.png")),
        ("raw_text", ("sharp", "np.float64(0.12)")),
        ("raw_text", ("sharp", "{glue:text}`x:.2f`")),
        ("raw_text", ("sharp", "less than $10^{-3}$")),
        ("tracebacks", ("sharp", "Traceback (most recent call last)")),
    ],
)
def test_a_bad_page_is_seen(site, check, change):
    assert getattr(page_checks, check)(site(change))


class NoBrowserError(Exception):
    pass


def test_a_missing_browser_fails_in_ci_and_skips_elsewhere(monkeypatch):
    monkeypatch.setattr(browser_checks, "executable", lambda: None)
    inner = (
        browser_checks.browser.__wrapped__ if hasattr(browser_checks.browser, "__wrapped__") else browser_checks.browser._fixture_function
    )
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no Chromium found"):
        next(inner())
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no Chromium found"):
        next(inner())


MATHJAX = "<script>window.MathJax = {startup: {promise: Promise.resolve()}}</script>"


@pytest.mark.browser
@pytest.mark.skipif(browser_checks.executable() is None, reason="no Chromium found: the browser's checks were not tried on bad pages")
@pytest.mark.parametrize(
    "body, words",
    [
        ("<p>fine</p>", None),
        ("<script>throw new Error('boom')</script>", "script error: boom"),
        ("<script>console.error('bad')</script>", "console: bad"),
        ('<div style="width: 3000px">wide</div>', "wider than the screen"),
        ('<img src="gone.png" alt="a picture that is not there">', "broken pictures"),
        ('<span class="math"><mjx-container><g data-mml-node="merror"></g></mjx-container></span>', "error node"),
        ('<span class="math"><mjx-container><g fill="red"></g></mjx-container></span>', "undefined macro"),
        ('<span class="math">\\(x</span>', "left as text"),
        ('<img src="http://127.0.0.1:9/x.png" alt="a picture from another host">', "request: http://127.0.0.1:9/x.png"),
    ],
)
def test_the_browser_sees_a_bad_page(tmp_path, body, words):
    from playwright.sync_api import sync_playwright

    page = tmp_path / "a.html"
    page.write_text(f"<!doctype html><html><head><meta charset='utf-8'></head><body>{MATHJAX}{body}</body></html>")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_checks.executable(), args=browser_checks.FLAGS)
        found = browser_checks.look(browser, page, 400)
        browser.close()
    assert (found == []) if words is None else any(words in line for line in found)
