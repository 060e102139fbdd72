"""Check that the host program of a module is installed and new enough; the error names the extra that brings it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from remesh.foundation.errors import ConfigError


def check_host(package: str, at_least: tuple[int, int]) -> None:
    """Raise `ConfigError` unless the package is installed in this version or a later one.

    >>> check_host("pip", (20, 0))
    """
    wanted = f"{package}>={at_least[0]}.{at_least[1]}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ConfigError(
            f"plugging into {package}: expected {wanted}, found none; pip install 'remesh[{package}]'"
        ) from None
    if _numbers_of(found) < at_least:
        raise ConfigError(
            f"plugging into {package}: expected {wanted}, found {found}; pip install --upgrade 'remesh[{package}]'"
        )


def _numbers_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int("".join(char for char in part if char.isdigit()) or 0) for part in text.split(".")[:2])
