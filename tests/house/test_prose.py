"""How README and the pages are written: short, in standard words, with links that lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
WRITTEN = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "SECURITY.md", *WRITTEN, *sorted((ROOT / "docs" / "reference").glob("*.md"))]
SOURCES = sorted(path for package in ("distill", "data", "speculative") for path in (ROOT / package).rglob("*.py"))
LONGEST_LINE = 160
# docs/style.md shows what not to write.
SHOWS_BAD_PROSE = {"style.md"}
BANNED = re.compile(
    r"\b(anew|referees?|house engine|pay(s|ing)? the teacher|paid once|what is free|rivals?|no rank is left)\b|"
    r"\bthe rooms\b|\bdraft models that (your|an?|a target) LLM agrees with",
    re.IGNORECASE,
)
# ".26" in a sentence or a table: a version, a suffix or an attribute has a character before it.
NO_LEADING_ZERO = re.compile(r"(?<![\w.)\]/*`-])\.\d")


# In names of tests: words of a speaker or a race, where an engineer would say what is reported or which way is slower.
NOT_IN_NAMES = re.compile(r"_(told|said|who|everybody|no_further)(_|$)")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def words(text: str) -> int:
    """What is separated by blanks and has a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_readme_is_read_in_three_minutes() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 130
    assert len(text.split()) <= 1000  # with the bars of tables
    assert max(map(len, text.splitlines())) <= LONGEST_LINE


def test_the_pages_stay_short() -> None:
    assert sum(words(path.read_text(encoding="utf-8")) for path in WRITTEN) <= 23_500


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_standard_words_and_numbers(path: Path) -> None:
    if path.name in SHOWS_BAD_PROSE:
        return
    text = prose(path.read_text(encoding="utf-8"))
    assert [match.group() for match in BANNED.finditer(text)] == []
    assert [text[match.start() - 20 : match.end() + 10] for match in NO_LEADING_ZERO.finditer(text)] == []


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_a_page_is_readable_in_an_editor(path: Path) -> None:
    lines = prose(path.read_text(encoding="utf-8")).splitlines()
    assert [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")] == []


def test_strings_have_standard_words() -> None:
    found = []
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        # Strings in a row are one, and an escape is no letter. Parsing every file takes seconds.
        if not BANNED.search(re.sub(r"\\[nt]", " ", re.sub(r"""(["']) *\n* *f?\1""", "", source))):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and (match := BANNED.search(node.value)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {match.group()}")
    assert found == []


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        there = path.parent / file if file else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_names_of_tests_are_plain_english() -> None:
    names = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.M)
    ]
    assert len(names) > 1500
    assert [name for name in names if NOT_IN_NAMES.search(name)] == []
