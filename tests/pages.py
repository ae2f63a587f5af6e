"""What an HTML page would load, found by parsing it; a module of its own, since the tests of two rooms read pages."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Addresses that a browser fetches for a page, the texts of its links, and its text.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: dict[str, str] = {}
        self.text = ""
        self.tags: list[str] = []
        self._inside: list[str] = []
        self._href = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self._inside = [*self._inside, tag] if tag in ("script", "style", "a") else self._inside
        names = ("src", "srcset", "data", "poster", "background", "action", "xlink:href")
        self.loads += [given[name] for name in names if given.get(name)]
        if tag in ("link", "image", "use", "base") and given.get("href"):
            self.loads.append(given["href"])
        self.loads += re.findall(r"url\(\s*['\"]?([^'\")]+)", given.get("style") or "")
        assert not [name for name in given if name.startswith("on")], f"{tag} has a handler: {given}"
        if tag == "a":
            self._href = given.get("href") or ""

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside = self._inside[:-1]

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "style":
            self.loads += re.findall(r"url\(\s*['\"]?([^'\")]+)", data)
            self.loads += re.findall(r"@import[^;]*", data)
        elif inside == "script":
            self.loads += re.findall(r"(?:import|fetch|from)\s*\(?\s*['\"]([^'\"]+)", data)
            self.loads += re.findall(r"\.src\s*=[^;]*", data)
        else:
            self.text += data
            if inside == "a":
                self.links[data] = self._href

    @property
    def from_elsewhere(self) -> list[str]:
        """What is not in the page itself."""
        return [address[:200] for address in self.loads if not address.strip().startswith("data:")]
