"""Dashboard of a job: its events folded into one view, shown as a page and in the terminal.

`story` is pure; `serve` shows it to browsers, `top` to a terminal. Where events come from is the caller's affair.
"""
