"""The pages as a person uses them, in a headless Chromium."""

import pytest

import coterie
from browser import browser, errors, resize, until
from coterie.report import page
from coterie.runs.found import find_runs

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("pages")
    plain = {"clients": 5, "rounds": 2, "join": 1.0, "eval_every": 1, "epochs": 1, "min_size": 10}
    coterie.compare(["fedavg", "fedper"], out=out / "c", workers=1, **plain)
    (out / "r.html").write_text(page.render(find_runs([out / "c"])))
    return (out / "r.html").as_uri()


def test_a_report_is_sorted_filtered_and_opened_by_keyboard(driver, report) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    resize(driver, 1400)
    driver.get(report)
    head = driver.find_elements(By.CSS_SELECTOR, "#summary thead th")[1]
    assert head.get_attribute("aria-sort") == "descending"  # by personal accuracy, best first
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert head.get_attribute("aria-sort") == "ascending"
    shown = [
        float(c.get_attribute("data-v"))
        for c in driver.find_elements(By.CSS_SELECTOR, "#summary tbody tr td:nth-child(2)")
    ]
    assert shown == sorted(shown) and len(shown) == 3

    driver.find_element(By.ID, "filter").send_keys("avg")
    rows = driver.find_elements(By.CSS_SELECTOR, "#summary tbody tr")
    assert [r.text.split()[0] for r in rows if r.is_displayed()] == ["FedAvg"]
    assert len(driver.find_elements(By.CSS_SELECTOR, "#plot polyline[data-series]")) == 1
    driver.find_element(By.ID, "filter").send_keys(Keys.BACKSPACE * 3)

    driver.find_elements(By.CSS_SELECTOR, "#clients-table button.open")[2].send_keys(Keys.ENTER)
    dialog = driver.find_element(By.ID, "client")
    assert dialog.is_displayed() and "Client 2" in dialog.text
    assert len(dialog.find_elements(By.CSS_SELECTOR, "tbody tr")) == 3
    assert len(dialog.find_elements(By.CSS_SELECTOR, "polyline[data-series]")) == 3
    dialog.send_keys(Keys.ESCAPE)
    until(lambda: not dialog.is_displayed(), "the dialog closes")

    for width in (1400, 390):
        resize(driver, width, dark=width == 390)
        driver.refresh()
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    driver.find_element(By.ID, "theme").click()
    assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    driver.execute_script(
        "window.made = {}; window.save = (name, blob) => { made[name] = blob.size; };"
        "document.querySelector('[data-png=plot]').click(); document.querySelector('[data-svg=plot]').click();"
        "document.querySelector('button[data-csv=clients]').click();"
    )
    made = until(lambda: len(m := driver.execute_script("return made")) == 3 and m, "three downloads are made")
    assert made["plot.png"] > 1000 and made["plot.svg"] > 1000 and made["clients.csv"] > 100
    assert errors(driver) == []
