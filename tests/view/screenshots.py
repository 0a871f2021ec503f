"""The pictures of docs/seeing.md, from runs of one's own.

    CHROMIUM=/usr/bin/chromium python -m tests.view.screenshots RUNS FIRST SECOND FOLDER

RUNS is the folder of runs, FIRST and SECOND are names below it. Needs the package playwright.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from playwright.sync_api import Page, sync_playwright

DESKTOP, PHONE = {"width": 1180, "height": 720}, {"width": 390, "height": 780}


def task_of_the_first(page: Page) -> None:
    """From a list to the first episode's group."""
    page.locator("tbody td a").first.click()
    page.wait_for_selector(".card")


def by_token(page: Page) -> None:
    """An episode token by token, with one of its tokens told."""
    page.select_option("label:has-text('show') select", "tokens")
    page.locator(".tokens").first.focus()
    for _ in range(16):
        page.keyboard.press("ArrowRight")


def main(root: str, first: str, second: str, folder: str) -> None:
    """Takes them all."""
    episodes = f"#episodes?run={first}&log=rl"
    shots = (  # name, view, what must be there, what is done before, size, colours
        ("curves", f"#curves?run={first}&with={second}&smooth=0.6", "canvas", None, DESKTOP, "light"),
        ("episodes", f"{episodes}&by=tokens&words=capital", "tbody td.text:not(:empty)", None, DESKTOP, "light"),
        ("group", f"{episodes}&reward=0..0.5&step=..30", "tbody tr", task_of_the_first, DESKTOP, "dark"),
        ("episode", f"#episode?run={first}&log=rl&row=300", ".one", by_token, DESKTOP, "light"),
        ("phone", f"#episode?run={first}&log=rl&row=300", ".one", by_token, PHONE, "dark"),
    )
    words = [sys.executable, "-m", "jaxagent.view", root, "--port=0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        address = str(server.stdout and server.stdout.readline().strip())
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
            for name, view, wanted, then, size, scheme in shots:
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(address + view)
                page.wait_for_selector(wanted)
                page.wait_for_timeout(500)
                if then:
                    then(page)
                    page.wait_for_timeout(500)
                page.screenshot(path=pathlib.Path(folder) / f"{name}.png")
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main(*sys.argv[1:])
