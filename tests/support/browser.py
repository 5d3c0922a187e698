"""A headless Chromium for tests of report and board."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """Start Chromium. If it is not installed, skip the test, or fail it if COTERIE_REQUIRE_BROWSER is 1."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        absent = pytest.fail if os.environ.get("COTERIE_REQUIRE_BROWSER") == "1" else pytest.skip
        absent("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        found.set_script_timeout(20)
        yield found
    finally:
        found.quit()


def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Wait for a true value of the condition and return it; fail with the words `what` after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    pytest.fail(f"not within {seconds:g} s: {what}")


def errors(driver: Any) -> list[str]:
    """Return the errors that scripts of the page have logged since the last call."""
    return [e["message"] for e in driver.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]]


def resize(driver: Any, width: int, dark: bool = False) -> None:
    about = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", about)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
