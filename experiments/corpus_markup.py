"""Marked-up documentation to text: HTML with its XML kin, man pages, POD."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

MAX_CODE_LINES = 8
"""Longer examples of code are dropped; what surrounds the short ones reads on."""


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


_BLOCKS = _set(
    "p div li dd dt dl ul ol h1 h2 h3 h4 h5 h6 blockquote pre section article main title para item listitem term "
    "screen programlisting code-block note steps"
)
_SKIPPED = _set(
    "script style head nav header footer table form button svg math select noscript info bookinfo articleinfo "
    "sect1info sectioninfo indexterm informaltable media mediaobject screenshot links comment sup"
)
_CODE = _set("pre screen programlisting")
_VOID = _set("area base br col embed hr img input link meta param source track wbr")
_SKIPPED_CLASSES = _set(
    "navheader navfooter toc sphinxsidebar related relations headerlink contents footer menu page-links docnav banner "
    "indextable index genindex copyright legalnotice authorgroup revhistory edition releaseinfo breadcrumbs "
    "breadcrumb search-container nav-chapters mobile-nav mobile-nav-chapters sidetoc navigation up path "
    "highlights-nav bottomlang toplang apache qv page-header admonition-todo table"
)


class _Html(HTMLParser):
    """Text of the main part, a block at a time. DocBook and Mallard, which name their blocks otherwise, too."""

    # Newer Pythons read markup in <title> as text, which DocBook's is not.
    RCDATA_CONTENT_ELEMENTS = ()  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self.text: list[str] = []
        self.skipped: list[str] = []
        self.code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self.text.append("\n" if tag == "br" and self.code else " ")
        elif self.skipped:
            # Only its own name can end it, so that a tag nobody closes does no harm.
            if tag == self.skipped[0]:
                self.skipped.append(tag)
        elif tag in _SKIPPED or _is_navigation(dict(attrs)):
            self.skipped = [tag]
        elif tag in _BLOCKS:
            self.flush()
            self.code += tag in _CODE
            if tag in ("li", "item", "listitem"):
                self.text.append("- ")
        elif tag in ("guimenuitem", "guisubmenu"):
            self.text.append(" > ")

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            if tag == self.skipped[0]:
                self.skipped.pop()
        elif tag in _BLOCKS:
            self.flush()
            self.code = max(0, self.code - (tag in _CODE))

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.text.append(data)

    def flush(self) -> None:
        text, self.text = "".join(self.text), []
        if self.code:
            block = text.strip("\n").rstrip()
            block = "" if block.count("\n") >= MAX_CODE_LINES else block
        else:
            block = re.sub(r"\s+", " ", text).strip()
        if block == "-":
            self.text = ["- "]  # the item's text is in a block of its own
        elif block:
            self.blocks.append(block)


def _is_navigation(attributes: dict[str, str | None]) -> bool:
    names = f"{attributes.get('class') or ''} {attributes.get('id') or ''}".lower().split()
    navigation = attributes.get("role") in ("navigation", "search", "contentinfo")
    return navigation or not _SKIPPED_CLASSES.isdisjoint(names) or any(n.startswith("book-navigation") for n in names)


def html(text: str) -> Iterator[str]:
    """One document a page."""
    main = re.search(r"<[^>]+role=\"main\"[^>]*>|<main[ >]|<div [^>]*id=\"(page-content|content|docContent)\"", text)
    parser = _Html()
    parser.feed(re.sub(r"(?s)<\?.*?\?>|<!\[CDATA\[|\]\]>", "", text[main.start() if main else 0 :]))
    parser.close()
    parser.flush()
    blocks = "\n\n".join(parser.blocks)
    blocks = re.sub(r"&[a-zA-Z][\w.-]*;", "", blocks)
    # Links whose words are in another page leave "For more information, see ." behind.
    yield re.sub(r"(?:(?<=[.!?:)] )|^)[^.\n]*\bsee (?:also )?\.", "", blocks, flags=re.MULTILINE)


_ROFF = {
    "em": "\u2014", "en": "\u2013", "oq": "\u2018", "cq": "\u2019", "lq": "\u201c", "rq": "\u201d", "mu": "\u00d7",
    "aq": "'", "dq": '"', "bu": "-", "co": "©", "ha": "^", "ti": "~", "+-": "±", "->": "→", "<=": "≤", ">=": "≥",
    "rs": "\\", "ga": "`", "de": "°",
}  # fmt: skip
_UNREAD = re.compile(
    r"SYNOPSIS|SEE ALSO|COLOPHON|LIBRARY|VERSIONS?|STANDARDS|CONFORMING TO|AUTHORS?|COPYRIGHT|ATTRIBUTES"
)


def man(text: str) -> Iterator[str]:
    """A man page's prose: without tables, long examples, and the sections that only list things."""
    parts: list[str] = []
    held: list[str] = []
    code: list[str] | None = None
    table, unread = False, False
    for line in text.split("\n"):
        macro, _, rest = line[1:].strip().partition(" ") if line[:1] in (".", "'") else ("", "", line)
        if macro in ("TS", "TE"):
            table = macro == "TS"
        elif macro in ("nf", "EX", "fi", "EE"):
            if code is not None and len(code) <= MAX_CODE_LINES and not unread:
                parts.append("\n".join(code))
            code = [] if macro in ("nf", "EX") else None
        if macro in ("SH", "SS", "PP", "P", "LP", "TP", "IP", "HP", "TQ", "TH", "RS", "RE", "nf", "EX"):
            parts.append(" ".join(held))
            held = []
        if macro in ("SH", "SS"):
            if macro == "SH":
                unread = bool(_UNREAD.match(rest.strip('" ')))
            held = [] if unread else [rest.strip('"')]
            if not unread:
                parts.append(_roff(held.pop()))
            continue
        if table or unread or macro in ("TH", "PP", "P", "LP", "TP", "HP", "RS", "RE", "nf", "fi", "EX", "EE", "TS"):
            continue
        said = _roff(_arguments(macro, rest) if macro else line)
        if code is not None:
            code.append(said)
        elif said.strip():
            held.append(said.strip())
    yield "\n\n".join([*parts, " ".join(held)])


