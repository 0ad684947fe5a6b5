"""From evidence to tables, plots and Markdown."""
