"""Tables of text, for terminals and for Markdown."""

from dataclasses import dataclass, field


# Columns where the output is no terminal.
FILE_WIDTH = 140


@dataclass
class Table:
    """
    A table of text.

    Args:
        title (`str`): What it shows.
        columns (`list[str]`): Headings.
        rows (`list[list[str]]`, *optional*, defaults to `[]`): Cells.
    """

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def print(self, console) -> None:
        """Print to a [`rich.console.Console`]."""
        from rich.table import Table as RichTable

        table = RichTable(title=self.title)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def to_markdown(self) -> str:
        """The table in Markdown, below its title."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def make_console():
    """A [`rich.console.Console`] on the standard output, wide enough for tables where that is a file."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
