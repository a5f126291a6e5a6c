"""`python -m benchmarks.pages.screenshots [PAGE ...]`: pictures of the built site, and pages that do not fit.

It needs playwright, which is not among the pinned packages, and a browser: `pip install playwright`, then `playwright
install chromium`, or `--browser /usr/bin/chromium`. `make docs` builds the site. A PAGE is a folder of `site/`, such as
`training`. The pictures go to `screenshots/`, light and dark, at the widths of a desktop and of a phone.
"""

import argparse
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DESKTOP, PHONE = (1280, 800), (390, 844)
# A page that takes more screens of the desktop should be split.
SCREENS = 10


_MEASURE = """() => {
    const {scrollWidth, clientWidth, scrollHeight} = document.documentElement;
    return {scroll: scrollWidth, client: clientWidth, height: scrollHeight};
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def pages(site: Path) -> list[str]:
    """Return the addresses of all pages below the root of the site."""
    found = [path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")]
    return sorted("" if address == "." else f"{address}/" for address in found)


def complaints(address: str, size: tuple[int, int], measured: dict[str, int]) -> Iterator[str]:
    """Yield what is wrong with a page in a window, given its widths and height in pixels."""
    width, height = size
    if measured["scroll"] > measured["client"]:
        wider = measured["scroll"] - measured["client"]
        yield f"{address or 'home'}: scrolls sideways by {wider} pixels at a width of {width}"
    if size == DESKTOP and measured["height"] > SCREENS * height:
        yield f"{address or 'home'}: takes {measured['height'] / height:.1f} screens at a width of {width}"


def look(site: Path, folder: Path, addresses: list[str], browser: str | None, *, pictures: bool) -> list[str]:
    """Return the complaints about pages, in the order of the pages, and write their pictures to a folder."""
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found: dict[str, list[str]] = {address: [] for address in addresses}
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser)
        for size in (DESKTOP, PHONE):
            for scheme in ("light", "dark"):
                context = chromium.new_context(
                    viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce"
                )
                tab = context.new_page()
                for address in addresses:
                    tab.goto(f"http://127.0.0.1:{server.server_port}/{address}")
                    # Both schemes have one layout.
                    if scheme == "light":
                        measured = tab.evaluate(_MEASURE)
                        found[address] += complaints(address, size, measured)
                    if pictures:
                        name = address.strip("/").replace("/", "-") or "home"
                        folder.mkdir(exist_ok=True, parents=True)
                        tab.screenshot(
                            path=folder / f"{name}-{size[0]}-{scheme}.jpg", full_page=True, quality=60, type="jpeg"
                        )
                context.close()
        chromium.close()
    server.shutdown()
    return [complaint for some in found.values() for complaint in some]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages.screenshots", description=__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="look at these pages instead of all")
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "screenshots")
    parser.add_argument("--browser", help="the program of a Chromium; else the one that playwright installed")
    parser.add_argument("--no-pictures", action="store_true", help="measure the pages only")
    options = parser.parse_args()
    addresses = [f"{page.strip('/')}/" if page.strip("/") else "" for page in options.pages] or pages(options.site)
    found = look(options.site, options.out, addresses, options.browser, pictures=not options.no_pictures)
    print("\n".join(found) or f"{len(addresses)} pages fit")


if __name__ == "__main__":
    main()
