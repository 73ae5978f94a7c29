"""One table, two renderings: rich for a terminal, Markdown for a document."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table as RichTable


@dataclass
class Table:
    """Columns of text: the first `labels` are flush left, the rest are numbers and flush right."""

    title: str
    columns: Sequence[str]
    labels: int = 1
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: a row needs {len(self.columns)} cells ({self.columns}), got {cells}")
        self.rows.append(cells)

    def to_rich(self) -> RichTable:
        table = RichTable(
            title=self.title, caption="\n".join(self.notes) or None, box=box.SIMPLE_HEAD, caption_justify="left"
        )
        for i, column in enumerate(self.columns):
            # Where it gets narrow the last label, the longest, is broken into lines, before numbers become dots.
            table.add_column(column, justify="left" if i < self.labels else "right", no_wrap=i < self.labels - 1)
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        rule = [":--" if i < self.labels else "--:" for i in range(len(self.columns))]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([*lines, "", *self.notes] if self.notes else lines)
