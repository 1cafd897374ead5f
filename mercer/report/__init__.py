"""Run records in, evidence out: comparison table, figures, and one HTML page."""

from mercer.report.page import write_report
from mercer.report.table import Row, comparison_table, format_table, markdown_table

__all__ = ["Row", "comparison_table", "format_table", "markdown_table", "write_report"]
