"""The report in a real browser: nothing overflows, everything is there, and nothing is loaded from elsewhere."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
WIDTHS = (400, 1200)
CONTRAST = """
const luminance = (c) => { const v = c.match(/[\\d.]+/g).slice(0, 3).map((x) => x / 255)
  .map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
const back = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(c)) return luminance(c); } return 1; };
return [...document.querySelectorAll("p, li, h1, h2, h3, dt, dd, caption, figcaption, .value, .span, .gap, th button")]
  .map((e) => [luminance(getComputedStyle(e).color), back(e)])
  .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no chromium and chromedriver on this machine")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page about pictures with an outside set, about a table, and about a curve; names are long on purpose."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pages")
    long = "a network with quite a long name"
    images, labels = torch.rand(60, 1, 8, 8), torch.randint(3, (60,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    la = lapwing.fit(model, (images, labels), "classification", structure="kron")
    names = ["ankle boot", "T-shirt/top", "<script>alert('no')</script>"]
    outside = {"noise with a long name": torch.rand(40, 1, 8, 8), "more": 2 * torch.rand(20, 1, 8, 8)}
    report = lapwing.evaluate({long: model, "Laplace": la}, (images, labels), ood=outside, classes=names)
    found = {"pictures": report.to_html(folder / "pictures.html", heading="Pictures", notes=("A note.",))}
    x = torch.randn(50, 12)
    y = x[:, :1] + 0.1 * torch.randn(50, 1)
    values = nn.Linear(12, 1)
    la = lapwing.fit(values, (x, y), "regression")
    report = lapwing.evaluate({"MAP": values, "Laplace": la}, (x, y))
    found["table"] = report.to_html(folder / "table.html", heading="A table")
    line = nn.Linear(1, 1)
    report = lapwing.evaluate({"MAP": line}, (x[:, :1], y), likelihood=lapwing.Gaussian(0.5))
    found["curve"] = report.to_html(folder / "curve.html", heading="A curve")
    return found


def show(browser: Any, page: Path, width: int, dark: bool = False, media: str = "") -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme], "media": media})
    browser.get(page.as_uri())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["pictures", "table", "curve"])
def test_everything_is_there_and_fits(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    show(browser, pages[name], width)
    assert browser.get_log("browser") == []
    script = browser.execute_script
    assert script("return document.documentElement.scrollWidth") <= width
    wide = script(
        "return [...document.querySelectorAll('body *')].filter((e) => !e.closest('thead') || innerWidth > 720)"
        ".filter((e) => !e.closest('svg') || e.tagName === 'svg')"
        f".filter((e) => e.getBoundingClientRect().right > {width})"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    pictures = script("return [...document.querySelectorAll('svg, img')].map((e) => [e.getBoundingClientRect().width,"
                      " e.getAttribute('aria-label') || e.getAttribute('alt') || '',"
                      " e.tagName === 'svg' || e.naturalWidth > 0])")  # fmt: skip
    assert len(pictures) == {"pictures": 3 + 2 * 3 + 4 * 16, "table": 7, "curve": 5}[name]
    assert all(shown >= 60 and words and loaded for shown, words, loaded in pictures)
    loaded = script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [each for each in loaded if not each.startswith("data:")] == []
    heads = script("return [...document.querySelectorAll('table')].map((t) => [t.caption.textContent.length,"
                   " t.querySelectorAll('thead th[scope=col]').length])")  # fmt: skip
    assert heads
    assert all(caption and columns >= 2 for caption, columns in heads)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(browser: Any, pages: dict[str, Path], dark: bool) -> None:
    """Contrast of at least 4.5, which WCAG 2.1 AA asks of normal text, in light and dark mode."""
    show(browser, pages["pictures"], 1200, dark)
    ratios = browser.execute_script(CONTRAST)
    assert len(ratios) > 100
    assert min(ratios) >= 4.5
    page = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_it_prints_on_white(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["pictures"], 1200, dark=True, media="print")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert min(browser.execute_script(CONTRAST)) >= 4.5


def test_tables_are_sorted_by_a_click_on_their_heads(browser: Any, pages: dict[str, Path]) -> None:
    show(browser, pages["pictures"], 1200)
    table = browser.find_elements("css selector", "table")[1]  # every score of every model on the first outside set
    button = table.find_elements("css selector", "thead button")[2]
    column = "return [...arguments[0].tBodies[0].rows].map((row) => parseFloat(row.children[2].dataset.rank))"
    for order in (sorted, lambda values: sorted(values, reverse=True)):
        button.click()
        values = browser.execute_script(column, table)
        assert values == order(values)
    assert button.find_element("xpath", "..").get_attribute("aria-sort") == "descending"
