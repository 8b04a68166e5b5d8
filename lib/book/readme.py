"""The README's table of claims, made from the reference notebooks; a test keeps it current."""

from collections import Counter

from lib.book import claims, records
from lib.book.toc import ROOT

BEGIN, END = "<!-- claims: made by `make accept`, do not edit -->", "<!-- end of claims -->"


def scoreboard_text(rows: list[dict]) -> str:
    """One line a claim for the terminal, and the totals."""
    width = max(len(row["id"]) for row in rows)
    lines = [f"{row['id']:{width}}  {row['verdict']:13}  {row['chapter']:20}  {row['place']}" for row in rows]
    total = Counter(row["verdict"] for row in rows)
    lines.append("; ".join(f"{verdict}: {total[verdict]}" for verdict in claims.VERDICTS))
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    """Markdown: settled claims one by one, the planned ones as counts."""
    done = [row for row in rows if row["verdict"] != "not yet run"]
    waiting = Counter(row["chapter"] for row in rows if row["verdict"] == "not yet run")
    lines = ["| claim | what it says | verdict |", "| --- | --- | --- |"]
    for row in done:
        lines.append(f"| [{row['id']}](chapters/{row['chapter']}.md) | {row['statement']} | **{row['verdict']}** |")
    total = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{total[verdict]} {verdict}" for verdict in claims.VERDICTS)
    lines += ["", f"Of {len(rows)} claims: {summary}."]
    if waiting:
        lines.append(
            "Planned chapters and their claims: " + ", ".join(f"`{name}` {count}" for name, count in sorted(waiting.items())) + "."
        )
    return "\n".join(lines)


def current() -> str:
    """What the README should be."""
    text = (ROOT / "README.md").read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"README.md lacks the marks {BEGIN!r} and {END!r}; the claims table goes between them.")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{table(records.gather(references=True))}\n{END}{rest.split(END, 1)[1]}"


def refresh() -> bool:
    """Rewrite the table; says whether anything changed."""
    path = ROOT / "README.md"
    new = current()
    if new == path.read_text():
        return False
    path.write_text(new)
    return True