def _arguments(macro: str, rest: str) -> str:
    words = [a or b for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
    if macro in ("B", "I", "SM", "SB", "UR", "MT"):
        return " ".join(words)
    if macro == "IP":
        return " ".join(words[:1])
    return "".join(words) if macro in ("BR", "RB", "IR", "RI", "BI", "IB") else ""


def _roff(text: str) -> str:
    text = re.sub(r'\\".*', "", text)
    text = re.sub(r"\\f(?:\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&%|^:/,)]|\\c$", "", text)
    text = re.sub(r"\\\*?\((..)|\\\*?\[(\w+)\]", lambda m: _ROFF.get((m[1] or m[2]).lower(), ""), text)
    return re.sub(r"\\(.)", lambda m: {"-": "-", "e": "\\", " ": " ", "~": " ", "0": " "}.get(m[1], m[1]), text)


def pod(text: str) -> Iterator[str]:
    """Perl's POD, a file a document."""
    parts, skipping = [], True
    for part in re.split(r"\n\s*\n", text):
        if command := re.match(r"=(\w+)\s*(.*)", part, re.DOTALL):
            name, said = command[1], " ".join(command[2].split())
            if name not in ("for", "encoding"):
                skipping = name in ("begin", "cut")
            if name.startswith(("head", "item")):
                parts.append(_pod(said.lstrip("*0123456789. ") if name == "item" else said))
        elif not skipping:
            code = part[:1] in " \t"
            if not code or part.count("\n") < MAX_CODE_LINES:
                parts.append(part.strip("\n") if code else _pod(" ".join(part.split())))
    yield "\n\n".join(filter(None, parts))


def _pod(text: str) -> str:
    names = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "nbsp": " "}
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", text)
    before = ""
    while before != text:
        before = text
        text = re.sub(r"E<(\w+)>", lambda m: f"\x00{names.get(m[1], '')}\x00", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2].strip("/").replace('"', ""), text)
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
        text = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", text)
    return text.replace("\x00", "")
