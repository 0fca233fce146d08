"""Markdown files that hold a generated table between two marks: `written by` a module, and `end`."""


def with_table(text: str, maker: str, table: str) -> str:
    """`text` with `table` between the marks of `maker`. Raises: ValueError unless both stand there once."""
    begin, end = f"<!-- table: written by {maker} -->", f"<!-- table: end of {maker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected {begin} and {end} once each. HINT: put them back, with nothing between.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
