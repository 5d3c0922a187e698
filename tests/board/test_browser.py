"""The pages in a headless Chromium."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.data.arrays import from_arrays
from coterie.results.discovery import find_runs
from coterie.results.report import page
from support.browser import errors, resize, until

pytestmark = pytest.mark.xdist_group("browser")


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
    forest = driver.find_elements(By.CSS_SELECTOR, "svg.forest circle[data-row]")
    assert len(forest) == len(driver.find_elements(By.CSS_SELECTOR, "table[data-part=arena] tbody tr")) > 0
    driver.execute_script("zoomTo([2, 2.5])")
    assert driver.execute_script("return !$('unzoom').classList.contains('hidden')")
    assert errors(driver) == []


# ---- the board -------------------------------------------------------------------------------------------------------
TOKEN = "a-token-for-the-browser"


@contextmanager
def serving(root: Path, federation: Path | None = None):
    """Serve a board in a thread; yield its address."""
    pytest.importorskip("uvicorn", reason="the board needs the extra board")
    from coterie.board import server
    from coterie.board.app import open_board

    with server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        board = open_board(root, federation)
        running = server.server(board, TOKEN, port)
        thread = threading.Thread(target=running.run, args=([listening],))
        thread.start()
        try:
            until(lambda: running.started, "the board accepts connections")
            yield f"http://127.0.0.1:{port}/"
        finally:
            running.should_exit = True
            thread.join(20)
            for started in board.control.started.values():  # a board does not end its runs, a test does
                started.terminate()
                started.wait(60)


def points(driver, chart: str = "plot", line: str = "mine") -> int:
    """Return the number of points of a line in a chart."""
    script = (
        f"return Math.max(0, ...[...document.querySelectorAll('#{chart} polyline[data-series=\"{line}\"]')]"
        ".map(p => p.getAttribute('points').split(' ').length))"
    )
    return driver.execute_script(script)


def press(driver, which: str) -> None:
    driver.execute_script(f"document.querySelector({which!r}).click()")


def text(driver, which: str) -> str:
    return driver.execute_script(f"return document.querySelector({which!r})?.textContent || ''")


def unlock(driver, token: str) -> None:
    driver.execute_script("document.getElementById('token-said').textContent = ''")
    driver.execute_script(f"document.getElementById('token').value = {token!r}")
    press(driver, "#unlock")


def test_a_run_is_started_its_curve_grows_and_it_is_stopped_with_the_token(driver, tmp_path) -> None:
    evil = "<img src=x onerror=document.title='harmed'>"
    plain = {"clients": 3, "rounds": 1, "join": 1.0, "epochs": 1, "min_size": 10, "workers": 1}
    coterie.run("local", out=tmp_path / evil, **plain)
    resize(driver, 1400)
    with serving(tmp_path) as address:
        driver.get(address)
        assert "token" in until(lambda: text(driver, "#token-said"), "the page asks for the token")
        unlock(driver, "not the token")
        assert "token" in until(lambda: text(driver, "#token-said"), "a refusal") and not text(driver, "#table tbody")
        unlock(driver, TOKEN)
        until(lambda: text(driver, "#live") == "live", "the board is live")
        assert evil in until(lambda: text(driver, "#table tbody"), "the table is filled") and driver.title != "harmed"
        fields = {"rounds": "5000", "clients": "4", "epochs": "1", "name": "mine", "more": "eval_every=2, min_size=10"}
        for name, value in fields.items():
            driver.execute_script(f"document.querySelector('#start [name={name}]').value = {value!r}")
        driver.execute_script("token = 'forgotten'")
        press(driver, "#go")
        assert "token" in until(lambda: text(driver, "#start-said"), "a refusal") and not (tmp_path / "mine").exists()
        driver.execute_script(f"token = {TOKEN!r}")
        press(driver, "#go")
        until(lambda: "started" in text(driver, "#start-said"), "the run is started")
        first = until(lambda: points(driver), "a curve", 180)
        until(lambda: points(driver) > first, "the curve grows", 120)
        assert "running" in text(driver, '#table tr[data-id="mine"]')

        press(driver, '#table tr[data-id="mine"] button.open')
        until(lambda: text(driver, "#clients-table"), "the clients", 60)
        press(driver, "#clients-table tbody tr:nth-child(3) button.open")
        until(lambda: points(driver, "client-plot", "client 2"), "the client's curve", 60)
        assert "Client 2" in text(driver, "#one-client")

        driver.execute_script("token = 'forgotten'")
        press(driver, "#stop")
        assert "token" in until(lambda: text(driver, "#run-said"), "a refusal")
        driver.execute_script(f"token = {TOKEN!r}")
        press(driver, "#stop")
        until(lambda: "stopped" in text(driver, '#table tr[data-id="mine"]'), "the run is stopped", 60)
        found = coterie.open_run(tmp_path / "mine")
        assert 0 < found.last_round < 5000 and not found.warnings()
        assert driver.title == "Coterie board"
    until(lambda: "lost" in text(driver, "#live"), "the page says that the board is gone")
    assert [e for e in errors(driver) if "401" not in e and "ERR_" not in e] == []


def test_charts_are_apart_by_metric_and_errors_are_folded(driver, tmp_path) -> None:
    """One page shows what strangers stumbled over: two metrics on one axis, an error many times, "-index 0.6"."""
    rng = np.random.default_rng(0)
    x, plain = rng.normal(size=(200, 4)).astype("float32"), {"clients": 3, "rounds": 3, "epochs": 1, "workers": 1}
    for seed in (0, 1):
        coterie.run("fedavg", out=tmp_path / f"a-s{seed}", seed=seed, eval_every=1, subset=300, **plain)
    data = from_arrays(x, x[:, 0] + 0.1 * rng.normal(size=200))
    coterie.run("fedavg", data, out=tmp_path / "numbers", eval_every=1, **plain)
    resize(driver, 1280)
    with serving(tmp_path) as address:
        driver.get(f"{address}#token={TOKEN}")
        until(lambda: points(driver, "plot-1", "numbers") == 3, "a chart of its own for the second metric")
        driver.execute_script("$('seeds').checked = true; $('seeds').onchange()")
        assert points(driver, "plot", "a (2 seeds)") == 3
        driver.execute_script("$('smooth').value = 0.5; $('smooth').oninput()")
        lines = "return document.querySelectorAll('#plot polyline').length"
        assert driver.execute_script(lines) == 2  # the numbers, and their smooth mean
        driver.execute_script("zoomTo([2, 3])")
        assert points(driver, "plot", "a (2 seeds)") == points(driver, "plot-1", "numbers") == 2
        press(driver, "#unzoom")
        assert points(driver, "plot", "a (2 seeds)") == 3
        move = "const m = new PointerEvent('pointermove', {clientX: 600}); $('plot').dispatchEvent(m);"
        driver.execute_script(move)
        assert all(name in text(driver, "#tip") for name in ("a (2 seeds)", "numbers"))
        assert driver.execute_script("return scoreCard('C-index 0.6027').textContent") == "0.6027C-index"
        wrong = "Array.from({length: 352}, (_, i) => ({round: i, client: i % 2, why: 'too late'}))"
        folded = driver.execute_script(f"return folded({wrong}, w => w.why, inRounds)")
        assert folded == "352 times: too late (rounds 0 to 351, clients 0, 1)"
        press(driver, '#table tr[data-id="a-s0"] button.open')
        until(lambda: points(driver, "all-clients", "client 2") == 3, "all clients over the rounds")
        assert not driver.execute_script("return !!$('run-log')")  # no empty box
    assert [e for e in errors(driver) if "ERR_" not in e] == []


@pytest.mark.long
def test_a_killed_device_is_shown_as_gone_within_30_seconds(driver, tmp_path) -> None:
    pytest.importorskip("grpc", reason="a federation needs the extra federation")
    from coterie.federation.localhost.trial import LocalFederation

    given = {"data": "digits", "subset": 400, "model": "mlp", "epochs": 1, "join": 1.0, "rounds": 5000}
    resize(driver, 1400)
    with (
        LocalFederation(tmp_path / "f", "fedavg", 3, 0, given, deadline=600, min_clients=2) as local,
        serving(tmp_path, tmp_path / "f") as address,
    ):
        driver.get(f"{address}#token={TOKEN}")
        for i in range(3):
            until(lambda i=i: "online" in text(driver, f"[data-node=device-{i}]"), f"device-{i} is online", 300)
        local.wait(300, round=2)
        local.children["device-1"].kill()
        began = time.monotonic()
        until(lambda: "gone" in text(driver, "[data-node=device-1]"), "the dead device is gone", 30)
        assert time.monotonic() - began < 30
        assert "last seen" in text(driver, "[data-node=device-1]") and "online" in text(driver, "[data-node=device-0]")
        until(lambda: "device-1" in text(driver, "#f-errors"), "the round says who was missed", 120)
        local.launch("device-1")
        until(lambda: "online" in text(driver, "[data-node=device-1]"), "it is back", 240)
        local.children["cloud"].kill()
        until(lambda: "no heartbeat" in text(driver, "#f-trouble"), "the cloud is silent", 40)
    assert [e for e in errors(driver) if "ERR_" not in e] == []


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_board_fits_its_window(driver, tmp_path, width, dark) -> None:
    coterie.run("fedavg", out=tmp_path / ("long-name-" * 12), clients=3, rounds=2, min_size=10, workers=1)
    resize(driver, width, dark)
    with serving(tmp_path) as address:
        driver.get(f"{address}#token={TOKEN}")
        until(lambda: text(driver, "#table tbody"), "the table is filled")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        press(driver, "#table button.open")
        until(lambda: text(driver, "#clients-table"), "the clients")
        assert driver.execute_script(
            "const d = document.getElementById('run'); return d.scrollWidth <= d.clientWidth + 1"
        )
