"""`GET /tllm`, as a person uses it, in a real browser."""

import httpx
import pytest
from server.browser import CHROMIUM, Browser

PROMPT = "One day Mia went to the garden."
HAPPY = {"post_block": {"2": [(-1) ** i * 0.6 for i in range(128)]}}


def test_the_page_and_its_parts_come_from_this_server_alone(server):
    page = httpx.get(f"{server.url}/tllm")
    assert page.is_success
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in page.text.replace("http-equiv", "")
    for part, kind in (("page.js", "text/javascript"), ("page.css", "text/css")):
        found = httpx.get(f"{server.url}/tllm/{part}")
        assert found.is_success
        assert found.headers["content-type"].startswith(kind)


@pytest.fixture(scope="module")
def browser(server, tmp_path_factory):
    """The page, open, with the administrator's key."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    server.post("/v1/steering/modules/register", {"name": "odd", "spec": HAPPY})
    opened = Browser(tmp_path_factory.mktemp("browser"))
    try:
        opened.open(f"{server.url}/tllm")
        opened.wait_for("document.getElementById('problem').textContent.includes('admin key')")
        opened.run(
            "{ const key = document.getElementById('admin-key');"
            f" key.value = {server.key!r}; key.dispatchEvent(new Event('change')) }}"
        )
        opened.wait_for("document.getElementById('modules').innerText.includes('odd')")
        # A browser takes every 401 for an error, also those of requests that were under way.
        opened.errors[:] = [error for error in opened.errors if "401" not in error]
        yield opened
    finally:
        opened.close()
        server.post("/v1/steering/modules/unregister", {"name": "odd"})


def text(browser, name):
    return browser.run(f"document.getElementById('{name}').textContent")


def test_two_answers_are_those_of_the_server_and_their_tokens_have_colours(browser, server):
    browser.wait_for("[...document.forms.compare.colour.options].some(o => o.value == 'probe')")
    browser.run(
        f"{{ const form = document.forms.compare; form.prompt.value = {PROMPT!r};"
        " form.module.value = 'odd'; form.strength.value = 2; form.colour.value = 'probe';"
        " form.tokens.value = 24; form.requestSubmit() }"
    )
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "seed": 1}
    for name, asked in (("plain", {}), ("steered", {"steering_name": ["odd", 2.0]})):
        expected = server.post("/v1/completions", body | asked).json()["choices"][0]["text"]
        browser.wait_for(f"document.getElementById({name!r}).textContent.length >= {len(expected)}")
        assert text(browser, name) == expected
        assert browser.wait_for(f"document.querySelectorAll('#{name} span[title]').length > 12")
    assert text(browser, "plain") != text(browser, "steered")
    assert not browser.errors


def test_captured_rows_have_a_table_and_a_file(browser):
    browser.run(
        "{ const form = document.forms.capture; form.prompt.value = 'Ben had a red kite.';"
        " form.tokens.value = 30; form.requestSubmit() }"
    )
    cells = browser.wait_for("document.querySelectorAll('.heat td').length")
    layers = browser.run("document.querySelectorAll('.heat tr').length - 1")
    assert (layers, cells % layers) == (6, 0)
    browser.run("document.querySelector('.heat td').click()")
    assert "largest of 128" in text(browser, "row")
    assert browser.run("!document.getElementById('download').hidden")
    assert not browser.errors


def test_what_happens_now_is_shown_and_a_module_goes_away(browser):
    assert browser.wait_for("document.getElementById('figures').innerText.includes('tokens/s')")
    rows = browser.run("document.getElementById('consumers').innerText")
    assert "probe" in rows
    assert "logging" in rows
    row = "[...document.querySelectorAll('#modules tr')].find(r => r.innerText.includes('odd'))"
    browser.run(f"{row}.querySelector('button').click()")
    browser.wait_for(f"!{row}")
    assert not browser.errors


def test_a_refusal_is_shown_in_the_servers_words(browser):
    browser.run(
        "{ const form = document.forms.capture; form.layers.value = '99'; form.requestSubmit() }"
    )
    browser.wait_for("document.getElementById('problem').textContent.includes('no layer 99')")
