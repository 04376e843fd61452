"""Tests that each section of docs/kafka/ that the source cites exists as a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "storage format": "storage-format.md",
    "wire protocol": "wire-protocol.md",
    "clients reference": "clients.md",
    "broker reference": "broker.md",
}
NUMBER = r"\d+(?:\.\d+)?"
CITED = re.compile(
    rf"({'|'.join(PAGES)}),?(?: sections?)? ({NUMBER}(?:(?:, and|,| and| to|; section) {NUMBER})*)"
    rf"(?:[^()\n]*; section ({NUMBER}))?",
    re.IGNORECASE,
)


def cited_sections(text: str) -> list[tuple[str, str]]:
    citations = []
    for page, numbers, further_numbers in CITED.findall(
        re.sub(r"\s*\n[ #:]*", " ", text)
    ):
        for first, last in re.findall(
            rf"({NUMBER})(?: to ({NUMBER}))?", f"{numbers}, {further_numbers}"
        ):
            name = PAGES[page.lower()]
            citations.append((name, first))
            if last:
                chapter, first_number = first.split(".")
                citations += [
                    (name, f"{chapter}.{number}")
                    for number in range(
                        int(first_number) + 1, int(last.split(".")[1]) + 1
                    )
                ]
    return citations


def headings(page: str) -> set[str]:
    text = (ROOT / "docs" / "kafka" / page).read_text(encoding="utf-8")
    return set(re.findall(rf"^##+ ({NUMBER})[. ]", text, flags=re.MULTILINE))


def sources() -> list[Path]:
    return sorted(
        path
        for path in (ROOT / "src").rglob("*")
        if path.suffix in (".py", ".pyx", ".pxi")
    )


def test_each_citation_leads_to_a_heading() -> None:
    headings_by_page = {page: headings(page) for page in PAGES.values()}
    citations = [
        (path, *row)
        for path in sources()
        for row in cited_sections(path.read_text(encoding="utf-8"))
    ]
    assert len(citations) > 60
    assert not [
        citation
        for citation in citations
        if citation[2] not in headings_by_page[citation[1]]
    ]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("storage format sections 5.1 to 5.3", ["5.1", "5.2", "5.3"]),
        ("storage format sections 1.8 and 1.9", ["1.8", "1.9"]),
        (
            "storage format section 6, leader-epoch-checkpoint; section 11.4, and so on",
            ["6", "11.4"],
        ),
        ("clients reference 2.3, 2.4, 2.8", ["2.3", "2.4", "2.8"]),
        ("broker reference, sections 3.4 to 3.6", ["3.4", "3.5", "3.6"]),
        ("wire protocol section\n    7, Offsets", ["7"]),
    ],
)
def test_citations_in_texts_are_recognized(text: str, numbers: list[str]) -> None:
    assert [number for _, number in cited_sections(text)] == numbers
