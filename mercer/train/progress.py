"""What a training run shows while it runs: one line on a terminal, nothing in a file."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Show the step, the losses (or another `quantity`), tokens per second and the time left; silent where `console`
    is no terminal.
    """

    def __init__(self, console: Console, label: str, steps: int, done: int, *, visible: bool, quantity: str = "loss"):
        self.console, self._quantity = console, quantity
        self._columns = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not (visible and console.is_terminal),
        )
        self._task = self._columns.add_task(label, total=steps, completed=done, text="")
        self._valid = ""

    def __enter__(self) -> "Display":
        self._columns.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._columns.stop()

    def step(self, step: int, loss: float, tokens_per_second: float, valid_loss: float | None) -> None:
        """Move to the end of a step."""
        if valid_loss is not None:
            self._valid = f"  valid {valid_loss:.3f}"
        text = f"{self._quantity} {loss:.3f}{self._valid}  {tokens_per_second:,.0f} tokens/s"
        self._columns.update(self._task, completed=step, text=text)
