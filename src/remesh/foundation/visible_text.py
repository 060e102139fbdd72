"""Visible form of a text that may come out of a stranger's file: nothing in it that a terminal obeys."""


def visible(text: str) -> str:
    """The text, with what a terminal would obey instead of showing, such as an escape sequence, as Python writes it.

    >>> visible("a[/b]\\x1b[31m")
    'a[/b]\\\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
