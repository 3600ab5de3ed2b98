#!/usr/bin/env python3
"""Follows every link of a site that mdBook has built: `links.py SITE DOCS`.

Each page of DOCS must be in the site; each link inside the site must lead to a file, and its anchor to an element of it. A page
may link to other hosts, but load nothing from them: the site is read without a network. Names what is wrong; ends with 1 then.
"""

import pathlib
import re
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

# What a browser fetches without being asked to.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.ids.add(value)
            elif (tag, name) in LOADED:
                self.loads.add(value)
            elif (tag, name) == ("a", "href"):
                self.links.add(value)


def main(site, docs):
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    wrong, followed = [], 0
    for source in docs.rglob("*.md"):
        page = site / source.relative_to(docs).with_suffix(".html")
        if source.name != "SUMMARY.md" and page.resolve() not in pages:
            wrong.append(f"{source}: SUMMARY.md does not name it")
    for path, page in pages.items():
        for link in sorted(page.links | page.loads):
            where, to = path.relative_to(site.resolve()), urlsplit(link)
            if to.scheme or to.netloc:
                if link in page.loads and to.scheme != "data":
                    wrong.append(f"{where}: loads {link}")
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            followed += 1
            if not target.is_relative_to(site.resolve()) or not target.is_file():
                wrong.append(f"{where}: {link}: no such file in the site")
            elif to.fragment and target in pages and unquote(to.fragment) not in pages[target].ids:
                wrong.append(f"{where}: {link}: no such heading")
    for style in site.rglob("*.css"):
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)", style.read_text(encoding="utf-8")):
            wrong.append(f"{style.name}: loads {url}")
    print(f"{len(pages)} pages, {followed} links, {len(wrong)} of them wrong")
    if followed < 300:
        wrong.append("that is too few: this is no site of ours")
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:3])))
